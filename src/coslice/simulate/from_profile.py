"""Jobs of the simulation from profiles: what a pool does in a cycle becomes a pass of the job's loop."""

from collections.abc import Mapping

from coslice.errors import ConfigError
from coslice.profile.cycle import Cycle, cycles
from coslice.profile.model import Pool, Profile
from coslice.simulate.spec import GIB, Job, Pass, Stretch

DRAWN = 512
"""Cycles drawn of a profile without samples, before they repeat."""


def job_of(
    profile: Profile,
    *,
    group: str = "pool",
    groups: Mapping[str, str] | None = None,
    name: str = "",
    seed: int = 0,
    arrival: float = 0.0,
    steps: int = 0,
) -> Job:
    """The job behind ``profile``.

    ``groups``: role (``trainer``, ``sampler``) → group, for a job that shares both its pools: the sampler's
    turn then comes before the trainer's in every step (closed), or makes the batches (buffered). Without it
    the first pool is simulated, on ``group``; what it waits for takes as long as it took alone.
    """
    chosen = dict(groups or {})
    if not chosen:
        pool = profile.pools[0]
        return _one_pool(profile, pool, group, name=name, seed=seed, arrival=arrival, steps=steps)
    pools = {role: _pool(profile, role) for role in chosen}
    if set(chosen) != {"trainer", "sampler"}:
        (role,) = chosen if len(chosen) == 1 else (next(iter(chosen)),)
        return _one_pool(
            profile, pools[role], chosen[role], name=name, seed=seed, arrival=arrival, steps=steps
        )
    trainer, sampler = pools["trainer"], pools["sampler"]
    count = max(_count(trainer), _count(sampler))
    trains = cycles(trainer, count, seed=seed)
    samples = cycles(sampler, count, seed=seed + 1)
    made = tuple(_on_only(cycle, chosen["sampler"]) for cycle in samples)
    if trainer.coupling == "closed":
        loop = tuple(
            (*first, *_passes(cycle, chosen["trainer"], less=sum(part.seconds for part in first)))
            for first, cycle in zip(made, trains, strict=True)
        )
        produce: tuple[Pass, ...] = ()
    else:
        loop = tuple(_passes(cycle, chosen["trainer"]) for cycle in trains)
        produce = tuple(_batch(first, cycle) for first, cycle in zip(made, trains, strict=True))
    return Job(
        name=name or profile.name,
        loop=loop,
        produce=produce,
        staleness=trainer.staleness,
        bytes=max(trainer.state_bytes, sampler.state_bytes) or GIB,
        arrival=arrival,
        steps=steps,
    )


def _one_pool(
    profile: Profile, pool: Pool, group: str, *, name: str, seed: int, arrival: float, steps: int
) -> Job:
    made = cycles(pool, _count(pool), seed=seed)
    buffered = pool.coupling == "buffered"
    return Job(
        name=name or profile.name,
        loop=tuple(_passes(cycle, group) for cycle in made),
        produce=tuple((Stretch(cycle.make, "", "make"),) for cycle in made) if buffered else (),
        staleness=pool.staleness,
        bytes=pool.state_bytes or GIB,
        arrival=arrival,
        steps=steps,
    )


def _pool(profile: Profile, role: str) -> Pool:
    try:
        return profile.pool(role)
    except KeyError:
        known = ", ".join(pool.label for pool in profile.pools)
        raise ConfigError(f"profile {profile.name} has no pool {role!r}; it has: {known}") from None


def _count(pool: Pool) -> int:
    samples = max(len(phase.duration.samples) for phase in pool.phases)
    drawn = any(phase.duration.quantiles and not phase.duration.samples for phase in pool.phases)
    return DRAWN if drawn else max(1, samples)


def _passes(cycle: Cycle, group: str, *, less: float = 0.0) -> Pass:
    """``less``: seconds of the first off-time that another pool's turn takes the place of."""
    parts: list[Stretch] = []
    for turn in cycle.turns:
        off = max(0.0, turn.off - less)
        less = max(0.0, less - turn.off)
        if off > 0:
            parts.append(Stretch(off, "", "off"))
        if turn.on > 0:
            parts.append(Stretch(turn.on, group, turn.phase))
    return tuple(parts) or (Stretch(0.0, "", "off"),)


def _batch(made: Pass, cycle: Cycle) -> Pass:
    """What the sampler does for one batch. Where the trainer waits for it alone, whatever the batch takes
    beyond the sampler's turn is not the sampler standing still, too far ahead, but a part of its making."""
    rest = cycle.make - sum(part.seconds for part in made) if cycle.wait > 0 else 0.0
    return (*made, Stretch(rest, "", "off")) if rest > 0 else made


def _on_only(cycle: Cycle, group: str) -> Pass:
    return tuple(Stretch(turn.on, group, turn.phase) for turn in cycle.turns if turn.on > 0)
