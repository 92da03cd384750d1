"""A job alone, without lock and swaps: when its steps end and how much it computes. Pure arithmetic.

The figures that sharing is measured against: a slowdown is a ratio to these step times, a bound is a sum of
these duties.
"""

import itertools
from collections.abc import Iterator, Sequence

from msgspec import Struct

from coslice.profile.cycle import Batches
from coslice.simulate.spec import UNCHANGED, Job, Pass, Scale


class Solo(Struct, frozen=True):
    ends: tuple[float, ...]
    """When step 1, 2, … ends, in seconds from the start."""
    duty: dict[str, float]
    """Share of the time in which it computes, by group."""


def alone(job: Job, steps: int, *, passes: Sequence[Scale] = (), batches: Sequence[Scale] = ()) -> Solo:
    """``steps`` ≥ 1 steps of ``job`` on accelerators of its own. ``passes``, ``batches``: how it drifted,
    pass by pass of its loop and of what makes its batches."""
    ends, now = [], 0.0
    busy: dict[str, float] = {}
    ahead = Batches(job.staleness) if job.produce else None
    makes, loop = _lengths(job.produce, batches), _lengths(job.loop, passes)
    for _ in range(steps):
        if ahead is not None:
            made, computed = next(makes)
            now = max(now, ahead.arrives(made))
            _count(busy, computed)
        took, computed = next(loop)
        now += took
        _count(busy, computed)
        ends.append(now)
        if ahead is not None:
            ahead.finished(now)
    return Solo(tuple(ends), {group: spent / now for group, spent in busy.items()} if now > 0 else {})


Computed = list[tuple[str, float]]
"""Group and seconds, in the order of the stretches."""


def _lengths(loop: tuple[Pass, ...], scales: Sequence[Scale]) -> Iterator[tuple[float, Computed]]:
    """Seconds of pass 1, 2, …, and those on accelerators."""
    known: dict[tuple[int, Scale], tuple[float, Computed]] = {}
    for k in itertools.count():
        which = k % len(loop), scales[k] if k < len(scales) else UNCHANGED
        found = known.get(which)
        if found is None:
            one, scale = loop[which[0]], which[1]
            computed = [(part.group, part.seconds * scale[0]) for part in one if part.group]
            known[which] = found = seconds(one, scale), computed
        yield found


def seconds(one: Pass, scale: Scale = UNCHANGED) -> float:
    if scale is UNCHANGED:
        return sum(part.seconds for part in one)
    on, off = scale
    return sum(part.seconds * (on if part.group else off) for part in one)


def _count(busy: dict[str, float], computed: Computed) -> None:
    for group, spent in computed:
        busy[group] = busy.get(group, 0.0) + spent
