"""What is simulated: groups, jobs with their phases, what a swap costs, and what goes wrong. Values only."""

import math
from typing import Literal

from msgspec import Struct

from coslice.errors import ConfigError

GIB = 1 << 30


class Phase(Struct, frozen=True, kw_only=True):
    """One stretch of a job's loop."""

    name: str
    group: str = ""
    """Whose accelerators it needs; empty: none."""
    seconds: tuple[float, ...]
    """Its duration in step 1, 2, …; after the last the first again."""


class Job(Struct, frozen=True, kw_only=True):
    """A training run. Closed: the phases of ``loop`` follow each other. Buffered: every pass of ``produce``
    makes one batch beside it, and every pass of ``loop`` begins by taking one."""

    name: str
    loop: tuple[Phase, ...]
    produce: tuple[Phase, ...] = ()
    ahead: int = 1
    """Batches that may lie ready (the staleness bound); then the producer waits."""
    bytes: int = GIB
    """State on each node of its groups."""
    need: int = 0
    """Declared need in bytes per node; 0: not declared, so that nobody stays beside it."""
    arrival: float = 0.0
    steps: int = 0
    """Leaves after so many; 0: stays."""


class Pool(Struct, frozen=True, kw_only=True):
    """One group: nodes whose accelerators change hands together."""

    name: str
    nodes: int = 1
    gpus: int = 1
    """Accelerators per node: for GPU-hours only, the lock is one for all."""
    device: int = GIB + GIB // 2
    """Bytes on each node."""
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
    """From a yield to the next grant when nothing moves: messages, saving, deciding."""

    def leaving(self, size: int) -> float:
        return self.out_s + size / self.out_rate

    def entering(self, size: int, *, after: float) -> float:
        """``after``: seconds that the way out took in the same swap."""
        return max(0.0, self.in_s + size / self.in_rate - self.overlap * after)


def whole_swap(seconds: float, *, handoff_s: float = 0.0) -> SwapCost:
    """A hand-over that moves one job out and another in takes ``seconds``, half for each way."""
    if not seconds >= 0 or math.isinf(seconds):
        raise ConfigError(f"a swap of {seconds} s: give 0 or more seconds")
    return SwapCost(out_s=seconds / 2, in_s=seconds / 2, handoff_s=handoff_s)


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
        phases = (*job.loop, *job.produce)
        if not any(phase.group for phase in job.loop):
            raise ConfigError(f"{job.name} never needs an accelerator: no phase of its loop names a group")
        for phase in phases:
            if phase.group and phase.group not in pools:
                raise ConfigError(
                    f"{job.name} needs group {phase.group!r}; there are: {', '.join(sorted(pools))}"
                )
            if not phase.seconds or not all(0 <= s < math.inf for s in phase.seconds):
                raise ConfigError(f"{job.name}, phase {phase.name}: durations must be 0 or more seconds")
        if sum(sum(phase.seconds) for phase in phases) <= 0:
            raise ConfigError(f"{job.name} takes no time: one of its phases must last longer than 0 s")
        if job.produce and job.ahead < 1:
            raise ConfigError(f"{job.name}: a buffered job needs room for one batch at least (ahead >= 1)")
    if not scenario.until and any(not job.steps for job in scenario.jobs):
        raise ConfigError("a job that never leaves needs an end: give a time, or steps to every job")
