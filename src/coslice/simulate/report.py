"""The figures of one simulation. Every name says what it is a share of; formulas are core.duty's."""

import math
from collections.abc import Sequence

from msgspec import Struct

from coslice.core.duty import duty_bound
from coslice.simulate.engine import Engine
from coslice.simulate.jobs import Run
from coslice.simulate.solo import Solo


class Spread(Struct, frozen=True, kw_only=True):
    """A distribution of seconds (or of ratios)."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    count: int = 0


class JobReport(Struct, frozen=True, kw_only=True):
    steps: int
    step_s: float
    solo_step_s: float
    slowdown: float
    """Time of the steps that it finished within the window ÷ the time they take alone."""
    worst10: float
    """The largest slowdown of ten steps in a row (of all, if they are fewer)."""
    solo_duty: float
    """On the group it uses most."""
    starts: int
    """1, and one more for every crash and every refusal."""
    wait: Spread


class PoolReport(Struct, frozen=True, kw_only=True):
    useful_duty: float
    """Share of the window in which a job computed."""
    held_duty: float
    """The same: in the simulation whoever holds the lock computes."""
    swap_duty: float
    """Share of the window that swaps took."""
    duty_bound: float
    swaps: int
    bytes_moved: int


class Report(Struct, frozen=True, kw_only=True):
    policy: str
    useful_duty: float
    duty_bound: float
    slowdown: dict[str, float]
    swaps: int
    wait_s: Spread
    steps_per_s: float
    """Core steps (of locks and nodes) a second of the simulator's own time, ``processes`` together."""
    processes: int
    slowdown_spread: Spread
    gpu_hours_per_step: float
    gpu_hours_per_step_solo: float
    """The same steps with accelerators of their own for every job."""
    window_s: float
    seconds: float
    """What the simulation itself took."""
    core_steps: int
    node_steps: int
    """So many of them of the nodes' side (``core.context.step``), the others of locks."""
    jobs: dict[str, JobReport]
    groups: dict[str, PoolReport]


def report(engine: Engine, *, policy: str) -> Report:
    window = engine.now - engine.scenario.warmup
    jobs: dict[str, JobReport] = {}
    solo: dict[str, list[float]] = {name: [] for name in engine.locks}
    for run in engine.runs.values():
        alone = run.alone()
        if (told := _job(engine, run, alone)) is not None:
            jobs[run.spec.name] = told
        last = run.ends[-1] if run.ends else run.arrival
        stay = max(0.0, (last if run.left else engine.now) - max(run.arrival, engine.scenario.warmup))
        for group, duty in alone.duty.items():
            solo[group].append(duty * min(1.0, stay / window) if window > 0 else 0.0)
    pools = {
        name: PoolReport(
            useful_duty=_share(lock.busy_s, window),
            held_duty=_share(lock.busy_s, window),
            swap_duty=_share(lock.swap_s, window),
            duty_bound=duty_bound(solo[name]),
            swaps=lock.state.swaps,
            bytes_moved=lock.state.bytes_moved,
        )
        for name, lock in engine.locks.items()
    }
    weights = {name: lock.pool.nodes * lock.pool.gpus for name, lock in engine.locks.items()}
    used = [name for name in pools if solo[name]]
    steps = sum(job.steps for job in jobs.values())
    total = engine.core_steps + engine.node_steps
    return Report(
        policy=policy,
        useful_duty=_mean([(pools[n].useful_duty, weights[n]) for n in used]),
        duty_bound=_mean([(pools[n].duty_bound, weights[n]) for n in used]),
        slowdown={name: job.slowdown for name, job in jobs.items()},
        swaps=sum(pool.swaps for pool in pools.values()),
        wait_s=spread([wait for run in engine.runs.values() for wait in run.waits]),
        steps_per_s=total / engine.wall_s if engine.wall_s > 0 else 0.0,
        processes=1,
        slowdown_spread=spread([job.slowdown for job in jobs.values()]),
        gpu_hours_per_step=sum(weights[n] for n in used) * window / 3600 / steps if steps else 0.0,
        gpu_hours_per_step_solo=_solo_gpu_hours(engine, jobs, weights) / steps if steps else 0.0,
        window_s=window,
        seconds=engine.wall_s,
        core_steps=total,
        node_steps=engine.node_steps,
        jobs=jobs,
        groups=pools,
    )


def _job(engine: Engine, run: Run, solo: Solo) -> JobReport | None:
    """None: it finished no step within the window."""
    begin = max(engine.scenario.warmup, run.arrival)
    first = next((k for k, end in enumerate(run.ends) if end > begin), len(run.ends))
    if begin > run.arrival:
        first += 1  # the step under way when the window opened is not whole
    if first >= len(run.ends):
        return None
    ends = [run.ends[first - 1] if first else run.arrival, *run.ends[first:]]
    if len(ends) < 2:
        return None
    solo_ends = [solo.ends[first - 1] if first else 0.0, *solo.ends[first:]]
    count = len(ends) - 1
    return JobReport(
        steps=count,
        step_s=(ends[-1] - ends[0]) / count,
        solo_step_s=(solo_ends[-1] - solo_ends[0]) / count,
        slowdown=_ratio(ends[-1] - ends[0], solo_ends[-1] - solo_ends[0]),
        worst10=max(rolling(ends, solo_ends)),
        solo_duty=max(solo.duty.values()),
        starts=run.starts,
        wait=spread(run.waits),
    )


def rolling(ends: Sequence[float], solo: Sequence[float], *, steps: int = 10) -> list[float]:
    """The slowdown of every ``steps`` steps in a row (of all, if they are fewer). Both sequences have the
    ends of the same steps and, first, the end of the step before; at least two values each."""
    few = min(steps, len(ends) - 1)
    took = [later - end for end, later in zip(ends, ends[few:], strict=False)]
    alone = [later - end for end, later in zip(solo, solo[few:], strict=False)]
    return [_ratio(*spans) for spans in zip(took, alone, strict=False)]


def _ratio(shared: float, alone: float) -> float:
    return shared / (alone if alone > 1e-12 else 1e-12)


def _solo_gpu_hours(engine: Engine, jobs: dict[str, JobReport], weights: dict[str, int]) -> float:
    total = 0.0
    for run in engine.runs.values():
        told = jobs.get(run.name)
        if told is not None:
            gpus = sum(weights[group] for group in run.groups)
            total += gpus * told.steps * told.solo_step_s / 3600
    return total


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread()
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]

    return Spread(
        mean=math.fsum(ordered) / len(ordered),
        p50=at(0.5),
        p90=at(0.9),
        p99=at(0.99),
        max=ordered[-1],
        count=len(ordered),
    )


def _share(seconds: float, window: float) -> float:
    return seconds / window if window > 0 else 0.0


def _mean(values: Sequence[tuple[float, int]]) -> float:
    total = sum(weight for _, weight in values)
    return math.fsum(value * weight for value, weight in values) / total if total else 0.0
