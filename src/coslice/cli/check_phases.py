"""``coslice check-phases``: run a job without a cluster and say what its phases would do to others.

The job talks to a recording orchestrator that grants everything at once, so nothing waits and nothing moves;
each of its processes writes down what it asked for and where in its code.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from coslice.errors import ConfigError
from coslice.testing import phase_rules
from coslice.testing.recording import RecordingOrchestrator


def check_phases(command: Sequence[str], *, groups: Sequence[str], swap_s: float, out: Path | None) -> int:
    """0: nothing found; 1: findings; the command's own status if it failed."""
    if not command:
        raise ConfigError("no command: coslice check-phases [options] -- python train.py …")
    with tempfile.TemporaryDirectory(prefix="coslice-phases-") as folder:
        with RecordingOrchestrator(groups) as recording:
            status = _run(command, recording, groups, folder)
        lines = _lines(Path(folder))
    findings = phase_rules.check(lines, order=groups, swap_s=swap_s)
    phases = phase_rules.phases(lines)
    if out is not None:
        facts: dict[str, Any] = {
            "status": status,
            "phases": [asdict(phase) for phase in phases],
            "findings": [asdict(finding) for finding in findings],
        }
        out.write_text(json.dumps(facts, indent=1) + "\n")
    _print(phases, findings)
    if status:
        print(f"coslice: the command ended with status {status}", file=sys.stderr)
        return status
    return 1 if findings else 0


def _run(command: Sequence[str], recording: RecordingOrchestrator, groups: Sequence[str], folder: str) -> int:
    own = {name: value for name, value in os.environ.items() if not name.startswith("COSLICE_")}
    roles = dict(
        zip(("COSLICE_TRAINER_GROUP", "COSLICE_SAMPLER_GROUP"), (groups[0], groups[-1]), strict=True)
    )
    environment = {
        **own,
        **recording.env("checked", ",".join(groups)),
        **roles,
        "COSLICE_RECORD_PHASES": folder,
    }
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise ConfigError(f"cannot start {command[0]!r}: {error.strerror}") from None
    while True:
        try:
            status = process.wait()
        except (
            KeyboardInterrupt
        ):  # the terminal has told the job too: its trace is worth reading all the same
            process.send_signal(signal.SIGINT)
            continue
        return status if status >= 0 else 128 - status


def _lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(found, key=lambda line: float(line["at"]))


def _print(phases: Sequence[phase_rules.Phase], findings: Sequence[phase_rules.Finding]) -> None:
    console = Console(highlight=False)
    if not phases:
        console.print(
            "the command entered no phase: put @orchestrator.on_accelerators on its accelerator phases"
        )
    table = Table(title="phases", title_justify="left")
    for column in ("phase", "groups", "times", "seconds, all", "median", "first entered at"):
        table.add_column(column)
    for phase in phases:
        times = sorted(phase.seconds)
        median = f"{times[len(times) // 2]:.3g} s" if times else ""
        table.add_row(
            phase.name, ", ".join(phase.groups), str(len(times)), f"{sum(times):.3g}", median, phase.where
        )
    if phases:
        console.print(table)
    for finding in findings:
        console.print(f"[bold]{finding.rule}[/bold]: phase {finding.phase or '(none)'} at {finding.where}")
        console.print(f"    {finding.text}", soft_wrap=True)
    if phases and not findings:
        console.print("no problem found: order of groups, leaks, work outside a phase, phases too short")
