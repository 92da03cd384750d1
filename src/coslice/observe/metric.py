"""What a metric is: one value for each, from which exposition, documentation and dashboards are checked.

Counters and histograms are written once per event, by whoever saw it. Everything that follows from a state is
read when somebody asks (``Source``), so that it costs nothing otherwise.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from coslice.observe.histogram import Histogram

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 2400.0,
)  # fmt: skip
"""Bounds of the histograms: from a hand-over with nothing to move to a hold of tens of minutes."""
FINE = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075,
    0.1, 0.2, 0.5, 1.0, 5.0, 30.0, 300.0,
)  # fmt: skip
"""Of what the orchestrator itself takes, where a series is one for the whole process."""
OTHER = "other"
"""Stands for all that have no series of their own."""
MAX_GROUPS = 200
"""Groups with histograms and counters of their own in one process; the others share ``OTHER``."""
MAX_JOBS = 200
"""Jobs with series of their own in one process, all groups together; the others share ``OTHER``."""
VALUES = 50
"""Read in one go: about a quarter of a millisecond."""


class Metric(Struct, frozen=True):
    """``name`` as the exposition has it: a counter ends in ``_total``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """Of its values, from its name."""
        words = self.name.removesuffix("_total").split("_")
        return next((unit for unit in ("seconds", "bytes", "ratio") if unit in words), "1")


def counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    assert metric.kind == "counter"
    return Counter(metric.name, metric.help, metric.labels, registry=registry)


def histogram(metric: Metric, registry: CollectorRegistry, buckets: Sequence[float] = SECONDS) -> Histogram:
    assert metric.kind == "histogram"
    made = Histogram(metric.name, metric.help, metric.labels, buckets, VALUES)
    registry.register(made)
    return made


Reading = tuple[Metric, tuple[str, ...], float]
"""One value, with its labels in the metric's order."""


class Source(Struct, frozen=True):
    """``take`` takes hold of states, in one go. ``read`` makes the values of what was taken, one after the
    other: others may change states meanwhile."""

    metrics: tuple[Metric, ...]
    take: Callable[[], Any]
    read: Callable[[Any], Iterable[Reading]]


class Readings(Collector):
    """What the sources say, as a collector."""

    def __init__(self) -> None:
        self.sources: list[Source] = []

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        return (family for family in self.gather() if family is not None)

    def gather(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | None]:
        """As ``collect``, with a None after every ``VALUES`` of them, where the caller may let others in."""
        for source in self.sources:
            taken = source.take()
            yield None
            families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
            for metric in source.metrics:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                families[metric.name] = kind(metric.name, metric.help, labels=metric.labels)
            for number, (metric, labels, value) in enumerate(source.read(taken), 1):
                families[metric.name].add_metric(labels, value)
                if number % VALUES == 0:
                    yield None
            while families:  # what was written is freed as it goes, not all at once
                yield families.pop(next(iter(families)))


class Names:
    """Gives at most ``limit`` names series of their own. A name that is given up makes room for another."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._own: set[str] = set()

    def __call__(self, name: str) -> str:
        if name in self._own:
            return name
        if len(self._own) >= self._limit:
            return OTHER
        self._own.add(name)
        return name

    def give_up(self, name: str) -> bool:
        """Had it series of its own?"""
        if name not in self._own:
            return False
        self._own.remove(name)
        return True
