"""Profiles and a cluster in, a plan out. The one call that the command, admission and others need."""

import math
import time
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from coslice.core.duty import duty_bound
from coslice.errors import ConfigError
from coslice.plan import rules
from coslice.plan.batch import Table
from coslice.plan.cluster import Cluster
from coslice.plan.exact import LIMIT, ROUNDS, STARTS, Sets, allowed_sets, best_partition
from coslice.plan.judge import judge
from coslice.plan.model import Group, Member, Plan
from coslice.plan.place import place
from coslice.plan.predict import predict
from coslice.plan.search import Members, Searched, search
from coslice.plan.units import CYCLES, Unit, unit_of
from coslice.profile.model import Profile

_TOLD = 64
"""Up to so many units, the reason of every pair that cannot share is told."""


def plan(
    profiles: Sequence[Profile],
    *,
    cluster: Cluster | None = None,
    max_slowdown: float = 1.10,
    budget: float | None = None,
    max_jobs: int = 8,
    share: Sequence[str] = (),
    seed: int = 0,
) -> Plan:
    """Which jobs share which group.

    ``budget``: seconds for the search to improve what it has (None: little; a small set is solved exactly in
    any case). ``share``: roles whose pools may share; empty: all. Raises ``ConfigError`` for what no plan can
    be made of.
    """
    began = time.monotonic()
    cluster = cluster or Cluster()
    _check(profiles, cluster, max_slowdown)
    units = units_of(profiles, cluster, max_slowdown)
    table = Table(units)
    search_of = _Search(table, cluster, max_jobs, set(share), seed, began, budget)
    groups, methods = search_of.run()
    groups, told = _keep_job_bounds(table, groups)
    detail = place(_groups(units, groups, told), cluster)
    weights = [max(units[u].weight for u in group) for group in groups]
    alone = sum(unit.weight for unit in units)
    return Plan(
        groups=tuple(tuple(units[u].job for u in group) for group in groups),
        useful_duty=_share(
            [math.fsum(t.useful) * w for t, w in zip(told, weights, strict=True)], sum(weights)
        ),
        slowdown=_slowdowns(units, groups, told),
        refused=search_of.refused(),
        seconds=time.monotonic() - began,
        useful_duty_alone=_share([unit.duty * unit.weight for unit in units], alone),
        accelerators=sum(weights),
        accelerators_alone=alone,
        max_slowdown=max_slowdown,
        swap=_swap_words(cluster, units),
        method=methods,
        unplaced=detail.unplaced,
        notes=tuple(search_of.notes),
        detail=tuple(detail.groups),
    )


def units_of(profiles: Sequence[Profile], cluster: Cluster, max_slowdown: float) -> list[Unit]:
    """Every pool of every profile, in their order."""
    limit = CYCLES if len(profiles) <= 200 else 32  # of many jobs, the last cycles say enough
    units = []
    for profile in profiles:
        job = cluster.jobs.get(profile.name)
        bound = job.max_slowdown if job and job.max_slowdown else max_slowdown
        for pool in profile.pools:
            move = cluster.move_s(pool)
            unit = unit_of(profile, pool, max_slowdown=bound, out_s=move, in_s=move, limit=limit)
            units.append(_sized(unit, cluster.nodes_of(pool)))
    return units


def _sized(unit: Unit, nodes: int) -> Unit:
    return unit if unit.nodes == nodes else replace(unit, nodes=nodes)


def _check(profiles: Sequence[Profile], cluster: Cluster, max_slowdown: float) -> None:
    if not profiles:
        raise ConfigError("nothing to plan: name profiles, or the files they come from")
    if not 1.0 <= max_slowdown < math.inf:
        raise ConfigError(
            f"a slowdown of at most {max_slowdown:g}: it is a ratio to the time alone, 1 or more"
        )
    names = [profile.name for profile in profiles]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1}) if len(names) < 2000 else []
        raise ConfigError(f"two profiles have one name: {', '.join(twice)}")
    if unknown := sorted(set(cluster.jobs) - set(names)):
        raise ConfigError(f"the cluster file has rules for {', '.join(unknown)}, and no profile is called so")


