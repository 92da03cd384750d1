"""Has a job changed? A test on its cycles, one after the other. Pure; no clock.

On-time and off-time of a cycle are each compared with their mean over the first ``BASE`` cycles, by a
two-sided cumulative sum (E. S. Page, Continuous inspection schemes, Biometrika 41, 1954) with the usual
allowance of half a standard deviation and threshold of five. One odd cycle (a checkpoint, an evaluation) must
not count as a change, so a deviation counts for three standard deviations at most: it takes three cycles in a
row at least. A change that is found but is small against the period is taken in silently, as the new normal.
"""

import math
from collections import deque
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

BASE = 8
"""Cycles that the comparison rests on."""
ALLOWANCE = 0.5
THRESHOLD = 5.0
MOST = 3.0
SURE = 3
"""The last of them are new for certain."""
LEAST_SPREAD = 0.05
"""Of the period: the standard deviation is taken to be that large at least."""
LEAST_SHIFT = 0.1
"""Of the period: smaller changes of the mean are not worth a word."""

Times = tuple[float, float]
"""(on, off) seconds of one cycle."""


class Sum(Struct, array_like=True):
    """Of one figure, both ways."""

    mean: float
    spread: float
    up: float = 0.0
    down: float = 0.0
    since_up: int = 0
    since_down: int = 0

    def see(self, value: float) -> bool:
        """Is it one value too many?"""
        far = max(-MOST, min(MOST, (value - self.mean) / self.spread))
        self.up = max(0.0, self.up + far - ALLOWANCE)
        self.down = max(0.0, self.down - far - ALLOWANCE)
        self.since_up = self.since_up + 1 if self.up else 0
        self.since_down = self.since_down + 1 if self.down else 0
        return max(self.up, self.down) > THRESHOLD

    def since(self, values: Sequence[float]) -> int:
        """How many of these values, which end with the one too many, belong to the change: the sum may have
        begun with some that only happened to be far off."""
        count = min(len(values), self.since_up if self.up > THRESHOLD else self.since_down)
        sure = _mean(values[-min(SURE, count) :])
        while count > SURE and abs(values[-count] - self.mean) < abs(values[-count] - sure):
            count -= 1
        return count


class SavedTest(Struct, frozen=True, kw_only=True):
    """A ``DriftTest`` as it stands."""

    seen: tuple[Times, ...]
    sums: tuple[Sum, Sum] | None
    period: float


class DriftTest:
    """``base``: cycles that are known already, as of a declared profile; the first comparison rests on
    them."""

    def __init__(self, base: Sequence[Times] = ()) -> None:
        self._seen: deque[Times] = deque(maxlen=4 * BASE)
        self._sums: tuple[Sum, Sum] | None = None
        self._period = 0.0
        self.moved = (False, False)
        """Which of (on, off) the last change was one of."""
        if base:
            self._learn(base)

    def save(self) -> SavedTest:
        sums = None if self._sums is None else (replace(self._sums[0]), replace(self._sums[1]))
        return SavedTest(seen=tuple(self._seen), sums=sums, period=self._period)

    @classmethod
    def restored(cls, saved: SavedTest) -> "DriftTest":
        test = cls()
        test._seen.extend(saved.seen)
        test._sums, test._period = saved.sums, saved.period
        return test

    def see(self, on: float, off: float) -> int:
        """How many of the latest cycles belong to something new; 0: nothing has changed."""
        self._seen.append((on, off))
        if self._sums is None:
            if len(self._seen) >= BASE:
                self._learn(list(self._seen)[-BASE:])
            return 0
        busy, idle = self._sums
        moved = (busy.see(on), idle.see(off))
        if not any(moved):
            return 0
        seen = list(self._seen)
        found = [part.since([times[k] for times in seen]) for k, part in enumerate(self._sums) if moved[k]]
        new = seen[-max(found) :]
        on_moved, off_moved = (
            abs(_mean([times[k] for times in new]) - part.mean) >= LEAST_SHIFT * self._period
            for k, part in enumerate(self._sums)
        )
        if not (on_moved or off_moved):
            self._learn(seen[-BASE:])
            return 0
        self.moved = (on_moved, off_moved)
        self._seen, self._sums = deque(new, maxlen=4 * BASE), None
        if len(new) >= BASE:
            self._learn(new)
        return len(new)

    def _learn(self, times: Sequence[Times]) -> None:
        self._period = _mean([on + off for on, off in times])
        least = LEAST_SPREAD * self._period or 1e-9
        columns = ([on for on, _ in times], [off for _, off in times])
        first, second = (Sum(_mean(column), max(_spread(column), least)) for column in columns)
        self._sums = first, second


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _spread(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))
