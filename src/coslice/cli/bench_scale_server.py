"""What the orchestrator of ``coslice bench scale`` says of itself: its histograms, over the time measured."""

import threading
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from coslice.observe.lag import LAG
from coslice.orchestrator.metrics import HANDOVER, TURN

Buckets = dict[str, dict[float, float]]
"""By what was timed: by upper bound in seconds, how often it took at most so long."""
SERIES = {
    (HANDOVER.name, ""): "hand-over",
    (TURN.name, "yield"): "yield",
    (TURN.name, "report"): "report",
    (TURN.name, "acquire"): "acquire",
    (LAG.name, ""): "loop late",
}


class Scraper:
    """From entering to ``end``: scrapes every ``every`` seconds, as Prometheus would."""

    def __init__(self, url: str, every: float) -> None:
        self._url, self._every = url, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)
        self.took: list[float] = []
        """Milliseconds of each scrape within."""

    def __enter__(self) -> "Scraper":
        self._before = read(self._ask())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def end(self) -> dict[str, dict[str, float]]:
        """What was timed since then, in milliseconds."""
        self.__exit__()
        return {name: summary(self._before.get(name, {}), after) for name, after in read(self._ask()).items()}

    def _run(self) -> None:
        while not self._over.wait(self._every):
            began = time.monotonic()
            self._ask()
            self.took.append(round((time.monotonic() - began) * 1e3, 1))

    def _ask(self) -> str:
        with urllib.request.urlopen(self._url, timeout=60) as answer:
            text: str = answer.read().decode()
        return text


def read(exposition: str) -> Buckets:
    found: Buckets = {name: {} for name in SERIES.values()}
    names = tuple(name for name, _ in SERIES)
    lines = (line for line in exposition.splitlines(keepends=True) if line.startswith(names))
    for family in text_string_to_metric_families("".join(lines)):
        for sample in family.samples:
            name = SERIES.get((sample.name.removesuffix("_bucket"), sample.labels.get("said", "")))
            if name is not None and "le" in sample.labels:
                found[name][float(sample.labels["le"])] = sample.value
    return found


def summary(before: Mapping[float, float], after: Mapping[float, float]) -> dict[str, float]:
    """Quantiles as Prometheus has them: evenly spread within a bucket."""
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    return {
        "p50": round(1e3 * quantile(0.5, counts), 2),
        "p99": round(1e3 * quantile(0.99, counts), 2),
        "n": int(counts[-1][1]) if counts else 0,
    }


def quantile(q: float, counts: Sequence[tuple[float, float]]) -> float:
    """``counts``: by upper bound, how many were at most that; the last bound is infinite."""
    steps: Iterable[tuple[tuple[float, float], tuple[float, float]]] = pairwise([(0.0, 0.0), *counts])
    wanted = q * counts[-1][1] if counts else 0.0
    for (low, fewer), (high, more) in steps:
        if more >= wanted and more > fewer:
            return low if high == float("inf") else low + (high - low) * (wanted - fewer) / (more - fewer)
    return 0.0
