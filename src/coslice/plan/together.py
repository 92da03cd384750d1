"""Jobs that share both their trainer's and their sampler's accelerators, played with all whom they meet.

Each group keeps its bounds by itself, and a job's waits in its groups are added up (``settle``). But a wait
in one group moves its turns in the other. The waits of a closed job, whose sampler waits for its trainer, may
be longer than the sum, and those of whom it meets longer than predicted, also where it is buffered: such jobs
are played by the lock's own core, in all their groups at once, first come, first served.
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
"""Of each length. After that a job shares in one of its groups only."""
CYCLES, WARMUP = 200.0, 0.05
"""Of the slowest job."""
TURNS = (3000.0, 12_000.0)
"""Of all jobs together, at most: to find who has to leave, and to be sure."""
BOTH = {"trainer", "sampler"}


def keep_together(
    table: Table, groups: Sequence[Members], profiles: Mapping[str, Profile]
) -> tuple[list[Members], dict[str, float]]:
    """The groups, less the pools that must leave theirs; and the slowdowns of the jobs that were played."""
    groups = list(groups)
    slow: dict[str, float] = {}
    if len(table.units) <= MOST_POOLS:
        for turns in TURNS:
            groups, slow = _kept(table, groups, profiles, turns)
    return groups, slow


def not_played(table: Table, groups: Sequence[Members]) -> list[str]:
    """Jobs that share in two groups of a plan with too many pools."""
    return sorted(_both(table, groups)) if len(table.units) > MOST_POOLS else []


def _kept(
    table: Table, groups: list[Members], profiles: Mapping[str, Profile], turns: float
) -> tuple[list[Members], dict[str, float]]:
    units = table.units
    played: dict[frozenset[Members], dict[str, float]] = {}
    while True:
        parts = [frozenset(part) for part in _parts(table, groups)]
        for part in parts:
            if part not in played:
                done = len(played) >= MOST_PLAYS
                played[part] = _unknown(table, part) if done else _play(table, part, profiles, turns)
        slow = {job: value for part in parts for job, value in played[part].items()}
        sharing = [u for part in parts for group in part for u in group]
        over = [u for u in sharing if slow.get(units[u].job, 1.0) > units[u].max_slowdown]
        if not over:
            return groups, slow
        leaves = min(over, key=lambda u: (units[u].duty, u))
        home = next(group for group in groups if leaves in group)
        rest = tuple(u for u in home if u != leaves)
        left = settle(table, [rest], judge_finally).becomes[rest]
        groups = [group for group in groups if group != home] + [*left, (leaves,)]


def _unknown(table: Table, part: frozenset[Members]) -> dict[str, float]:
    return dict.fromkeys(_both(table, tuple(part)), float("inf"))


def _both(table: Table, groups: Sequence[Members]) -> set[str]:
    """Jobs whose trainer and sampler both share."""
    units = table.units
    roles: dict[str, set[str]] = {}
    for group in groups:
        if len(group) > 1:
            for u in group:
                roles.setdefault(units[u].job, set()).add(units[u].role)
    return {job for job, some in roles.items() if some == BOTH}


def _parts(table: Table, groups: Sequence[Members]) -> Iterator[list[Members]]:
    """Groups that jobs of ``_both`` join to one."""
    shared = [group for group in groups if len(group) > 1]
    several = _both(table, groups)
    left = dict.fromkeys(shared)
    for group in shared:
        if group not in left:
            continue
        part, ahead = [], [group]
        del left[group]
        while ahead:
            part.append(one := ahead.pop())
            jobs = {table.units[u].job for u in one} & several
            near = [other for other in left if any(table.units[u].job in jobs for u in other)]
            for other in near:
                del left[other]
            ahead += near
        if len(part) > 1:
            yield part


def _play(
    table: Table, part: frozenset[Members], profiles: Mapping[str, Profile], most: float
) -> dict[str, float]:
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
    until = min(CYCLES * max(unit.period for unit in some), most / turns)
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
