"""Profiles and a cluster in, a plan out. The one call that the command, admission and others need."""

import math
import time
from collections.abc import Sequence

from msgspec.structs import replace

from coslice.errors import ConfigError
from coslice.plan.batch import Table
from coslice.plan.cluster import Cluster
from coslice.plan.grouping import Grouping
from coslice.plan.model import Plan
from coslice.plan.place import Placement, place
from coslice.plan.policy import choose
from coslice.plan.settle import duty, keep_job_bounds
from coslice.plan.tell import groups_told, slowdowns, tell
from coslice.plan.together import keep_together, not_played
from coslice.plan.units import CYCLES, Unit, unit_of
from coslice.profile.model import Profile


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
    any case). ``share``: names or roles of pools that may share; empty: all. Raises ``ConfigError`` for
    what no plan can be made of.
    """
    began = time.monotonic()
    cluster = cluster or Cluster()
    _check(profiles, cluster, max_slowdown)
    units = units_of(profiles, cluster, max_slowdown)
    pools = {name for unit in units for name in (unit.pool, unit.role)}
    if unknown := sorted(set(share) - pools):
        raise ConfigError(
            f"--share {unknown[0]}: no pool is called so; there are: {', '.join(sorted(pools))}"
        )
    table = Table(units)
    grouping = Grouping(table, cluster, max_jobs, set(share), seed, began, budget)
    plans, method = grouping.run()
    groups = max((keep_job_bounds(table, one) for one in plans), key=lambda one: duty(table, one))
    groups, together = keep_together(table, groups, {profile.name: profile for profile in profiles})
    groups.sort()
    chosen = choose(profiles, units, groups, tell(table, groups))
    told = [one.told for one in chosen]
    detail = place(groups_told(units, groups, told, [one.policy for one in chosen]), cluster)
    weights = [max(units[u].weight for u in group) for group in groups]
    alone = sum(unit.weight for unit in units)
    refused = grouping.refused()
    return Plan(
        groups=tuple(tuple(units[u].job for u in group) for group in groups),
        useful_duty=_share(
            [math.fsum(t.useful) * w for t, w in zip(told, weights, strict=True)], sum(weights)
        ),
        slowdown={
            job: max(value, together.get(job, 1.0)) for job, value in slowdowns(units, groups, told).items()
        },
        refused=refused,
        seconds=time.monotonic() - began,
        useful_duty_alone=_share([unit.duty * unit.weight for unit in units], alone),
        accelerators=sum(weights),
        accelerators_alone=alone,
        max_slowdown=max_slowdown,
        swap=_swap_words(cluster, units),
        method=method,
        unplaced=detail.unplaced,
        notes=(*grouping.notes, *_summed(not_played(table, groups)), *_halves(detail)),
        detail=tuple(detail.groups),
    )


def units_of(profiles: Sequence[Profile], cluster: Cluster, max_slowdown: float) -> list[Unit]:
    """Every pool of every profile, in their order."""
    # Of many jobs, the last cycles say enough: building all of them would take longer than the search.
    limit = CYCLES if len(profiles) <= 200 else 64 if len(profiles) <= 500 else 32
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


def _halves(placed: Placement) -> list[str]:
    """Of a job with several pools the cluster may have room for some only."""
    names = {
        here: dict.fromkeys(
            member.profile
            for group in placed.groups
            if (group.name not in placed.unplaced) == here
            for member in group.members
        )
        for here in (True, False)
    }
    some = [name for name in names[True] if name in names[False]]
    told = "there is a place for some of their pools only, and without the others they cannot run"
    return [f"{told}: {_some(some)}"] if some else []


def _summed(jobs: Sequence[str]) -> list[str]:
    told = "waits in two groups are added up, not played at once (too many pools), and may be longer"
    return [f"{told}: {_some(jobs)}"] if jobs else []


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _share(parts: Sequence[float], whole: float) -> float:
    return math.fsum(parts) / whole if whole else 0.0


def _swap_words(cluster: Cluster, units: Sequence[Unit]) -> str:
    if not cluster.swap_bandwidth:
        return f"{cluster.swap_s:g} s for a change of hands"
    unknown = sum(not unit.state_bytes for unit in units)
    words = f"state over {cluster.swap_bandwidth / 1e9:g} GB/s each way"
    return words + (f"; {unknown} pools of unknown state: {cluster.swap_s:g} s" if unknown else "")
