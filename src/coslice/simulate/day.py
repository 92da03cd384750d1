"""A day of many jobs on many nodes: what ``coslice bench sim`` runs, in parts that know nothing of another.

Jobs are made from a seed: phases as public RL runs have them (tens of seconds to minutes), Poisson arrivals,
log-normal lengths. A job goes where the least duty is at its arrival, and waits for nothing: that is
placement, not planning.
"""

import gc
import heapq
import math
import random
import time

from msgspec import Struct
from msgspec.structs import replace

from coslice.simulate.run import simulate
from coslice.simulate.spec import Job, Pool, Scenario, Stretch, whole_swap

DAY = 86_400.0
SHAPES = ((26.0, 60.0), (44.0, 69.0), (69.0, 43.0), (89.0, 106.0), (124.0, 220.0), (173.0, 256.0))
"""(on, off) seconds of a step."""
MEAN_STEPS = 90
PASSES = 16
"""Of a job's loop, before it begins again."""
SWAP_S = 4.0


class Part(Struct, frozen=True):
    """Some of the groups, with all jobs that come to them in the day."""

    nodes: int
    jobs: int
    seed: int
    seconds: float = DAY
    """Simulated; jobs come all day long."""
    slice: int = 0
    of: int = 1
    """Only every ``of``-th of these groups from number ``slice`` on: others play the rest."""


class Told(Struct, frozen=True):
    core_steps: int
    node_steps: int
    groups: int
    """With jobs."""
    jobs: int
    """Of which a step was finished."""
    useful_s: float
    """Computed by all jobs, each group's weighed alike."""
    slowdowns: float
    """Sum over the jobs."""
    swaps: int
    cpu_s: float


def run_quietly(part: Part) -> Told:
    """``run_part`` without the collector of cycles, but for what is left at the end: the core's values have
    none."""
    gc.disable()
    gc.freeze()
    try:
        return run_part(part)
    finally:
        gc.collect()
        gc.unfreeze()
        gc.enable()


def run_part(part: Part) -> Told:
    """Group by group: they share no job, and what one needs stays in the processor's cache."""
    begun = time.process_time()
    whole = scenario(part)
    jobs: dict[str, list[Job]] = {}
    for job in whole.jobs:
        jobs.setdefault(job.loop[0][1].group, []).append(job)
    reports = [
        simulate(replace(whole, pools=(pool,), jobs=tuple(jobs[pool.name])))
        for pool in whole.pools
        if pool.name in jobs
    ]
    return Told(
        core_steps=sum(report.core_steps for report in reports),
        node_steps=sum(report.node_steps for report in reports),
        groups=len(reports),
        jobs=sum(report.slowdown_spread.count for report in reports),
        useful_s=sum(report.useful_duty * report.window_s for report in reports),
        slowdowns=sum(report.slowdown_spread.mean * report.slowdown_spread.count for report in reports),
        swaps=sum(report.swaps for report in reports),
        cpu_s=time.process_time() - begun,
    )


def scenario(part: Part) -> Scenario:
    """The slice's groups and their jobs. Every slice draws the jobs of all, to come to the same ones."""
    dice = random.Random(part.seed)
    load: list[tuple[float, int]] = [(0.0, n) for n in range(part.nodes)]
    leaving: list[tuple[float, int, float]] = []
    duty = [0.0] * part.nodes
    jobs: list[Job] = []
    for number, arrival in enumerate(sorted(dice.uniform(0, DAY) for _ in range(part.jobs))):
        while leaving and leaving[0][0] <= arrival:
            _, node, share = heapq.heappop(leaving)
            duty[node] -= share
            heapq.heappush(load, (duty[node], node))
        while load[0][0] != duty[load[0][1]]:
            heapq.heappop(load)  # an entry from before a change
        node = load[0][1]
        on, off = dice.choice(SHAPES)
        scale = dice.uniform(0.7, 1.4)
        steps = max(3, round(dice.lognormvariate(math.log(MEAN_STEPS) - 0.5, 1.0)))
        duty[node] += on / (on + off)
        heapq.heappush(load, (duty[node], node))
        heapq.heappush(leaving, (arrival + steps * (on + off) * scale, node, on / (on + off)))
        if node % part.of != part.slice:
            for _ in range(DRAWS * PASSES):
                dice.random()
            continue
        jobs.append(
            Job(
                name=f"job-{number}",
                loop=tuple(_step(dice, f"node-{node}", on * scale, off * scale) for _ in range(PASSES)),
                arrival=arrival,
                steps=steps,
            )
        )
    pools = tuple(Pool(name=f"node-{n}") for n in range(part.slice, part.nodes, part.of))
    return Scenario(pools=pools, jobs=tuple(jobs), cost=whole_swap(SWAP_S), until=part.seconds)


DRAWS = 2
"""Of a step."""


def _step(dice: random.Random, group: str, on: float, off: float) -> tuple[Stretch, ...]:
    """Times scatter by a tenth or so, as measured ones do."""
    return (
        Stretch(off * dice.uniform(0.85, 1.15), "", "generate"),
        Stretch(on * dice.uniform(0.92, 1.08), group, "train"),
    )
