"""``coslice chaos`` and ``coslice explore``: the words of the commands that try to break the core."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")]


def add(app: typer.Typer) -> None:
    for command in (chaos, explore):
        app.command()(command)


def chaos(
    seeds: Annotated[int, typer.Option(min=1, help="How many runs.")] = 1000,
    start: Annotated[int, typer.Option(help="The first seed.")] = 0,
    seed: Annotated[
        int | None, typer.Option(metavar="ONE", help="Replay one seed and print its whole story.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    json: Json = None,
) -> None:
    """Shake the real cores in a simulated cluster: crashes, lost messages, failing moves."""
    from coslice.cli.chaos import run_chaos

    raise typer.Exit(run_chaos(seeds=seeds, start=start, out=json, one=seed, workers=workers))


def explore(
    nodes: Annotated[int, typer.Option(min=1, max=3)] = 2,
    jobs: Annotated[int, typer.Option(min=1, max=4)] = 3,
    acquires: Annotated[int, typer.Option(min=1, help="Acquires of each job.")] = 2,
    troubles: Annotated[
        int,
        typer.Option(min=0, max=2, help="In one run: 1 of any kind; 2: also a crash and a failed operation."),
    ] = 1,
    whole: Annotated[
        bool, typer.Option("--whole", help="Jobs that can be frozen in the middle of a phase.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Stop then, incomplete.")] = float("inf"),
    json: Json = None,
) -> None:
    """Walk the real cores through every order of events of a small cluster."""
    from coslice.cli.explore import run_explore

    status = run_explore(
        nodes=nodes,
        jobs=jobs,
        acquires=acquires,
        troubles=troubles,
        whole=whole,
        seconds=seconds,
        out=json,
    )
    raise typer.Exit(status)
