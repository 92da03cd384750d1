"""Runs the demo: calibrate, then rounds of every job alone and all together, then say what was measured.

``main`` is what ``coslice demo`` calls. Everything that is started runs within one ``Children`` context and
one temporary folder, so that an interrupt leaves no process, socket or file behind.
"""

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coslice.demo.blocks import JobPlan, Listener, Machine, shared, solo, start_verifier
from coslice.demo.calibration import DUTY, Calibration, calibrate
from coslice.demo.figures import Figures, Round, turns_of
from coslice.demo.processes import Child, Children
from coslice.demo.report import print_report
from coslice.demo.view import View
from coslice.errors import ConfigError
from coslice.replay.page import render
from coslice.sizes import format_size, parse_size

BLOCK_S = 18.5
"""About how long one block shall train: six of them, and what is around them, stay within three minutes."""


@dataclass(frozen=True)
class DemoOptions:
    jobs: int = 2
    memory: str | None = None
    rounds: int = 2
    steps: int | None = None
    json: str | None = None
    out: str = "coslice-demo"
    quick: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Result:
    figures: Figures
    calibration: Calibration
    plans: tuple[JobPlan, ...]
    journal: Path
    replay: Path
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return self.figures.as_json() | {
            "seconds": self.seconds, "jobs": {plan.name: {"task": plan.task, "seed": plan.seed, "steps":
            plan.steps} for plan in self.plans}, "calibration": {
                "section_s": self.calibration.section_s,
                "questions": self.calibration.questions,
                "verifier_answers_per_s": self.calibration.rate,
                "state_bytes": self.calibration.state_bytes,
                "need_bytes": self.calibration.need_bytes,
                "aimed_solo_duty": DUTY,
            },
        }  # fmt: skip


