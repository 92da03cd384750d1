"""What a plan says of its groups: each played once more, and the figures of members and jobs."""

import math
from collections.abc import Sequence

from msgspec import Struct

from coslice.core.duty import duty_bound
from coslice.plan.batch import Table
from coslice.plan.judge import judge_finally
from coslice.plan.model import Group, Member
from coslice.plan.predict import predict
from coslice.plan.settle import Members
from coslice.plan.units import Unit

FEW = 64
"""Up to so many groups, the order of turns is taken from a long play."""


class Told(Struct, frozen=True):
    """Of one group, what the plan tells of it."""

    slowdown: tuple[float, ...]
    useful: tuple[float, ...]
    swap: float
    order: tuple[int, ...]


def tell(table: Table, groups: Sequence[Members]) -> list[Told]:
    """The groups as planned, played once more."""
    units = table.units
    shared = [group for group in groups if len(group) > 1]
    few = len(shared) <= FEW
    told: dict[Members, Told] = {}
    if shared:
        seen = judge_finally(table, shared)
        for row, group in enumerate(shared):
            some = [units[u] for u in group]
            told[group] = Told(
                tuple(max(1.0, float(x)) for x in seen.slowdown[row, : len(group)]),
                tuple(float(x) for x in seen.useful[row, : len(group)]),
                float(seen.swap[row]),
                predict(some, turns=_turns(some, 12.0 if few else 3.0)).order,
            )
    for (u,) in (group for group in groups if len(group) == 1):
        told[(u,)] = Told((1.0,), (units[u].duty,), 0.0, (0,))
    return [told[group] for group in groups]


def _turns(units: Sequence[Unit], cycles: float) -> int:
    """In about so many cycles of the slowest."""
    longest = max(unit.period for unit in units)
    a_cycle = sum(longest / unit.period * len(unit.turns) / len(unit.solo_ends) for unit in units)
    return int(min(1000, max(8, cycles * a_cycle)))


def groups_told(
    units: Sequence[Unit], groups: Sequence[Members], told: Sequence[Told], policies: Sequence[str]
) -> list[Group]:
    found = []
    for number, (group, seen, policy) in enumerate(zip(groups, told, policies, strict=True), start=1):
        some = [units[u] for u in group]
        size = max(unit.weight for unit in some)
        found.append(
            Group(
                name=f"g{number}",
                members=tuple(
                    Member(
                        profile=unit.job,
                        pool=unit.pool,
                        duty_alone=unit.duty,
                        useful_duty=seen.useful[k],
                        slowdown=seen.slowdown[k],
                        max_slowdown=unit.max_slowdown,
                    )
                    for k, unit in enumerate(some)
                ),
                order=tuple(some[k].job for k in seen.order),
                policy=policy,
                useful_duty=math.fsum(seen.useful),
                duty_bound=duty_bound(
                    unit.duty * (unit.weight / size if unit.accelerators else 1.0) for unit in some
                ),
                swap_duty=seen.swap,
                accelerators=max(unit.accelerators for unit in some),
                nodes=("",) * max(unit.nodes for unit in some),
            )
        )
    return found


def slowdowns(units: Sequence[Unit], groups: Sequence[Members], told: Sequence[Told]) -> dict[str, float]:
    """Of each job. Waits in several groups add up."""
    extra: dict[str, float] = {}
    for group, seen in zip(groups, told, strict=True):
        for u, value in zip(group, seen.slowdown, strict=True):
            extra[units[u].job] = extra.get(units[u].job, 0.0) + max(0.0, value - 1.0)
    return {job: 1.0 + value for job, value in extra.items()}
