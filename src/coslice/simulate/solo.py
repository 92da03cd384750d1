"""A job alone, without lock and swaps: when its steps end and how much it computes. Pure arithmetic.

The figures that sharing is measured against: a slowdown is a ratio to these step times, a bound is a sum of
these duties.
"""

from msgspec import Struct

from coslice.profile.cycle import Batches
from coslice.simulate.spec import Job, Pass


class Solo(Struct, frozen=True):
    ends: tuple[float, ...]
    """When step 1, 2, … ends, in seconds from the start."""
    duty: dict[str, float]
    """Share of the time in which it computes, by group."""


def alone(job: Job, steps: int) -> Solo:
    """``steps`` ≥ 1 steps of ``job`` on accelerators of its own."""
    ends, now = [], 0.0
    busy: dict[str, float] = {}
    batches = Batches(job.staleness) if job.produce else None
    for k in range(steps):
        if batches is not None:
            made = _nth(job.produce, k)
            now = max(now, batches.arrives(seconds(made)))
            _count(busy, made)
        step = _nth(job.loop, k)
        now += seconds(step)
        _count(busy, step)
        ends.append(now)
        if batches is not None:
            batches.finished(now)
    return Solo(tuple(ends), {group: spent / now for group, spent in busy.items()} if now > 0 else {})


def seconds(one: Pass) -> float:
    return sum(part.seconds for part in one)


def _nth(passes: tuple[Pass, ...], k: int) -> Pass:
    return passes[k % len(passes)]


def _count(busy: dict[str, float], one: Pass) -> None:
    for part in one:
        if part.group:
            busy[part.group] = busy.get(part.group, 0.0) + part.seconds
