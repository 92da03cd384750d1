"""``coslice chaos``: many seeds of the simulated system under trouble, spread over worker processes.

Prints how often each kind of trouble struck: a quiet run shall not pass for a good one. A seed that fails
prints its last decisions with their reasons, and ``--seed`` replays it alone, from the first one.
"""

import contextlib
import json
import multiprocessing
import signal
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from coslice.proof.chaos import EVENTS, Outcome, run_seed

console = Console(highlight=False, emoji=False)
SHOWN = 3
"""Failing seeds whose story is printed; all are named."""
WHOLE = 100_000


def run_chaos(*, seeds: int, start: int, out: Path | None, one: int | None, workers: int) -> int:
    """The exit status: 0, 1 if an invariant was broken, 130 if interrupted (with the figures so far)."""
    if one is not None:
        return _replay(one, out)
    began = time.monotonic()
    outcomes, interrupted = _run(range(start, start + seeds), workers)
    if not interrupted and len(outcomes) < seeds:
        console.print(f"a worker died: only {len(outcomes)} of {seeds} seeds were run")
        return 2
    figures = _figures(outcomes, time.monotonic() - began) | {"start": start, "workers": workers}
    _print(figures, outcomes)
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n")
    if interrupted:
        console.print(f"interrupted after {len(outcomes)} of {seeds} seeds")
        return 130
    return 1 if figures["violations"] else 0


def _replay(seed: int, out: Path | None) -> int:
    outcome = run_seed(seed, kept=WHOLE, tell=True)
    for line in outcome.story:
        console.print(line, markup=False, soft_wrap=True)
    verdict = outcome.violation or "no invariant was broken; everybody was served"
    console.print(f"seed {seed}: {outcome.events} events. {verdict}", markup=False, soft_wrap=True)
    if out is not None:
        out.write_text(json.dumps(_figures([outcome], 0.0) | {"start": seed, "workers": 1}, indent=1) + "\n")
    return 1 if outcome.violation else 0


def _run(seeds: range, workers: int) -> tuple[list[Outcome], bool]:
    outcomes: list[Outcome] = []
    processes: list[SpawnProcess] = []
    interrupted = False
    try:
        console.print(f"{len(seeds)} seeds from {seeds.start}, {workers} workers")
        pipes = _start(seeds, workers, processes)
        _collect(pipes, len(seeds), outcomes)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        for process in processes:
            process.kill()  # one that has just been started would complain of a parent that went away
            process.join()
    return sorted(outcomes, key=lambda outcome: outcome.seed), interrupted


def _start(seeds: range, workers: int, processes: list[SpawnProcess]) -> list[Connection]:
    """Each has every n-th seed, and is added to ``processes``. Ctrl-C is for us alone: who is started while
    it is blocked never hears it. We do when all are started: another thread of ours may take it, and a worker
    that is cut off while it starts complains."""
    context = multiprocessing.get_context("spawn")
    pipes, pressed = [], list[int]()
    heard = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for number in range(min(workers, len(seeds))):
            ours_end, theirs = context.Pipe(duplex=False)
            mine = seeds[number :: min(workers, len(seeds))]
            process = context.Process(target=_work, args=(mine, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours_end)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, heard)
    if pressed and heard is not signal.SIG_IGN:
        raise KeyboardInterrupt
    return pipes


def _work(seeds: range, pipe: Connection) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        for seed in seeds:
            pipe.send(run_seed(seed))
    pipe.close()


def _collect(pipes: list[Connection], total: int, outcomes: list[Outcome]) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    open_pipes = list(pipes)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("seeds", total=total)
        while open_pipes:
            for pipe in wait(open_pipes):
                assert isinstance(pipe, Connection)
                try:
                    outcome = pipe.recv()
                except EOFError:
                    open_pipes.remove(pipe)
                    continue
                outcomes.append(outcome)
                if outcome.violation:
                    progress.console.print(f"seed {outcome.seed}: {outcome.violation}", markup=False)
                progress.advance(task)


def _figures(outcomes: list[Outcome], seconds: float) -> dict[str, object]:
    faults: Counter[str] = Counter()
    for outcome in outcomes:
        faults.update(outcome.faults)
    failing = [o.seed for o in outcomes if o.violation]
    return {
        "seeds": len(outcomes),
        "violations": len(failing),
        "seeds_per_s": round(len(outcomes) / seconds, 2) if seconds else 0.0,
        "events": sum(o.events for o in outcomes),
        "events_per_seed_at_least": min((o.events for o in outcomes if not o.violation), default=0),
        "faults": dict(sorted(faults.items())),
        "failing_seeds": failing,
        "seconds": round(seconds, 1),
    }


def _print(figures: dict[str, object], outcomes: list[Outcome]) -> None:
    failing = [o for o in outcomes if o.violation]
    for outcome in failing[:SHOWN]:
        console.print(f"\nseed {outcome.seed}: {outcome.violation}", markup=False, soft_wrap=True)
        for line in outcome.story:
            console.print(line, markup=False, soft_wrap=True)
        console.print(f"replay it alone: coslice chaos --seed {outcome.seed}")
    table = Table("trouble", "times", title="What struck", title_justify="left")
    faults = figures["faults"]
    assert isinstance(faults, dict)
    for kind, times in faults.items():
        table.add_row(kind, f"{times:,}")
    console.print(table)
    console.print(
        f"{figures['seeds']} seeds, {figures['events']:,} events (at least {EVENTS} in each storm), "
        f"{figures['seeds_per_s']} seeds/s with {figures.get('workers')} workers: "
        f"{figures['violations']} violations"
    )
    if failing:
        console.print(f"failing seeds: {', '.join(str(o.seed) for o in failing)}")
