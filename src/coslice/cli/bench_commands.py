"""``coslice bench …``: the words of the commands that measure coslice itself."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")]


def add(app: typer.Typer) -> typer.Typer:
    """The group of commands, for others to join."""
    bench = typer.Typer(
        no_args_is_help=True, help="Measure coslice itself; every figure is a ratio of one run."
    )
    app.add_typer(bench, name="bench")
    for command in (handoff, swap, scale, driver):
        bench.command()(command)
    return bench


def handoff(
    nodes: Annotated[int, typer.Option(min=1, max=16, help="Agents, each a process of its own.")] = 1,
    rounds: Annotated[int, typer.Option(min=20, help="Hand-overs to measure.")] = 300,
    upstream: Annotated[
        bool, typer.Option("--upstream", help="A caller of llm-d's wire against a native client.")
    ] = False,
    json: Json = None,
) -> None:
    """Latency of acquire and hand-over against a unary echo: real processes, real sockets, SQLite FULL."""
    from coslice.cli.bench import bench_handoff

    bench_handoff(nodes=nodes, rounds=rounds, upstream=upstream, out=json)


def swap(
    size: Annotated[str, typer.Option(metavar="SIZE", help="State of one job.")] = "1GiB",
    rounds: Annotated[int, typer.Option(min=3, help="Pairs of swap and plain copy; medians are told.")] = 7,
    json: Json = None,
) -> None:
    """What swaps of real state cost against plain copies: alone, incremental, in parts, overlapped."""
    from coslice.cli.bench_swap import bench_swap
    from coslice.sizes import parse_size

    bench_swap(size=parse_size(size), rounds=rounds, out=json)


def scale(
    groups: Annotated[int, typer.Option(min=1)] = 1000,
    jobs: Annotated[int, typer.Option(min=2, help="In all, each on a TCP connection of its own.")] = 10000,
    rate: Annotated[float, typer.Option(min=1.0, help="Hand-overs a second, all groups together.")] = 200.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to measure.")] = 30.0,
    json: Json = None,
) -> None:
    """One orchestrator process under many groups and connections: hand-overs, memory, idle processor time."""
    from coslice.cli.bench_scale import bench_scale

    bench_scale(groups=groups, jobs=jobs, rate=rate, seconds=seconds, out=json)


def driver(
    groups: Annotated[int, typer.Option(min=1, help="Groups, each with two jobs that take turns.")] = 100,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to measure.")] = 5.0,
    json: Json = None,
) -> None:
    """Hand-overs a second through lock, driver, journal and SQLite FULL, without wire and agents."""
    from coslice.cli.bench_driver import bench_driver

    bench_driver(groups=groups, seconds=seconds, out=json)