def main(options: DemoOptions) -> int:
    """Run and report. 0: sharing changed nothing; 1: some job's parameters differ; 130: interrupted."""
    view = View()
    previous = {signum: signal.signal(signum, _interrupt) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with view:
            result = run_demo(options, view)
    except KeyboardInterrupt:
        view.console.print("interrupted; everything that was started is stopped")
        return 130
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    print_report(view.console, result)
    if options.json is not None:
        Path(options.json).write_text(json.dumps(result.as_json(), indent=2) + "\n")
        view.console.print(f"figures: {options.json}")
    return 0 if result.figures.state_identical else 1


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def run_demo(options: DemoOptions, listener: Listener) -> Result:
    """The whole demo. ``ConfigError``: nothing was run; ``OperationFailed``: one of its processes failed."""
    begun = time.monotonic()
    asked = parse_size(options.memory) if options.memory is not None else None
    if options.json is not None and not Path(options.json).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {options.json}: there is no such folder; create it first")
    out = Path(options.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot use {out}: {error.strerror}; name another folder with --out") from None
    with (
        _keeping_to_our_cores() as machine,
        tempfile.TemporaryDirectory(prefix="coslice-demo-") as name,
        Children(Path(name), cpus=machine.others, all_cpus=machine.all) as children,
    ):
        folder = Path(name)
        listener.stage("calibrating: how long is one accelerator section on this machine?")
        calibration = calibrate(children, machine, _plans(options)[0], section_s=_section_s(options))
        budget = _budget(asked, calibration, options.jobs)
        plans, verifiers = _verified(
            children, machine, _sized(_plans(options), options, calibration), calibration
        )
        rounds = [
            _round(children, machine, plans, verifiers, listener, number=number, of=_rounds(options),
                   calibration=calibration, budget=budget, folder=folder)
            for number in range(1, _rounds(options) + 1)
        ]  # fmt: skip
        turns = [turns_of(round_.shared) for round_ in rounds]
        figures = Figures(rounds, turns, budget, calibration.need_bytes)
        seconds = time.monotonic() - begun
        result = Result(
            figures, calibration, tuple(plans), out / "journal.jsonl", out / "replay.html", seconds
        )
        _write_journal(result)
    render(result.journal, result.replay)
    return replace(result, seconds=time.monotonic() - begun)


@contextmanager
def _keeping_to_our_cores() -> Iterator[Machine]:
    """The last core is the accelerator; this process, and what it starts, stays on the others."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        raise ConfigError(
            "the demo needs two cores: one plays the accelerator, the other does everything else; "
            f"this process may use {len(allowed)}"
        )
    machine = Machine(max(allowed), frozenset(allowed - {max(allowed)}))
    os.sched_setaffinity(0, machine.others)
    try:
        yield machine
    finally:
        os.sched_setaffinity(0, allowed)


def _plans(options: DemoOptions) -> list[JobPlan]:
    tasks = ("reverse", "sort", "shift", "sort")
    return [
        JobPlan(f"job-{'abcd'[index]}", task, options.seed * 100 + index + 1, questions=16, steps=0)
        for index, task in enumerate(tasks[: options.jobs])
    ]


def _contended(options: DemoOptions) -> bool:
    """Do the jobs together want more than the whole accelerator?"""
    return options.jobs * DUTY > 1


def _section_s(options: DemoOptions) -> float:
    """Longer where every hand-over counts, because nobody leaves the accelerator idle meanwhile."""
    if options.quick:
        return 0.5
    return 1.35 if _contended(options) else 0.85


def _rounds(options: DemoOptions) -> int:
    # With more jobs than the accelerator has time for, a round takes as long as two.
    return 1 if options.quick or _contended(options) else options.rounds


def _sized(plans: list[JobPlan], options: DemoOptions, calibration: Calibration) -> list[JobPlan]:
    steps = options.steps or max(9, min(18, round(BLOCK_S / calibration.step_s)))
    if options.quick:
        steps = options.steps or 8
    return [replace(plan, questions=calibration.questions, steps=steps) for plan in plans]


def _budget(asked: int | None, calibration: Calibration, jobs: int) -> int:
    """Room for one computing job beside what the others leave behind, but not for the states of two."""
    least = calibration.need_bytes + (jobs - 1) * calibration.left_bytes
    if asked is None:
        return max(least, (least + 2 * calibration.state_bytes) // 2)
    if asked < least:
        raise ConfigError(
            f"--memory {format_size(asked)} is not enough for one job: it takes "
            f"{format_size(calibration.need_bytes)} while it computes, beside "
            f"{format_size(least - calibration.need_bytes)} that parked jobs may leave; "
            f"use at least {format_size(least * 1.02)}"
        )
    return asked


def _verified(
    children: Children, machine: Machine, plans: list[JobPlan], calibration: Calibration
) -> tuple[list[JobPlan], dict[str, Child]]:
    verifiers: dict[str, Child] = {}
    ready: list[JobPlan] = []
    for plan in plans:
        child, port = start_verifier(children, machine, f"verifier-{plan.name}", calibration.rate)
        verifiers[plan.name] = child
        ready.append(replace(plan, verifier_port=port))
    return ready, verifiers


def _round(
    children: Children,
    machine: Machine,
    plans: list[JobPlan],
    verifiers: dict[str, Child],
    listener: Listener,
    *,
    number: int,
    of: int,
    calibration: Calibration,
    budget: int,
    folder: Path,
) -> Round:
    services = list(verifiers.values())
    alone = {}
    for plan in plans:
        listener.block(f"round {number}/{of}: {plan.name} alone", [plan], shared=False)
        alone[plan.name] = solo(children, machine, plan, services, listener)
    listener.block(f"round {number}/{of}: together", plans, shared=True)
    together = shared(
        children, machine, plans, services, listener,
        need=calibration.need_bytes, budget=budget, folder=folder / f"up-{number}",
    )  # fmt: skip
    return Round(alone, together)


def _write_journal(result: Result) -> None:
    """The last shared block's journal, with the solo runs beside it and the figures at its end."""
    last = result.figures.rounds[-1].shared
    assert last.journal is not None
    lines = [last.journal.read_text().rstrip("\n")]
    for number, round_ in enumerate(result.figures.rounds, start=1):
        for job, block in round_.solo.items():
            run = block.runs[job]
            facts = {
                "job": job,
                "round": number,
                "steps": [[step.begin, step.end] for step in run.steps],
                "phases": [phase for step in run.steps for phase in step.phases if phase[0] != "wait"],
                "rewards": run.rewards,
            }
            lines.append(json.dumps({"t": run.steps[-1].end, "solo": facts}))
    end = max(run.steps[-1].end for run in last.runs.values())
    lines.append(json.dumps({"t": end, "summary": result.as_json()}))
    result.journal.write_text("\n".join(lines) + "\n")
