"""Writes the dashboard: ``python tools/grafana.py > deploy/grafana/coslice.json``.

One line per panel here is easier to read and to change than the JSON of Grafana. A test sees that the file is
what this writes, and that every metric and label in it exists.
"""

import json
from typing import Any, NamedTuple

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
GROUP = '{group=~"$group"}'
RATE = "[$__rate_interval]"
Query = tuple[str, str]
"""PromQL, and the legend of its curves."""


class Panel(NamedTuple):
    title: str
    unit: str
    meaning: str
    queries: tuple[Query, ...]


def legend(by: str, more: str = "") -> str:
    return " ".join("{{" + label.strip() + "}}" for label in by.split(",")) + more


def now(metric: str, by: str = "group", *, of: str = GROUP, how: str = "sum") -> Query:
    return f"{how} by ({by}) ({metric}{of})", legend(by)


def rate(metric: str, by: str = "group") -> Query:
    return f"sum by ({by}) (rate({metric}{GROUP}{RATE}))", legend(by)


def quantile(share: float, metric: str, by: str = "group", *, of: str = GROUP) -> Query:
    buckets = f"sum by (le, {by}) (rate({metric}_bucket{of}{RATE}))"
    return f"histogram_quantile({share}, {buckets})", legend(by, f" p{share * 100:.0f}")


def both(metric: str) -> tuple[Query, ...]:
    return quantile(0.5, metric), quantile(0.95, metric)


def useful() -> Query:
    busy = f"avg by (group) (rate(coslice_agent_device_busy_seconds_total{GROUP}{RATE}))"
    return f"clamp_min({busy} - on (group) {rate('coslice_swap_seconds_sum')[0]}, 0)", legend("group")


SHARE, COUNT, SECONDS = "percentunit", "short", "s"
TURNS = (
    Panel(
        "Held duty",
        SHARE,
        "Share of time that the lock is held.",
        (rate("coslice_group_held_seconds_total"),),
    ),
    Panel(
        "Useful duty, host accelerators", SHARE, "Busy minus swaps. For GPUs: the DCGM exporter.", (useful(),)
    ),
    Panel(
        "Swap share",
        SHARE,
        "Time from the choice of a job to its grant.",
        (rate("coslice_swap_seconds_sum"),),
    ),
    Panel(
        "Queue", COUNT, "Jobs that wait, with the one being swapped in.", (now("coslice_group_queue_depth"),)
    ),
    Panel("Grants", "ops", "By why the job could run.", (rate("coslice_grants_total", "group, reason"),)),
    Panel("Longest wait now", SECONDS, "", (now("coslice_group_oldest_wait_seconds", how="max"),)),
)
TIMES = (
    Panel("Acquire wait", SECONDS, "From a request to its grant.", both("coslice_acquire_wait_seconds")),
    Panel("Hold", SECONDS, "How long leases are held.", both("coslice_hold_seconds")),
    Panel("Swap", SECONDS, "Where nodes had to be asked.", both("coslice_swap_seconds")),
    Panel(
        "Hand-over, all groups",
        SECONDS,
        "From the yield's arrival to the grant on its stream.",
        (quantile(0.99, "coslice_handover_seconds", "instance", of=""),),
    ),
    Panel(
        "Orchestrator's turns",
        SECONDS,
        "Its share at each end of a hand-over.",
        (quantile(0.99, "coslice_turn_seconds", "said", of=""),),
    ),
    Panel(
        "Event loops late",
        SECONDS,
        "Of each process: long means too little CPU.",
        (quantile(0.99, "coslice_loop_lag_seconds", "instance", of=""),),
    ),
)
JOB = "group, job_id"
JOBS = (
    Panel(
        "Slowdown",
        COUNT,
        "Estimated step time shared ÷ alone.",
        (now("coslice_job_slowdown_ratio", JOB, how="max"),),
    ),
    Panel("Who holds", SHARE, "Counted when a lease ends.", (rate("coslice_job_held_seconds_total", JOB),)),
    Panel(
        "Who waits", SHARE, "Counted when the lease ends.", (rate("coslice_job_waited_seconds_total", JOB),)
    ),
)
STAGE = "stage, backend"
MOVES = (
    Panel(
        "Stages",
        SECONDS,
        "Whole, and the copies within.",
        (quantile(0.95, "coslice_agent_stage_seconds", STAGE),),
    ),
    Panel(
        "Bytes moved",
        "Bps",
        "snapshot_copy: had to be copied.",
        (rate("coslice_agent_moved_bytes_total", STAGE),),
    ),
    Panel(
        "Failures",
        "ops",
        "Most are tried again.",
        (rate("coslice_agent_stage_failures_total", f"{STAGE}, reason"),),
    ),
)
WHERE = "instance, kind"
MEMORY = (
    Panel("Device", "bytes", "On each node.", (now("coslice_agent_device_bytes", "instance, group, kind"),)),
    Panel("Host", "bytes", "held: with content.", (now("coslice_agent_host_bytes", WHERE, of=""),)),
    Panel("Disk tier", "bytes", "Idle for long.", (now("coslice_agent_disk_bytes", WHERE, of=""),)),
)
HEALTH = (
    Panel("Faults", "ops", "By kind.", (rate("coslice_faults_total", "group, reason"),)),
    Panel("Refusals", "ops", "By code.", (rate("coslice_refusals_total", "group, code"),)),
    Panel(
        "Killed jobs", "ops", "Stuck, or out of device memory.", (rate("coslice_agent_killed_jobs_total"),)
    ),
    Panel("Leader", COUNT, "1: it grants.", (now("coslice_leader", "instance", of=""),)),
    Panel("Nodes", COUNT, "attached, away, or hung.", (now("coslice_group_nodes", "group, state"),)),
    Panel("Sessions", COUNT, "lost: within their grace.", (now("coslice_sessions", "state", of=""),)),
)
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Turns", TURNS),
    ("Times", TIMES),
    ("Jobs", JOBS),
    ("Moves", MOVES),
    ("Memory", MEMORY),
    ("Faults and health", HEALTH),
)


def panel(number: int, place: int, top: int, made: Panel) -> dict[str, Any]:
    targets = [
        {"refId": "ABCDEF"[n], "expr": expr, "legendFormat": names, "datasource": SOURCE}
        for n, (expr, names) in enumerate(made.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": made.title,
        "description": made.meaning,
        "datasource": SOURCE,
        "gridPos": {"h": 8, "w": 8, "x": 8 * (place % 3), "y": top + 8 * (place // 3)},
        "fieldConfig": {"defaults": {"unit": made.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, made in ROWS:
        row = {"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append({**row, "gridPos": {"h": 1, "w": 24, "x": 0, "y": top}})
        panels += [panel(len(panels) + 1 + n, n, top + 1, each) for n, each in enumerate(made)]
        top += 1 + 8 * -(-len(made) // 3)
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}
    group = {
        "name": "group",
        "type": "query",
        "label": "Group",
        "datasource": SOURCE,
        "query": "label_values(coslice_group_queue_depth, group)",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "title": "coslice",
        "uid": "coslice",
        "tags": ["coslice"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [source, group]},
        "panels": panels,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1, ensure_ascii=False))
