"""The profile of one job: which accelerators it wants, for how long, how often. JSON, versioned.

Written by ``coslice profile``, read by ``coslice simulate``, ``coslice plan`` and admission. A profile has
one ``Pool`` for each set of accelerators that the job takes and gives back as a whole (the trainer's, the
sampler's). One pass through a pool's phases, in their order, is a **cycle** (usually one training step)::

    off gen 233 s | off reward 0 s | on update_actor 187 s | on param_sync 2 s | on other 9 s

Neighbouring phases with the same ``on`` are one stretch: the job asks once, holds, and yields once.

**Coupling** says what the off-time of a phase does while the job waits for its turn:

* ``closed``: it starts at the yield. Whatever the job waits, the cycle gets longer by. (Rewards, on-policy
  generation, weights that travel.)
* ``buffered``: somebody else (the job's sampler) goes on meanwhile, up to ``staleness`` batches ahead of what
  the trainer has finished, so a wait is made up for later. At most one phase of a pool, and it is off.

With ``staleness`` 0 both are the same thing; the exact rule is in ``cycle.Batches``.
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from coslice.core.ids import check_name
from coslice.errors import ConfigError
from coslice.profile.number import MOST_ACCELERATORS, seconds

FORMAT = 1
KEEP_SAMPLES = 4096
"""Cycles kept one by one; of longer records the most recent ones. Means and quantiles are over all."""
QUANTILES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0)

Role = Literal["trainer", "sampler", "both", "unknown"]
Coupling = Literal["closed", "buffered"]


class Durations(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How long something took, in seconds. ``cv``: standard deviation (of the population) ÷ mean."""

    mean: float
    count: int = 1
    cv: float = 0.0
    quantiles: tuple[tuple[float, float], ...] = ()
    """(probability, seconds), both ascending. Empty: constant at ``mean``, unless there are samples."""
    samples: tuple[float, ...] = ()
    """In the order they happened, one per cycle: sample i of every phase of a pool belongs to cycle i."""

    def quantile(self, p: float) -> float:
        """Seconds at probability ``p``, interpolated linearly."""
        points = self.quantiles
        if not points:
            return quantile(self.samples, p) if self.samples else self.mean
        for (p0, x0), (p1, x1) in itertools.pairwise(points):
            if p <= p1:
                return x0 if p <= p0 else x0 + (x1 - x0) * (p - p0) / (p1 - p0)
        return points[-1][1]


