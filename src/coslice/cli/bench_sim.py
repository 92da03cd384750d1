"""``coslice bench sim``: how fast the simulator, and so the core, is."""

import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console

from coslice.errors import ConfigError
from coslice.simulate.day import Part, Told, run_quietly
from coslice.tied import tie

console = Console(highlight=False, emoji=False)
progress = Console(stderr=True, highlight=False, emoji=False)
PARTS = 20
FINE = 16
"""Slices of the last part, for every process but one: whoever is free takes the next, the largest come first,
so that all end together."""


def bench_sim(*, processes: int, nodes: int, jobs: int, hours: float, out: Path | None) -> None:
    """One day of many jobs on many nodes, or its first hours.

    ``steps_per_s``: all core steps ÷ wall time of the run, in ``processes`` together (0: one for each core
    that we may use). ``steps_per_cpu_s``: ÷ the processor time that they took, which a busy machine does not
    change as much. A core step is one call of ``core.group.step`` or (``node_steps`` of them) of
    ``core.context.step``.
    """
    processes = min(PARTS, nodes, jobs, processes or len(os.sched_getaffinity(0)))
    parts = parts_of(processes, nodes=nodes, jobs=jobs, hours=hours)
    begun = time.perf_counter()
    told = list(_run(parts, processes))
    wall = time.perf_counter() - begun
    steps = sum(one.core_steps for one in told)
    result = {
        "steps_per_s": steps / wall,
        "steps_per_cpu_s": steps / sum(one.cpu_s for one in told),
        "processes": processes,
        "core_steps": steps,
        "node_steps": sum(one.node_steps for one in told),
        "cpu_s": sum(one.cpu_s for one in told),
        "seconds": wall,
        "simulated_s": 3600 * hours,
        "nodes": nodes,
        "jobs": jobs,
        "useful_duty": sum(one.useful_s for one in told) / (3600 * hours * sum(one.groups for one in told)),
        "slowdown_mean": sum(one.slowdowns for one in told) / max(1, sum(one.jobs for one in told)),
        "swaps": sum(one.swaps for one in told),
    }
    if out is not None:
        try:
            out.write_text(json.dumps(result, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}") from None
    for key, value in result.items():
        console.print(f"{key:18} {value:,.3f}")


def parts_of(processes: int, *, nodes: int, jobs: int, hours: float) -> list[Part]:
    """The largest slices first. Every group is in one of them."""
    count = min(PARTS, nodes, jobs)
    slices = [max(1, FINE * (processes - 1) // (count - n)) for n in range(count)]
    return [
        Part(
            nodes=nodes // count + (n < nodes % count),
            jobs=jobs // count + (n < jobs % count),
            seed=n,
            seconds=3600 * hours,
            slice=k,
            of=min(slices[n], nodes // count),
        )
        for n in range(count)
        for k in range(min(slices[n], nodes // count))
    ]


def _run(parts: list[Part], processes: int) -> list[Told]:
    if processes == 1:
        told = []
        for number, part in enumerate(parts, 1):
            told.append(run_quietly(part))
            _say(number, len(parts))
        return told
    # Not forked: whoever calls this may have threads, gRPC's for one, that a fork would leave locked.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=tie, initargs=(os.getpid(),)) as pool:
        tasks = [pool.submit(run_quietly, part) for part in parts]
        try:
            for number, task in enumerate(as_completed(tasks), 1):
                task.result()
                _say(number, len(parts))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()  # in the middle of a part, which takes seconds
            raise
        return [task.result() for task in tasks]


def _say(number: int, count: int) -> None:
    if progress.is_terminal:
        progress.print(f"{number} of {count} parts", end="\r")
