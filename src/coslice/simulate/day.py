"""A day of many jobs on many nodes: what ``coslice bench sim`` runs, in parts that know nothing of another.

Jobs are made from a seed: phases as public RL runs have them (tens of seconds to minutes), Poisson arrivals,
log-normal lengths. A job goes where the least duty is at its arrival, and waits for nothing: that is
placement, not planning.
"""

import heapq
import math
import random
import time

from msgspec import Struct

from coslice.simulate.run import simulate
from coslice.simulate.spec import Job, Pool, Scenario, Stretch, whole_swap

DAY = 86_400.0
SHAPES = ((26.0, 60.0), (44.0, 69.0), (69.0, 43.0), (89.0, 106.0), (124.0, 220.0), (173.0, 256.0))
"""(on, off) seconds of a step."""
MEAN_STEPS = 90
SWAP_S = 4.0


class Part(Struct, frozen=True):
    """Some of the groups, with all jobs that come to them in the day."""

    nodes: int
    jobs: int
    seed: int
    seconds: float = DAY
    """Simulated; jobs come all day long."""


class Told(Struct, frozen=True):
    core_steps: int
    node_steps: int
    seconds: float
    useful_duty: float
    slowdown: float
    jobs: int
    swaps: int
    cpu_s: float


def run_part(part: Part) -> Told:
    begun = time.process_time()
    report = simulate(scenario(part))
    return Told(
        core_steps=report.core_steps,
        node_steps=report.node_steps,
        seconds=report.seconds,
        useful_duty=report.useful_duty,
        slowdown=report.slowdown_spread.mean,
        jobs=part.jobs,
        swaps=report.swaps,
        cpu_s=time.process_time() - begun,
    )


def scenario(part: Part) -> Scenario:
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
        jobs.append(
            Job(
                name=f"job-{number}",
                loop=tuple(_step(dice, f"node-{node}", on * scale, off * scale) for _ in range(16)),
                arrival=arrival,
                steps=steps,
            )
        )
    pools = tuple(Pool(name=f"node-{n}") for n in range(part.nodes))
    return Scenario(pools=pools, jobs=tuple(jobs), cost=whole_swap(SWAP_S), until=part.seconds)


def _step(dice: random.Random, group: str, on: float, off: float) -> tuple[Stretch, ...]:
    """Times scatter by a tenth or so, as measured ones do."""
    return (
        Stretch(off * dice.uniform(0.85, 1.15), "", "generate"),
        Stretch(on * dice.uniform(0.92, 1.08), group, "train"),
    )