class Phase(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One stretch of the cycle. ``on``: it needs the pool's accelerators."""

    name: str
    """As its source calls it: ``gen``, ``update_actor``, ``other`` (what the source does not explain)."""
    phase: str = ""
    """The same in our words: init generate reward train weight_sync save eval; empty: none of them."""
    on: bool
    duration: Durations
    """Cycles without the phase count as 0 s."""
    occurs: int = 0
    """In how many of the cycles it took place; 0: in all."""
    coupling: Coupling = "closed"
    staleness: float = 0.0
    """``buffered`` only: batches that may be ahead of the last finished step."""

    @property
    def mean(self) -> float:
        """Seconds, when it takes place."""
        share = self.occurs / self.duration.count if self.occurs and self.duration.count else 1.0
        return self.duration.mean / share


class Pool(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One set of accelerators the job takes as a whole, and what it does there in a cycle."""

    role: Role
    phases: tuple[Phase, ...]
    period: Durations
    """The cycle alone, on accelerators of its own: all phases together."""
    busy: Durations
    """The on-phases of a cycle together."""
    name: str = ""
    """Which of the job's pools, where the role does not say it (``gpu0``)."""
    accelerators: int = 0
    """In all nodes together; 0: unknown."""
    nodes: int = 1
    state_bytes: int = 0
    """Per accelerator: what has to move when the pool changes hands; 0: unknown."""
    device_bytes: int = 0
    """Per accelerator: the most that was seen in use; 0: unknown."""

    @property
    def label(self) -> str:
        return self.name or self.role

    @property
    def duty(self) -> float:
        """Share of its time in which the pool, alone, computes."""
        return self.busy.mean / self.period.mean if self.period.mean else 0.0

    @property
    def coupling(self) -> Coupling:
        return "buffered" if any(phase.coupling == "buffered" for phase in self.phases) else "closed"

    @property
    def staleness(self) -> float:
        return max((phase.staleness for phase in self.phases if phase.coupling == "buffered"), default=0.0)

    @property
    def regularity(self) -> float:
        """1 for a clockwork, 0 where busy or idle times scatter by their own mean: 1 − the greater cv."""
        idle = [
            phase.duration.cv
            for phase in self.phases
            if not phase.on and phase.duration.mean > 0.01 * self.period.mean
        ]
        return max(0.0, 1.0 - max([self.busy.cv, *idle]))


class Source(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a profile comes from, and what of it was not used and why."""

    kind: str
    """``journal``, ``verl``, ``trl``, ``utilization``, ``steps`` or ``given``."""
    file: str = ""
    read: int = 0
    """Lines (or samples, or log entries) in the file."""
    used: int = 0
    skipped: dict[str, int] = {}
    """Reason → lines; ``used`` plus these is ``read``."""
    notes: tuple[str, ...] = ()


class Profile(Struct, frozen=True, kw_only=True):
    coslice_profile: int = FORMAT
    name: str
    pools: tuple[Pool, ...]
    source: Source = Source(kind="given")

    def pool(self, label: str) -> Pool:
        """The pool of that role or name; raises ``KeyError``."""
        for pool in self.pools:
            if label in (pool.role, pool.name):
                return pool
        raise KeyError(label)


# ── building ───────────────────────────────────────────────────────────────


def durations(values: Sequence[float]) -> Durations:
    """Of measured values, in their order."""
    if not values:
        raise ValueError("durations of nothing")
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    return Durations(
        mean=mean,
        count=len(values),
        cv=math.sqrt(variance) / mean if mean > 0 else 0.0,
        quantiles=tuple((p, quantile(values, p)) for p in QUANTILES) if len(values) > 1 else (),
        samples=tuple(values[-KEEP_SAMPLES:]),
    )


def quantile(values: Sequence[float], p: float) -> float:
    """Of a non-empty sequence, interpolated linearly between order statistics."""
    ordered = sorted(values)
    at = p * (len(ordered) - 1)
    low = min(int(at), len(ordered) - 1)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def make_pool(
    role: Role,
    phases: Sequence[Phase],
    *,
    name: str = "",
    accelerators: int = 0,
    nodes: int = 1,
    state_bytes: int = 0,
    device_bytes: int = 0,
) -> Pool:
    """A pool of these phases; ``period`` and ``busy`` follow from them. Raises ``ConfigError``."""
    _check_phases(phases)
    return Pool(
        role=role,
        name=name,
        phases=tuple(phases),
        period=_sum([phase.duration for phase in phases]),
        busy=_sum([phase.duration for phase in phases if phase.on]),
        accelerators=accelerators,
        nodes=nodes,
        state_bytes=state_bytes,
        device_bytes=device_bytes,
    )


def _check_phases(phases: Sequence[Phase]) -> None:
    buffered = [phase for phase in phases if phase.coupling == "buffered"]
    if len(buffered) > 1 or any(phase.on for phase in buffered):
        raise ConfigError(
            f"{', '.join(phase.name for phase in buffered)}: at most one phase of a pool is buffered, "
            "and it is off"
        )
    if not any(phase.on and phase.duration.mean > 0 for phase in phases):
        raise ConfigError("no phase of the pool uses its accelerators: there is nothing to share")
    for phase in phases:
        if seconds(phase.duration.mean) is None or not 0 <= phase.staleness < math.inf:
            raise ConfigError(f"phase {phase.name}: seconds and staleness cannot be negative or infinite")


def _sum(parts: Sequence[Durations]) -> Durations:
    """Of a cycle's parts. Exact where they are aligned samples; else means add, and variances too."""
    if len({len(part.samples) for part in parts}) == 1 and parts[0].samples:
        whole = durations(
            [math.fsum(values) for values in zip(*(part.samples for part in parts), strict=True)]
        )
        return msgspec.structs.replace(
            whole, count=parts[0].count, mean=math.fsum(part.mean for part in parts)
        )
    mean = math.fsum(part.mean for part in parts)
    spread = math.sqrt(math.fsum((part.cv * part.mean) ** 2 for part in parts))
    return Durations(
        mean=mean, count=min((part.count for part in parts), default=1), cv=spread / mean if mean else 0.0
    )


# ── files ──────────────────────────────────────────────────────────────────


_FIGURES = re.compile(rb"\[[-+.,\deE\s]*\]")


class _Header(Struct):
    coslice_profile: int


def encode_profile(profile: Profile) -> bytes:
    data = msgspec.json.format(msgspec.json.encode(_rounded(profile)), indent=1)
    # Lists of figures on one line: hundreds of lines with one number each help nobody.
    return _FIGURES.sub(lambda match: b" ".join(match[0].split()), data) + b"\n"


def brief_profile(profile: Profile, *, cycles: int = 32) -> Profile:
    """The same with brief pools: short enough to be sent with a hello."""
    pools = tuple(brief_pool(pool, cycles=cycles) for pool in profile.pools)
    return msgspec.structs.replace(profile, pools=pools, source=Source(kind=profile.source.kind))


def brief_pool(pool: Pool, *, cycles: int = 32) -> Pool:
    """The same with its last ``cycles`` cycles only, and without quantiles where there are samples."""

    def short(part: Durations) -> Durations:
        if not part.samples:
            return part
        return msgspec.structs.replace(part, samples=part.samples[len(part.samples) - cycles :], quantiles=())

    return _with_durations(pool, short)


def decode_profile(data: bytes, *, path: str | Path = "profile") -> Profile:
    """Raises ``ConfigError`` naming the file and the field."""
    try:
        version = msgspec.json.decode(data, type=_Header).coslice_profile
        if version != FORMAT:
            raise ConfigError(f"{path}: profile format {version}, and this version of coslice reads {FORMAT}")
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a coslice profile ({error})") from None
    if not profile.pools:
        raise ConfigError(f"{path}: the profile has no pools")
    try:
        check_name("job", profile.name)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    for pool in profile.pools:
        try:
            _check_pool(pool)
        except ConfigError as error:
            raise ConfigError(f"{path}, pool {pool.label}: {error}") from None
    labels = [pool.label for pool in profile.pools]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"{path}: two pools of one name ({', '.join(labels)}): give each a name of its own")
    return profile


def _check_pool(pool: Pool) -> None:
    """Of a file, which somebody may have edited."""
    _check_phases(pool.phases)
    for phase in pool.phases:
        _check_durations(phase.name, phase.duration)
    if len({len(phase.duration.samples) for phase in pool.phases} - {0}) > 1:
        raise ConfigError("samples are one per cycle: every phase has as many, or none")
    _check_durations("period", pool.period)
    _check_durations("busy", pool.busy)
    for name, part, of in (
        ("period", pool.period, pool.phases),
        ("busy", pool.busy, [phase for phase in pool.phases if phase.on]),
    ):
        total = math.fsum(phase.duration.mean for phase in of)
        if abs(part.mean - total) > 0.01 * total:
            raise ConfigError(
                f"{name}: a mean of {part.mean:g} s, and its phases add up to {total:g} s: correct either"
            )
    if pool.accelerators < 0 or pool.nodes < 1 or pool.state_bytes < 0 or pool.device_bytes < 0:
        raise ConfigError("nodes are 1 or more, accelerators, state_bytes and device_bytes 0 or more")
    if max(pool.accelerators, pool.nodes) > MOST_ACCELERATORS:
        raise ConfigError(f"accelerators and nodes are at most {MOST_ACCELERATORS}")


def _check_durations(name: str, part: Durations) -> None:
    values = [part.mean, *part.samples, *(value for _, value in part.quantiles)]
    if any(seconds(value) is None for value in values):
        raise ConfigError(f"{name}: seconds are 0 or more, and not longer than thirty years")
    for column in zip(*part.quantiles, strict=True):
        if list(column) != sorted(column):
            raise ConfigError(f"{name}: quantiles ascend, in probability and in seconds")


def _rounded(profile: Profile) -> Profile:
    """Microseconds are enough for a file that people read."""

    def short(part: Durations) -> Durations:
        return msgspec.structs.replace(
            part,
            mean=round(part.mean, 6),
            cv=round(part.cv, 6),
            quantiles=tuple((p, round(x, 6)) for p, x in part.quantiles),
            samples=tuple(round(x, 6) for x in part.samples),
        )

    return msgspec.structs.replace(profile, pools=tuple(_with_durations(p, short) for p in profile.pools))


def _with_durations(pool: Pool, change: Callable[[Durations], Durations]) -> Pool:
    return msgspec.structs.replace(
        pool,
        period=change(pool.period),
        busy=change(pool.busy),
        phases=tuple(msgspec.structs.replace(ph, duration=change(ph.duration)) for ph in pool.phases),
    )
