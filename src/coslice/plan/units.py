"""What the planner moves about: one pool of one job, unrolled into turns. From profiles; pure.

Called by the predictors and the search. A unit is a pool, not a job: a job may share its trainer's
accelerators and keep its sampler's to itself.
"""

from msgspec import Struct

from coslice.profile.cycle import cycles
from coslice.profile.model import Pool, Profile

CYCLES = 512
"""As many cycles are drawn for a pool that has no samples."""


class UnitTurn(Struct, frozen=True):
    off: float
    on: float
    make: float
    """Of the first turn of a buffered cycle: seconds to make its batch; else 0."""
    first: bool
    last: bool


class Unit(Struct, frozen=True, kw_only=True):
    """``turns`` go round; ``solo_ends``: when each of its cycles ends, alone, after the start-up."""

    job: str
    pool: str
    role: str
    turns: tuple[UnitTurn, ...]
    solo_ends: tuple[float, ...]
    turn_s: float
    """The longest turn of a cycle, on average."""
    duty: float
    period: float
    buffered: bool
    staleness: float
    accelerators: int
    nodes: int
    state_bytes: int
    device_bytes: int
    max_slowdown: float
    out_s: float
    """What a swap that moves it out, and one that moves it in, takes of the group's time."""
    in_s: float
    weight: int = 1
    """Accelerators that its useful duty counts for."""

    @property
    def label(self) -> str:
        return f"{self.job}:{self.pool}"


def unit_of(
    profile: Profile, pool: Pool, *, max_slowdown: float, out_s: float, in_s: float, limit: int = CYCLES
) -> Unit:
    """``limit``: at most so many cycles of its samples, the latest."""
    drawn = any(part.duration.quantiles and not part.duration.samples for part in pool.phases)
    count = CYCLES if drawn else max(len(part.duration.samples) for part in pool.phases) or 1
    made = cycles(pool, count)[-limit:]
    turns: list[UnitTurn] = []
    ends: list[float] = []
    end = busy = longest = 0.0
    for cycle in made:
        end += cycle.wait
        last, top = len(cycle.turns) - 1, 0.0
        for number, turn in enumerate(cycle.turns):
            end += turn.off + turn.on
            busy += turn.on
            top = max(top, turn.on)
            make = cycle.make if number == 0 else 0.0
            turns.append(UnitTurn(turn.off, turn.on, make, number == 0, number == last))
        ends.append(end)
        longest += top
    return Unit(
        job=profile.name,
        pool=pool.label,
        role=pool.role,
        turns=tuple(turns),
        turn_s=longest / len(made),
        solo_ends=tuple(ends),
        duty=min(1.0, busy / end) if end > 0 else 1.0,
        period=end / len(made),
        buffered=pool.coupling == "buffered",
        staleness=pool.staleness,
        accelerators=pool.accelerators,
        nodes=pool.nodes,
        state_bytes=pool.state_bytes,
        device_bytes=pool.device_bytes,
        max_slowdown=max_slowdown,
        out_s=out_s,
        in_s=in_s,
        weight=max(1, pool.accelerators),
    )
