"""How well accelerators are used, as formulas. Called by the demo, the simulator and admission.

Three figures must not be mixed up (every table says which it shows):

* **held duty**: share of time in which the lock is held;
* **busy duty**: share of time in which the device computes, by its own counters;
* **useful duty**: busy duty without the part that swaps cause.

This module knows lists of figures only, not where they were measured.
"""

import math
from collections.abc import Iterable, Sequence


def covered(intervals: Iterable[tuple[float, float]], *, start: float, end: float) -> float:
    """Seconds of ``[start, end]`` that lie in at least one interval; overlaps count once.

    Never more than the span, to which a sum of parts may round up beyond the last digit.
    """
    total, reached = 0.0, start
    for begin, stop in sorted(intervals):
        begin, stop = max(begin, reached), min(stop, end)
        if stop > begin:
            total += stop - begin
            reached = stop
    return min(total, max(0.0, end - start))


def held_duty(leases: Iterable[tuple[float, float]], *, start: float, end: float) -> float:
    """Share of ``[start, end]`` in which a lease was out. ``leases``: begin and end of each, in seconds."""
    if end <= start:
        raise ValueError(f"the span from {start} to {end} is empty: duty is a share of a positive time")
    return covered(leases, start=start, end=end) / (end - start)


def duty_bound(solo: Iterable[float]) -> float:
    """The most useful duty that jobs with these solo duties can reach together: min(1, Σ solo).

    Each job computes as much per step as it does alone, and the device computes for one at a time.
    """
    return min(1.0, math.fsum(solo))


def slowdown_bound(solo: Iterable[float]) -> float:
    """The least slowdown that *every* job of such a set can have at once: max(1, Σ solo).

    If the jobs ask for more than the whole device, their mean rate must fall by that factor; and no job runs
    faster than alone.
    """
    return max(1.0, math.fsum(solo))


def slowdown(shared: Sequence[float], solo: Sequence[float]) -> float:
    """Median step time shared ÷ median step time alone. Medians, because a machine hiccups now and then."""
    if not shared or not solo:
        raise ValueError("a slowdown needs at least one step time of either kind")
    alone = _median(solo)
    if alone <= 0:
        raise ValueError(f"a step cannot take {alone} s alone")
    return _median(shared) / alone


def _median(values: Sequence[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
