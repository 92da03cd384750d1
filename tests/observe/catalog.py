"""Every metric there is, as one list; printed as the table of docs/operating.md:

PYTHONPATH=src:tests python -m observe.catalog
"""

from coslice.agent import metrics as agent
from coslice.observe.board import INFO
from coslice.observe.lag import LAG
from coslice.observe.metric import Metric
from coslice.orchestrator import job_meter
from coslice.orchestrator import metrics as orchestrator

ALL: tuple[Metric, ...] = (
    INFO,
    LAG,
    *orchestrator.OF_PROCESS,
    *orchestrator.OF_GROUPS,
    *orchestrator.HISTOGRAMS,
    *orchestrator.COUNTED,
    *job_meter.OF_JOBS,
    *agent.OF_NODE,
    *agent.PUSHED,
)
BY_NAME = {metric.name: metric for metric in ALL}


def series(name: str) -> Metric | None:
    """The metric that a name of the exposition belongs to: a histogram has three."""
    for suffix in ("", "_bucket", "_sum", "_count"):
        found = BY_NAME.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
        if found is not None and (not suffix or found.kind == "histogram"):
            return found
    return None


def row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.unit} | {metric.help} |"


if __name__ == "__main__":
    print("\n".join(row(metric) for metric in ALL))
