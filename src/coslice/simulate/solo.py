"""A job alone, without lock and swaps: when its steps end and how much it computes. Pure arithmetic.

The figures that sharing is measured against: a slowdown is a ratio to these step times, a bound is a sum of
these duties.
"""

from msgspec import Struct

from coslice.simulate.spec import Job, Phase


class Solo(Struct, frozen=True):
    ends: tuple[float, ...]
    """When step 1, 2, … ends, in seconds from the start."""
    duty: dict[str, float]
    """Share of the time in which it computes, by group."""

    @property
    def step_s(self) -> float:
        return self.ends[-1] / len(self.ends)


def alone(job: Job, steps: int) -> Solo:
    """``steps`` ≥ 1 steps of ``job`` on accelerators of its own."""
    ends = _buffered(job, steps) if job.produce else _closed(job, steps)
    busy: dict[str, float] = {}
    for phase in (*job.loop, *job.produce):
        if phase.group:
            busy[phase.group] = busy.get(phase.group, 0.0) + sum(_at(phase, k) for k in range(steps))
    return Solo(tuple(ends), {group: seconds / ends[-1] for group, seconds in busy.items()})


def _at(phase: Phase, step: int) -> float:
    return phase.seconds[step % len(phase.seconds)]


def _closed(job: Job, steps: int) -> list[float]:
    ends, now = [], 0.0
    for k in range(steps):
        now += sum(_at(phase, k) for phase in job.loop)
        ends.append(now)
    return ends


def _buffered(job: Job, steps: int) -> list[float]:
    """Batch k begins when its predecessor is done and a place is free; step k when both are there."""
    made = now = 0.0
    taken: list[float] = []
    ends = []
    for k in range(steps):
        if k >= job.ahead:
            made = max(made, taken[k - job.ahead])
        made += sum(_at(phase, k) for phase in job.produce)
        taken.append(max(now, made))
        now = taken[-1] + sum(_at(phase, k) for phase in job.loop)
        ends.append(now)
    return ends
