"""``coslice doctor``: what is wrong with this machine for time-slicing, each with its fix.

Looks and asks; changes nothing. The checks are in ``doctor_node`` (the machine, its devices, its limits) and
``doctor_jobs`` (servers of coslice, engines); here they are run and told.
"""

import json as jsonlib
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from coslice.cli.doctor_facts import Finding, Level, Machine

console = Console(highlight=False, emoji=False)
MARKS = {
    Level.OK: "[green]ok[/green]     ",
    Level.NOTE: "[dim]note[/dim]   ",
    Level.WARNING: "[yellow]warning[/yellow]",
    Level.PROBLEM: "[red]problem[/red]",
}
Check = Callable[[Machine], Iterable[Finding]]


def doctor(
    orchestrator: Annotated[
        str, typer.Option("--orchestrator", "-o", envvar="COSLICE_ORCHESTRATOR", metavar="HOST:PORT")
    ] = "127.0.0.1:50051",
    agent: Annotated[
        str, typer.Option("--agent", envvar="COSLICE_AGENT", metavar="HOST:PORT")
    ] = "127.0.0.1:9001",
    endpoint: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Also ask this vLLM or SGLang server whether it can sleep."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Count warnings as problems.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and problems.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """What is wrong with this machine, and how to mend it. Changes nothing.

    Looks at the driver and its bindings, privileges, limits and memory, at what listens on coslice's ports,
    and at the flags of inference servers that run here. Run it as the user that runs the agent, in the
    agent's container.

    Status 0: nothing in the way (perhaps warnings). 1: at least one problem. 2: a malformed option.
    """
    from coslice.cli.doctor_jobs import job_checks
    from coslice.cli.doctor_node import NODE_CHECKS

    checks: list[Check] = [*NODE_CHECKS, *job_checks(orchestrator, agent, tuple(endpoint or ()))]
    found = list(examine(Machine.here(), checks))
    bad = sum(each.level is Level.PROBLEM or (strict and each.level is Level.WARNING) for each in found)
    if json:
        print(jsonlib.dumps({"problems": bad, "findings": [each.as_dict() for each in found]}))
    else:
        _print([each for each in found if not quiet or each.level in (Level.WARNING, Level.PROBLEM)], bad)
    raise typer.Exit(1 if bad else 0)


def add(app: typer.Typer) -> None:
    app.command()(doctor)


def examine(machine: Machine, checks: Iterable[Check]) -> Iterator[Finding]:
    """Every finding of every check. A check that breaks is a finding, and the others go on."""
    for check in checks:
        try:
            yield from check(machine)
        except Exception as error:
            name = getattr(check, "__name__", "check")
            yield Finding(
                check=name,
                level=Level.WARNING,
                text=f"could not be looked at: {type(error).__name__}: {error}",
                fix="report this, with the output of `coslice doctor --json`",
            )


def _print(findings: list[Finding], bad: int) -> None:
    for each in findings:
        console.print(f"{MARKS[each.level]} {each.check}: {escape(each.text)}", soft_wrap=True)
        if each.fix:
            console.print(f"        [b]→[/b] {escape(each.fix)}", soft_wrap=True)
    verdict = "nothing in the way" if not bad else f"{bad} problem{'s' if bad > 1 else ''}"
    console.print(f"\n{verdict}")
