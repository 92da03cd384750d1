"""What is simulated: groups, jobs with their phases, what a swap costs, and what goes wrong. Values only."""

import math
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from coslice.errors import ConfigError

GIB = 1 << 30
SHORTEST_S = 1e-6
"""Of a step: less is a slip of the pen, and a ratio to it says nothing."""
MOST_STEPS = 20_000_000
"""Of all jobs, with the faults: hours of computing. What would take more is refused, not begun."""


class Stretch(Struct, frozen=True):
    """A part of a job's loop: so many seconds, on the accelerators of a group or on none."""

    seconds: float
    group: str = ""
    name: str = ""


Pass = tuple[Stretch, ...]


class Drift(Struct, frozen=True):
    """From ``at`` on (seconds; passes that begin then) the job's stretches take ``factor`` times as long."""

    at: float
    factor: float
    part: Literal["all", "on", "off"] = "all"
    """``on``: those on accelerators of a group; ``off``: the others."""


Scale = tuple[float, float]
"""Of one pass: what its stretches on accelerators, and the others, are multiplied by."""
UNCHANGED: Scale = (1.0, 1.0)


class Job(Struct, frozen=True, kw_only=True):
    """A training run. ``loop``: what it does in step 1, 2, …, and after the last from the first again.

    Closed (``produce`` empty): off-time is part of the loop. Buffered: every pass of ``produce`` makes a
    batch beside it, at most ``1 + staleness`` beyond the finished steps, and every step begins by taking one
    (``profile.cycle.Batches`` has the rule).
    """

    name: str
    loop: tuple[Pass, ...]
    produce: tuple[Pass, ...] = ()
    staleness: float = 0.0
    bytes: int = GIB
    """State on each node of its groups."""
    need: int = 0
    """Declared need in bytes per node; 0: not declared, so that nobody stays beside it."""
    arrival: float = 0.0
    steps: int = 0
    """Leaves after so many; 0: stays."""
    drift: tuple[Drift, ...] = ()

    def scale(self, at: float) -> Scale:
        """Of a pass that begins at ``at``."""
        on = off = 1.0
        for drift in self.drift:
            if at >= drift.at:
                on *= drift.factor if drift.part != "off" else 1.0
                off *= drift.factor if drift.part != "on" else 1.0
        return on, off


def alternating(name: str, on: float, off: float, *, group: str = "pool", **more: object) -> Job:
    """A closed job that waits ``off`` seconds and computes ``on`` seconds, for ever the same."""
    loop = ((Stretch(off, "", "off"), Stretch(on, group, "train")),)
    return replace(Job(name=name, loop=loop), **more)


class Pool(Struct, frozen=True, kw_only=True):
    """One group: nodes whose accelerators change hands together."""

    name: str
    nodes: int = 1
    gpus: int = 1
    """Accelerators per node: for GPU-hours only, the lock is one for all."""
    device: int = 0
    """Bytes on each node; 0: not known, so that one job is on it at a time."""
    host: int = 0
    """Bytes of host memory for saved state on each node; 0: no limit."""
    policy: str = ""
    """Empty: that of the simulation."""


class SwapCost(Struct, frozen=True, kw_only=True):
    """How long state travels: seconds, bytes over a rate, or both added."""

    out_s: float = 0.0
    in_s: float = 0.0
    out_rate: float = math.inf
    """Bytes a second, device to host."""
    in_rate: float = math.inf
    overlap: float = 0.0
    """0: the way in begins when the way out is over. 1: both run at once, and the longer one counts."""
    handoff_s: float = 0.0
    """From a command to a node's report when nothing moves."""
    message_s: float = 0.0
    """From a job to the orchestrator, or back."""

    def leaving(self, size: int) -> float:
        return self.out_s + size / self.out_rate

    def entering(self, size: int, *, after: float) -> float:
        """``after``: seconds that the way out took in the same swap."""
        rest = self.in_s + size / self.in_rate - self.overlap * after
        return rest if rest > 0 else 0.0


def whole_swap(seconds: float, *, handoff_s: float = 0.0, message_s: float = 0.0) -> SwapCost:
    """A hand-over that moves one job out and another in takes ``seconds``, half for each way."""
    if not seconds >= 0 or math.isinf(seconds):
        raise ConfigError(f"a swap of {seconds} s: give 0 or more seconds")
    return SwapCost(out_s=seconds / 2, in_s=seconds / 2, handoff_s=handoff_s, message_s=message_s)


class Faults(Struct, frozen=True, kw_only=True):
    """What goes wrong, at random from the seed. Mean numbers per hour are of Poisson processes."""

    crashes: float = 0.0
    """Of each job, per hour: its process dies and its present step is done again."""
    restart_s: float = 60.0
    outages: float = 0.0
    """Of each node's agent, per hour."""
    outage_s: float = 20.0
    failed_moves: float = 0.0
    """Share of snapshots and restores that fail; the agent tries again."""


