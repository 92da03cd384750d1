"""A job alone, without lock and swaps: when its steps end and how much it computes. Pure arithmetic.

The figures that sharing is measured against: a slowdown is a ratio to these step times, a bound is a sum of
these duties.
"""

import itertools
from collections.abc import Iterator, Sequence

from msgspec import Struct

from coslice.profile.cycle import Batches
from coslice.simulate.spec import UNCHANGED, Job, Pass, Scale, seconds


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
            for group, spent in computed:
                busy[group] = busy.get(group, 0.0) + spent
        took, computed = next(loop)
        now += took
        for group, spent in computed:
            busy[group] = busy.get(group, 0.0) + spent
        ends.append(now)
        if ahead is not None:
            ahead.finished(now)
    return Solo(tuple(ends), {group: spent / now for group, spent in busy.items()} if now > 0 else {})


Length = tuple[float, list[tuple[str, float]]]
"""Seconds of a pass, and group and seconds of its stretches on accelerators."""


def _lengths(loop: tuple[Pass, ...], scales: Sequence[Scale]) -> Iterator[Length]:
    """Of pass 1, 2, …"""
    usual = [_length(one, UNCHANGED) for one in loop]
    drifted = (_length(loop[k % len(loop)], scale) for k, scale in enumerate(scales))
    late = len(scales) % len(loop) if loop else 0
    return itertools.chain(drifted, usual[late:], itertools.cycle(usual))


def _length(one: Pass, scale: Scale) -> Length:
    return seconds(one, scale), [(part.group, part.seconds * scale[0]) for part in one if part.group]
