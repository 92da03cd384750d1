"""Who goes next in the groups of a finished plan: a policy under which its bounds hold. Pure.

The search predicts first come, first served. In a group of two there is never a choice when the lock becomes
free, so that any policy does the same (but for those that keep it free). In larger ones the default of
``coslice up`` is played by the lock's own core, and preferred where nobody is slowed down beyond the bound;
else the group is to be first come, first served, as it was predicted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from coslice.plan.settle import Members
from coslice.plan.tell import Told
from coslice.plan.units import Unit
from coslice.profile.model import Profile
from coslice.simulate.from_profile import job_of
from coslice.simulate.run import simulate
from coslice.simulate.spec import Pool, Scenario, SwapCost

PREFERRED = "fair_share"
PREDICTED = "fifo"
MOST_GROUPS = 8
"""Of more groups that have a choice none is played, nor in a plan of more than ``MOST_POOLS``: it takes a few
tenths of a second each."""
MOST_POOLS = 64
CYCLES = 60.0
"""Of the slowest job, and at most ``TURNS`` turns."""
TURNS = 1500
WARMUP = 0.1
_GOLDEN = 0.6180339887498949
_RATE = 1e9
MOVES = SwapCost(out_rate=_RATE, in_rate=_RATE)
"""What a change of hands costs, each of ``moved`` bytes."""


class Chosen(Struct, frozen=True):
    policy: str
    """Empty: there is no choice."""
    told: Told


def choose(
    profiles: Sequence[Profile], units: Sequence[Unit], groups: Sequence[Members], told: Sequence[Told]
) -> list[Chosen]:
    """``told``: as predicted, first come first served. Groups of jobs that share in several keep that: it is
    how they were played ``together``."""
    by_name = {profile.name: profile for profile in profiles}
    played = sum(len(group) > 2 for group in groups) <= MOST_GROUPS and len(units) <= MOST_POOLS
    shares = Counter(units[u].job for group in groups if len(group) > 1 for u in group)
    found = []
    for group, predicted in zip(groups, told, strict=True):
        chosen = Chosen(PREDICTED if len(group) > 2 else "", predicted)
        if len(group) > 2 and played and all(shares[units[u].job] == 1 for u in group):
            seen = _play([units[u] for u in group], by_name, predicted)
            bounds = [units[u].max_slowdown for u in group]
            if all(slow <= bound for slow, bound in zip(seen.slowdown, bounds, strict=True)):
                chosen = Chosen(PREFERRED, seen)
        found.append(chosen)
    return found


def moved(unit: Unit) -> int:
    """So many bytes that moving it takes what it takes; both ways take the same."""
    return max(1, round(unit.out_s * _RATE))


def _play(some: Sequence[Unit], profiles: Mapping[str, Profile], predicted: Told) -> Told:
    """The same figures, under the preferred policy; of two starts the worse."""
    turns = sum(len(unit.turns) / len(unit.solo_ends) / unit.period for unit in some)
    until = min(CYCLES * max(unit.period for unit in some), TURNS / turns)
    slow = [1.0] * len(some)
    for apart in (0.0, 1.0):
        jobs = [
            replace(
                job_of(
                    replace(profiles[unit.job], pools=(profiles[unit.job].pool(unit.pool),)),
                    name=unit.job,
                    seed=number,
                    arrival=apart * (number * _GOLDEN % 1.0) * unit.period,
                ),
                bytes=moved(unit),
            )
            for number, unit in enumerate(some)
        ]
        told = simulate(
            Scenario(
                pools=(Pool(name="pool"),),
                jobs=tuple(jobs),
                cost=MOVES,
                policy=PREFERRED,
                until=until,
                warmup=WARMUP * until,
            )
        )
        for number, unit in enumerate(some):
            mine = told.jobs.get(unit.job)
            slow[number] = max(slow[number], mine.slowdown if mine is not None else float("inf"))
    size = max(unit.weight for unit in some)
    useful = [
        unit.duty / value * (unit.weight / size if unit.accelerators else 1.0)
        for unit, value in zip(some, slow, strict=True)
    ]
    return Told(tuple(slow), tuple(useful), predicted.swap, predicted.order)
