"""A histogram as Prometheus has it, for the event loop's thread only: without the library's locks an
observation takes much less time. Collected as several families of its name, none of which takes long: with a
few hundred groups the whole of it takes tens of milliseconds, and all hand-overs would wait."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Series:
    """Those of one set of labels."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket; the last one has no bound."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


class Histogram(Collector):
    """``bounds``: of its buckets, upwards. Samples in one family: about ``part``. Without labels there is one
    series from the start."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float], part: int
    ) -> None:
        self._name, self._text, self._labels, self._part = name, text, tuple(labels), part
        self._bounds = tuple(bounds)
        self._le = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]  # type: ignore[no-untyped-call]
        self._series: dict[tuple[str, ...], Series] = {}
        if not labels:
            self.labels()

    def labels(self, *values: str) -> Series:
        """Made if need be, in the order of the labels."""
        found = self._series.get(values)
        if found is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, not {values}")
            found = self._series[values] = Series(self._bounds)
        return found

    def remove(self, *values: str) -> None:
        self._series.pop(values, None)

    def observe(self, value: float) -> None:
        self.labels().observe(value)

    def collect(self) -> Iterator[Family]:
        part = self._family()
        for values, series in list(self._series.items()):
            if len(part.samples) + len(self._le) + 2 > self._part and part.samples:
                yield part
                part = self._family()
            self._tell(part, dict(zip(self._labels, values, strict=True)), series)
        yield part

    def _family(self) -> Family:
        return Family(self._name, self._text, "histogram")

    def _tell(self, family: Family, labels: dict[str, str], series: Series) -> None:
        total = 0
        for le, count in zip(self._le, series.counts, strict=True):
            total += count
            family.add_sample(f"{self._name}_bucket", {**labels, "le": le}, float(total))
        family.add_sample(f"{self._name}_count", labels, float(total))
        family.add_sample(f"{self._name}_sum", labels, series.sum)
