"""Jobs that share both their trainer's and their sampler's accelerators, played with all whom they meet.

Each group keeps its bounds by itself, and a job's waits in its groups are added up (``settle``). Of a closed
job, whose sampler waits for its trainer, the waits in one group move its turns in the other, so that they may
be longer than the sum: such jobs are played by the lock's own core, in all their groups at once.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from coslice.plan.batch import Table
from coslice.plan.judge import judge_finally
from coslice.plan.policy import MOVES, moved
from coslice.plan.settle import Members, settle
from coslice.profile.model import Profile
from coslice.simulate.from_profile import job_of
from coslice.simulate.run import simulate
from coslice.simulate.spec import Pool, Scenario

MOST_POOLS = 64
"""In plans of more it is left at the sum: a play takes tenths of a second."""
MOST_PLAYS = 24
CYCLES, TURNS, WARMUP = 200.0, 3000.0, 0.05
"""Of the slowest job, and of all jobs together."""
BOTH = {"trainer", "sampler"}


def keep_together(
    table: Table, groups: Sequence[Members], profiles: Mapping[str, Profile]
) -> tuple[list[Members], dict[str, float]]:
    """The groups, less the pools that must leave theirs; and the slowdowns of the jobs that were played."""
    groups, units = list(groups), table.units
    played: dict[frozenset[Members], dict[str, float]] = {}
    while len(units) <= MOST_POOLS:
        parts = [frozenset(part) for part in _parts(table, groups)]
        for part in parts:
            if part not in played and len(played) < MOST_PLAYS:
                played[part] = _play(table, part, profiles)
        slow = {job: value for part in parts for job, value in played.get(part, {}).items()}
        sharing = [u for part in parts for group in part for u in group]
        over = [u for u in sharing if slow.get(units[u].job, 1.0) > units[u].max_slowdown]
        if not over:
            return groups, slow
        leaves = min(over, key=lambda u: (units[u].duty, u))
        home = next(group for group in groups if leaves in group)
        rest = tuple(u for u in home if u != leaves)
        left = settle(table, [rest], judge_finally).becomes[rest]
        groups = [group for group in groups if group != home] + [*left, (leaves,)]
    return groups, {}


def _closed(table: Table, groups: Sequence[Members]) -> dict[str, list[int]]:
    """Jobs whose trainer and sampler both share, and their units."""
    units = table.units
    pools: dict[str, list[int]] = {}
    for group in groups:
        if len(group) > 1:
            for u in group:
                pools.setdefault(units[u].job, []).append(u)
    return {
        job: some
        for job, some in pools.items()
        if {units[u].role for u in some} == BOTH and not any(units[u].buffered for u in some)
    }


def _parts(table: Table, groups: Sequence[Members]) -> Iterator[list[Members]]:
    """Groups that jobs of ``_closed`` join to one."""
    shared = [group for group in groups if len(group) > 1]
    several = _closed(table, groups)
    left = dict.fromkeys(shared)
    for group in shared:
        if group not in left:
            continue
        part, ahead = [], [group]
        del left[group]
        while ahead:
            part.append(one := ahead.pop())
            jobs = {table.units[u].job for u in one} & set(several)
            near = [other for other in left if any(table.units[u].job in jobs for u in other)]
            for other in near:
                del left[other]
            ahead += near
        if len(part) > 1:
            yield part


def _play(table: Table, part: frozenset[Members], profiles: Mapping[str, Profile]) -> dict[str, float]:
    units = table.units
    some = [units[u] for group in part for u in group]
    where: dict[str, dict[str, str]] = {}
    for number, group in enumerate(sorted(part)):
        for u in group:
            role = units[u].role if units[u].role in BOTH else units[u].pool
            where.setdefault(units[u].job, {})[role] = f"g{number}"
    if any(len(pools) > 1 and set(pools) != BOTH for pools in where.values()):
        return {}  # nobody knows what such a job does first
    turns = sum(len(unit.turns) / len(unit.solo_ends) / unit.period for unit in some)
    until = min(CYCLES * max(unit.period for unit in some), TURNS / turns)
    told = simulate(
        Scenario(
            pools=tuple(Pool(name=f"g{number}") for number in range(len(part))),
            jobs=tuple(
                replace(
                    job_of(profiles[job], groups=pools),
                    bytes=max(moved(unit) for unit in some if unit.job == job),
                )
                for job, pools in where.items()
            ),
            cost=MOVES,
            until=until,
            warmup=WARMUP * until,
        )
    )
    return {job: told.slowdown.get(job, float("inf")) for job in where}