class _Search:
    """Which sets of units are best; the units fall into classes that cannot share with each other anyway."""

    def __init__(
        self,
        table: Table,
        cluster: Cluster,
        max_jobs: int,
        share: set[str],
        seed: int,
        began: float,
        budget: float | None,
    ) -> None:
        self.table, self.units, self.cluster, self.max_jobs = table, table.units, cluster, max_jobs
        self.share, self.seed, self.began = share, seed, began
        self.budget = budget if budget is not None else 0.3 + len(self.units) / 2000
        self.failed: dict[Members, tuple[float, ...]] = {}
        self.notes: list[str] = []

    def run(self) -> tuple[list[Members], str]:
        fit, alone = [], []
        for number, unit in enumerate(self.units):
            if why := rules.unfit(unit, self.cluster):
                self.notes.append(f"{unit.label} {why}")
                alone.append(number)
            elif self.share and unit.pool not in self.share:
                alone.append(number)
            else:
                fit.append(number)
        small: list[list[int]] = []
        large: list[list[int]] = []
        for members in self._classes(fit):
            (small if len(members) <= LIMIT else large).append(members)
        price = self._price([(unit,) for unit in fit], {})
        groups: list[Members] = []
        method = "exact"
        if large:
            found = self._large(large, price)
            groups += found.groups
            self.failed.update(found.refused)
            method = f"searched: {found.edges} mergers predicted, {found.moves} moves improved it"
        groups += self._small(small, price)
        return sorted(groups + [(unit,) for unit in alone]), method

    def _classes(self, fit: Sequence[int]) -> list[list[int]]:
        if len(fit) <= LIMIT:
            return [list(fit)] if fit else []
        classes: dict[tuple[int, int], list[int]] = {}
        for number in fit:
            unit = self.units[number]
            classes.setdefault((unit.accelerators, unit.nodes), []).append(number)
        # Units of unknown size may go anywhere: with the largest class of their number of nodes.
        for key in [key for key in classes if not key[0]]:
            others = [other for other in classes if other[0] and other[1] == key[1]]
            if others:
                home = max(others, key=lambda other: len(classes[other]))
                classes[home] = sorted(classes[home] + classes.pop(key))
        return list(classes.values())

    def _may(self, members: Sequence[int]) -> bool:
        units = [self.units[number] for number in members]
        if not rules.fits_host(units, self.cluster):
            return False
        return not any(
            rules.never(one, other, self.cluster) for k, one in enumerate(units) for other in units[k + 1 :]
        )

    def _small(self, classes: Sequence[list[int]], price: float) -> list[Members]:
        known: list[tuple[list[int], Sets]] = []
        for members in classes:
            sets, failed = allowed_sets(self.table, members, may=self._may, max_jobs=self.max_jobs)
            self.failed.update({pair: tuple(values) for pair, values in failed.items() if len(pair) == 2})
            known.append((members, sets))
        groups: list[Members] = []
        for _ in range(8):  # the price settles in two or three
            groups, held = [], {}
            for members, sets in known:
                worth = {group: value - price * self._weight(group) for group, value in sets.items()}
                best = best_partition(worth, members)
                groups += best
                held.update({group: sets[group] for group in best})
            before, price = price, self._price(groups, held)
            if price <= before + 1e-9:
                break
        return groups

    def _large(self, classes: Sequence[list[int]], price: float) -> Searched:
        return search(
            self.table,
            classes,
            may=self._may,
            max_jobs=self.max_jobs,
            price=price,
            deadline=self.began + self.budget,
            seed=self.seed,
        )

    def _weight(self, group: Members) -> float:
        return max(float(self.table.weight[unit]) for unit in group)

    def _price(self, groups: Sequence[Members], held: dict[Members, float]) -> float:
        """What an accelerator computes on average, now."""
        total = sum(map(self._weight, groups))
        done = sum(
            held.get(group, sum(float(self.table.weight[u] * self.table.duty[u]) for u in group))
            for group in groups
        )
        return done / total if total else 0.0

    def refused(self) -> dict[str, str]:
        """Why pairs cannot share, in words."""
        told: dict[str, str] = {}
        if len(self.units) <= _TOLD:
            pairs = [(a, b) for b in range(len(self.units)) for a in range(b)]
        else:
            pairs = [(group[0], group[1]) for group in self.failed if len(group) == 2]
        for a, b in pairs:
            one, other = self.units[a], self.units[b]
            if self.share and not {one.pool, other.pool} <= self.share:
                continue
            why = (
                rules.unfit(one, self.cluster)
                or rules.unfit(other, self.cluster)
                or rules.never(one, other, self.cluster)
                or rules.too_much(one, other)
            )
            if not why and (slow := self.failed.get((a, b))) is not None:
                why = rules.too_slow(one, other, slow)
            if why:
                told[f"{_name(one, self.units)} + {_name(other, self.units)}"] = why
        return told


