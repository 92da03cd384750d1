"""Jobs for the planner's tests: given figures, or drawn from a seed."""

import random

from coslice.plan.cluster import Cluster
from coslice.plan.planner import units_of
from coslice.plan.units import Unit
from coslice.profile.given import given_profile
from coslice.profile.model import Phase, Profile, durations, make_pool
from coslice.profile.options import ReadOptions


def job(name: str, busy: float, period: float, staleness: float = 0.0, accelerators: int = 0) -> Profile:
    options = ReadOptions(staleness=staleness, accelerators=accelerators)
    return given_profile(name, busy=busy, period=period, options=options)


def drawn(count: int, seed: int, *, samples: int = 16, sizes: tuple[int, ...] = (0,)) -> list[Profile]:
    """Periods of one to twelve minutes, any coupling, a spread of 2 to 20 %, some with two turns a cycle."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        period, duty, spread = rng.uniform(60, 700), rng.uniform(0.05, 0.7), rng.uniform(0.02, 0.2)
        staleness = rng.choice([0.0, 0.0, 0.25, 1.0, 2.5, 8.0])

        def part(mean: float, spread: float = spread) -> list[float]:
            return [max(0.01, mean * rng.gauss(1, spread)) for _ in range(samples)]

        phases = [
            Phase(
                name="gen",
                on=False,
                duration=durations(part(period * (1 - duty))),
                coupling="buffered" if staleness else "closed",
                staleness=staleness,
            ),
            Phase(name="update", on=True, duration=durations(part(period * duty * 0.8))),
        ]
        if rng.random() < 0.3:
            phases.append(Phase(name="reward", on=False, duration=durations(part(period * 0.05))))
        phases.append(Phase(name="sync", on=True, duration=durations(part(period * duty * 0.2))))
        pool = make_pool("trainer", phases, accelerators=rng.choice(sizes), state_bytes=40 << 30)
        found.append(Profile(name=f"job{number}", pools=(pool,)))
    return found


def units(profiles: list[Profile], *, swap_s: float = 10.0, max_slowdown: float = 1.10) -> list[Unit]:
    return units_of(profiles, Cluster(swap_s=swap_s), max_slowdown)
