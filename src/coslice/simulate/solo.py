"""A job alone, without lock and swaps: when its steps end and how much it computes. Pure arithmetic.

The figures that sharing is measured against: a slowdown is a ratio to these step times, a bound is a sum of
these duties.
"""

from collections.abc import Sequence

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
    for k in range(steps):
        if ahead is not None:
            made, scale = _nth(job.produce, k), _scale(batches, k)
            now = max(now, ahead.arrives(seconds(made, scale)))
            _count(busy, made, scale)
        step, scale = _nth(job.loop, k), _scale(passes, k)
        now += seconds(step, scale)
        _count(busy, step, scale)
        ends.append(now)
        if ahead is not None:
            ahead.finished(now)
    return Solo(tuple(ends), {group: spent / now for group, spent in busy.items()} if now > 0 else {})


def seconds(one: Pass, scale: Scale = UNCHANGED) -> float:
    if scale is UNCHANGED:
        return sum(part.seconds for part in one)
    on, off = scale
    return sum(part.seconds * (on if part.group else off) for part in one)


def _scale(scales: Sequence[Scale], k: int) -> Scale:
    return scales[k] if k < len(scales) else UNCHANGED


def _nth(passes: tuple[Pass, ...], k: int) -> Pass:
    return passes[k % len(passes)]


def _count(busy: dict[str, float], one: Pass, scale: Scale) -> None:
    for part in one:
        if part.group:
            busy[part.group] = busy.get(part.group, 0.0) + part.seconds * scale[0]