class Scenario(Struct, frozen=True, kw_only=True):
    pools: tuple[Pool, ...]
    jobs: tuple[Job, ...]
    cost: SwapCost = SwapCost()
    policy: str = "fifo"
    faults: Faults = Faults()
    seed: int = 0
    until: float = 0.0
    """Seconds; 0: until every job has left."""
    warmup: float = 0.0
    """Figures begin then."""
    on_overrun: Literal["evict", "warn"] = "evict"
    max_hold: float = 3600.0


def check(scenario: Scenario) -> None:
    """Raise ``ConfigError`` for what cannot be simulated, in the words of who wrote it."""
    names = [job.name for job in scenario.jobs]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(names) < 1000 else []
    if twice or len(set(names)) < len(names):
        raise ConfigError(f"two jobs have one name{': ' + ', '.join(twice) if twice else ''}; rename one")
    pools = {pool.name for pool in scenario.pools}
    for job in scenario.jobs:
        _check_job(job, pools)
    if not scenario.until and any(not job.steps for job in scenario.jobs):
        raise ConfigError("a job that never leaves needs an end: give a time, or steps to every job")
    _check_length(scenario)


def groups_of(job: Job) -> tuple[str, ...]:
    """In the order in which the job first needs them."""
    found = dict.fromkeys([part.group for one in (*job.produce, *job.loop) for part in one])
    found.pop("", None)
    return tuple(found)


def _check_job(job: Job, pools: set[str]) -> None:
    groups = groups_of(job)
    if not groups or not job.loop or not all(job.loop):
        raise ConfigError(f"{job.name} needs no group, or has an empty step: there is nothing to share")
    if unknown := [group for group in groups if group not in pools]:
        raise ConfigError(f"{job.name} needs group {unknown[0]!r}; there are: {', '.join(sorted(pools))}")
    each = [part.seconds for one in (*job.produce, *job.loop) for part in one]
    if not (min(each) >= 0 and sum(each) < math.inf):
        raise ConfigError(f"{job.name}: durations must be 0 or more seconds, and finite")
    if _shortest(job) < SHORTEST_S:
        raise ConfigError(
            f"{job.name} has a step that takes no time, or less than {SHORTEST_S:g} s: some stretch must last"
        )
    if not all(drift.at >= 0 and 0 < drift.factor < math.inf for drift in job.drift):
        raise ConfigError(f"{job.name}: a drift begins at 0 s or later, and its factor is above 0")
    if job.staleness < 0:
        raise ConfigError(f"{job.name}: a staleness of {job.staleness} batches; give 0 or more")


def _check_length(scenario: Scenario) -> None:
    """Could it be played within hours? From the mean steps of jobs that wait for nobody."""
    until, faults = scenario.until or math.inf, scenario.faults
    leave = [job.steps for job in scenario.jobs]
    if all(leave) and sum(leave) <= MOST_STEPS and faults == Faults():
        return
    steps = {job.name: _most_steps(job, until) for job in scenario.jobs}
    nodes = sum(pool.nodes for pool in scenario.pools)
    hourly = faults.crashes * len(scenario.jobs) + faults.outages * nodes
    broken = hourly * scenario.until / 3600
    if sum(steps.values()) + broken <= MOST_STEPS:
        return
    most = max(steps, key=lambda name: steps[name])
    if broken > steps[most]:
        raise ConfigError(f"{broken:.2g} faults in {until:g} s are too many to play: ask for less time")
    raise ConfigError(
        f"{sum(steps.values()):.2g} steps are too many to play ({MOST_STEPS:.2g} at most), "
        f"{steps[most]:.2g} of them of {most}: ask for less time, or leave it out"
    )


def seconds(one: Pass, scale: Scale = UNCHANGED) -> float:
    """Of a pass, without waits."""
    if scale is UNCHANGED:
        return sum([part.seconds for part in one])
    on, off = scale
    return sum([part.seconds * (on if part.group else off) for part in one])


def _shortest(job: Job) -> float:
    """Seconds of its shortest step; with batches of the mean one, for some find theirs ready."""
    return _mean(job) if job.produce else min(_lengths(job.loop))


def _mean(job: Job) -> float:
    """Seconds of a step, of many."""
    return max(sum(_lengths(part)) / max(1, len(part)) for part in (job.loop, job.produce))


def _most_steps(job: Job, until: float) -> float:
    mean = _mean(job) * math.prod([min(1.0, drift.factor) for drift in job.drift])
    some = max(0.0, until - job.arrival) / mean if mean > 0 else math.inf
    return min(some, job.steps or math.inf)


def _lengths(passes: tuple[Pass, ...]) -> list[float]:
    return [seconds(one) for one in passes]