def _name(unit: Unit, units: Sequence[Unit]) -> str:
    """The job's name, with its pool where it has several."""
    several = len(units) <= _TOLD and sum(other.job == unit.job for other in units) > 1
    return unit.label if several else unit.job


def _keep_job_bounds(table: Table, groups: list[Members]) -> tuple[list[Members], list[_Told]]:
    """A job whose pools share in several groups waits in each. If that is too much together, the pool that
    shares for the least leaves its group."""
    units = table.units
    pools: dict[str, int] = {}
    for unit in units:
        pools[unit.job] = pools.get(unit.job, 0) + 1
    while True:
        told = _tell(table, groups)
        slowdown = _slowdowns(units, groups, told)
        over = [
            (units[u].duty, number, u)
            for number, group in enumerate(groups)
            for u in group
            if len(group) > 1 and pools[units[u].job] > 1 and slowdown[units[u].job] > units[u].max_slowdown
        ]
        if not over:
            return groups, told
        _, number, leaves = min(over)
        rest = tuple(u for u in groups[number] if u != leaves)
        groups = sorted([*groups[:number], *groups[number + 1 :], rest, (leaves,)])


class _Told(Struct, frozen=True):
    """Of one group, what the plan tells of it."""

    slowdown: tuple[float, ...]
    useful: tuple[float, ...]
    swap: float
    order: tuple[int, ...]


def _tell(table: Table, groups: Sequence[Members]) -> list[_Told]:
    """The groups as planned, played once more."""
    units = table.units
    shared = [group for group in groups if len(group) > 1]
    few = len(shared) <= _TOLD
    told: dict[Members, _Told] = {}
    if shared:
        seen = judge(table, shared, rounds=ROUNDS, starts=STARTS if few else 3, most=4000 if few else 400)
        for row, group in enumerate(shared):
            some = [units[u] for u in group]
            told[group] = _Told(
                tuple(max(1.0, float(x)) for x in seen.slowdown[row, : len(group)]),
                tuple(float(x) for x in seen.useful[row, : len(group)]),
                float(seen.swap[row]),
                predict(some, turns=_turns(some, 12.0 if few else 3.0)).order,
            )
    for (u,) in (group for group in groups if len(group) == 1):
        told[(u,)] = _Told((1.0,), (units[u].duty,), 0.0, (0,))
    return [told[group] for group in groups]


def _turns(units: Sequence[Unit], cycles: float) -> int:
    """In about so many cycles of the slowest."""
    longest = max(unit.period for unit in units)
    a_cycle = sum(longest / unit.period * len(unit.turns) / len(unit.solo_ends) for unit in units)
    return int(min(1000, max(8, cycles * a_cycle)))


def _groups(units: Sequence[Unit], groups: Sequence[Members], told: Sequence[_Told]) -> list[Group]:
    found = []
    for number, (group, seen) in enumerate(zip(groups, told, strict=True), start=1):
        some = [units[u] for u in group]
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
                useful_duty=math.fsum(seen.useful),
                duty_bound=duty_bound(unit.duty for unit in some),
                swap_duty=seen.swap,
                accelerators=max(unit.accelerators for unit in some),
                nodes=("",) * max(unit.nodes for unit in some),
            )
        )
    return found


def _slowdowns(units: Sequence[Unit], groups: Sequence[Members], told: Sequence[_Told]) -> dict[str, float]:
    """Of each job. Waits in several groups add up."""
    extra: dict[str, float] = {}
    for group, seen in zip(groups, told, strict=True):
        for u, value in zip(group, seen.slowdown, strict=True):
            extra[units[u].job] = extra.get(units[u].job, 0.0) + max(0.0, value - 1.0)
    return {job: 1.0 + value for job, value in extra.items()}


def _share(parts: Sequence[float], whole: float) -> float:
    return math.fsum(parts) / whole if whole else 0.0


def _swap_words(cluster: Cluster, units: Sequence[Unit]) -> str:
    if not cluster.swap_bandwidth:
        return f"{cluster.swap_s:g} s for a change of hands"
    unknown = sum(not unit.state_bytes for unit in units)
    words = f"state over {cluster.swap_bandwidth / 1e9:g} GB/s each way"
    return words + (f"; {unknown} pools of unknown state: {cluster.swap_s:g} s" if unknown else "")
