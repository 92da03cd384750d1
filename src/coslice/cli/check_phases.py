"""``coslice check-phases``: run a job without a cluster and say what its phases would do to others.

The job talks to a recording orchestrator that grants everything at once, so nothing waits and nothing moves;
each of its processes writes down what it asked for and where in its code.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coslice.cli.run import wait_for
from coslice.errors import ConfigError
from coslice.testing import phase_rules
from coslice.testing.recording import RecordingOrchestrator


def check_phases(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    groups: Sequence[str],
    swap_s: float,
    out: Path | None,
) -> int:
    """0: nothing found; 1: findings, or not everything was seen; the command's own status if it failed.

    ``environment``: outside; the command has a recording orchestrator's names instead of its own of coslice.
    """
    if not command:
        raise ConfigError("no command: coslice check-phases [options] -- python train.py …")
    if out is not None:
        _write(out, "")  # before the job runs for an hour
    with tempfile.TemporaryDirectory(prefix="coslice-phases-") as folder:
        with RecordingOrchestrator(groups) as recording:
            own = {name: value for name, value in environment.items() if not name.startswith("COSLICE_")}
            status = _run(command, own, recording, groups, folder)
        lines, torn = _lines(Path(folder))
    findings = phase_rules.check(lines, order=groups, swap_s=swap_s)
    phases = phase_rules.phases(lines)
    if out is not None:
        facts: dict[str, Any] = {
            "status": status,
            "phases": [asdict(phase) for phase in phases],
            "findings": [asdict(finding) for finding in findings],
            "torn": torn,
        }
        _write(out, json.dumps(facts, indent=1) + "\n")
    _print(phases, findings, whole=not torn)
    for pid, count in torn.items():
        print(
            f"coslice: the record of process {pid} has {count} line(s) that are not whole: it was killed, or "
            "its disk was full, while it wrote. What they said is lost, a phase's end perhaps: a leak or an "
            "order told of this process may be none, and one may be missing; the rest was analysed",
            file=sys.stderr,
        )
    if status:
        before = "" if phases or findings else " before it entered a phase"
        print(f"coslice: the command ended with status {status}{before}", file=sys.stderr)
        return status
    if not (phases or findings or torn):
        print(
            "coslice: nothing to check: the command entered no phase. Put @orchestrator.on_accelerators, or "
            "acquire() and yield_(), around what uses accelerators",
            file=sys.stderr,
        )
        return 1
    return 1 if findings or torn else 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _run(
    command: Sequence[str],
    own: Mapping[str, str],
    recording: RecordingOrchestrator,
    groups: Sequence[str],
    folder: str,
) -> int:
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
    return wait_for(process)  # one that was interrupted has a trace worth reading all the same


def _lines(folder: Path) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """What the job's processes wrote, in the order of time, and how many lines of which are not whole."""
    found: list[dict[str, Any]] = []
    torn: dict[int, int] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                pid = int(path.name.partition("-")[0])
                torn[pid] = torn.get(pid, 0) + 1
    return sorted(found, key=lambda line: float(line["at"])), torn


def _print(
    phases: Sequence[phase_rules.Phase], findings: Sequence[phase_rules.Finding], *, whole: bool
) -> None:
    console = Console(highlight=False, emoji=False)
    table = Table(title="phases", title_justify="left")
    for column in ("phase", "groups", "times", "seconds, all", "median", "first entered at"):
        table.add_column(column, overflow="fold")
    for phase in phases:
        times = sorted(phase.seconds)
        median = f"{times[len(times) // 2]:.3g} s" if times else ""
        table.add_row(
            escape(phase.name),
            escape(", ".join(phase.groups)),
            str(len(times)),
            f"{sum(times):.3g}",
            median,
            escape(phase.where),
        )
    if phases:
        console.print(table)
    for phase in phases:
        if phase.errors:
            text = f"phase {phase.name} at {phase.where} was ended by {', '.join(sorted(set(phase.errors)))}"
            console.print(text, markup=False, soft_wrap=True)
    for finding in findings:
        where = escape(f"phase {finding.phase or '(none)'} at {finding.where}")
        console.print(f"[bold]{finding.rule}[/bold]: {where}", soft_wrap=True)
        console.print(f"    {finding.text}", markup=False, soft_wrap=True)
    if phases and whole and not findings:
        console.print(
            "no problem found: order of groups, leaks, work outside a phase, phases too short", soft_wrap=True
        )
