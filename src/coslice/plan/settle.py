"""Plans made sure: every group is played in full, and a job with several pools waits in each of its groups.

Called by the search, and in the end by the planner. A group that breaks a bound loses a member, or falls
apart.
"""

from collections.abc import Sequence

from msgspec import Struct

from coslice.plan.batch import Table
from coslice.plan.judge import Judge, judge_finally

Members = tuple[int, ...]


class Settled(Struct, frozen=True):
    """``becomes``: of each group, what is left of it. ``held``: weighted useful duty, of those of two and
    more. ``refused``: the slowdowns of groups that broke a bound."""

    becomes: dict[Members, list[Members]]
    held: dict[Members, float]
    refused: dict[Members, tuple[float, ...]]


def settle(table: Table, groups: Sequence[Members], judged: Judge) -> Settled:
    found = Settled({group: [group] for group in groups}, {}, {})
    failed: list[Members] = []
    for group, held, slowdown in _judged(table, [one for one in found.becomes if len(one) > 1], judged):
        if slowdown is None:
            found.held[group] = held
        else:
            failed.append(group)
            found.refused[group] = slowdown
    parts = dict.fromkeys(part for group in failed if len(group) > 2 for part in _without_one(group))
    found.held.update({p: held for p, held, slow in _judged(table, list(parts), judged) if slow is None})
    for group in failed:
        found.becomes[group] = [(unit,) for unit in group]
        if left := [part for part in _without_one(group) if part in found.held]:
            best = max(left, key=lambda part: found.held[part])
            found.becomes[group] = [best, tuple(unit for unit in group if unit not in best)]
    return found


def keep_job_bounds(table: Table, groups: Sequence[Members]) -> list[Members]:
    """A job whose pools share in several groups waits in each. If that is too much together, the pool that
    shares for the least leaves its group. At once for all jobs that have no group in common."""
    units, several = table.units, _several(table)
    groups = list(groups)
    if not several:
        return groups
    while True:
        home = {unit: group for group in groups if len(group) > 1 for unit in group}
        shared = list(dict.fromkeys(home.values()))
        extra = _extra(table, shared)
        over = []
        for pools in several.values():
            sharing = [unit for unit in pools if unit in home]
            if 1.0 + sum(extra[unit] for unit in sharing) > units[pools[0]].max_slowdown:
                over.append((*min((units[unit].duty, unit) for unit in sharing), sharing))
        if not over:
            return groups
        touched: set[Members] = set()
        smaller: list[Members] = []
        for _, leaves, sharing in sorted(over):
            mine = {home[unit] for unit in sharing}
            if touched & mine:
                continue
            touched |= mine
            smaller += [(leaves,), tuple(unit for unit in home[leaves] if unit != leaves)]
        left = settle(table, smaller, judge_finally)
        gone = {home[unit] for (unit,) in smaller[::2]}
        groups = [group for group in groups if group not in gone]
        groups += [part for group in smaller for part in left.becomes[group]]


def duty(table: Table, groups: Sequence[Members]) -> float:
    """Useful duty of a plan: of all the accelerators that it uses."""
    shared = [group for group in groups if len(group) > 1]
    held = {group: value for group, value, _ in _judged(table, shared, judge_finally)}
    done = sum(held[g] if g in held else float(table.weight[g[0]] * table.duty[g[0]]) for g in groups)
    return done / sum(max(float(table.weight[unit]) for unit in group) for group in groups)


def _several(table: Table) -> dict[str, list[int]]:
    """Jobs with several pools."""
    jobs: dict[str, list[int]] = {}
    for number, unit in enumerate(table.units):
        jobs.setdefault(unit.job, []).append(number)
    return {job: pools for job, pools in jobs.items() if len(pools) > 1}


def _extra(table: Table, groups: Sequence[Members]) -> dict[int, float]:
    """Of each unit, how much longer it takes in its group, in times of its time alone."""
    if not groups:
        return {}
    seen = judge_finally(table, groups)
    return {
        unit: max(0.0, float(seen.slowdown[row, place]) - 1.0)
        for row, group in enumerate(groups)
        for place, unit in enumerate(group)
    }


def _without_one(group: Members) -> list[Members]:
    return [group[:k] + group[k + 1 :] for k in range(len(group))]


def _judged(
    table: Table, groups: Sequence[Members], judged: Judge
) -> list[tuple[Members, float, tuple[float, ...] | None]]:
    """Each with its weighted useful duty, and with its slowdowns if it breaks a bound."""
    if not groups:
        return []
    seen = judged(table, groups)
    return [
        (
            group,
            float(seen.held[row]),
            None if seen.ok[row] else tuple(float(x) for x in seen.slowdown[row, : len(group)]),
        )
        for row, group in enumerate(groups)
    ]
