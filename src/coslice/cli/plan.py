"""``coslice plan``: which jobs should share which accelerators, and what it costs each of them."""

import socket
from pathlib import Path
from typing import Annotated

import typer

from coslice.cli.finite import within
from coslice.cli.profile import note, write
from coslice.errors import ConfigError


def plan(
    profiles: Annotated[
        list[Path],
        typer.Argument(
            metavar="PROFILE…", help="Profiles, any file that coslice profile reads, or folders of them."
        ),
    ],
    cluster: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Nodes, GPUs, memory, swaps. Default: as many nodes as it takes."),
    ] = None,
    max_slowdown: Annotated[
        float, typer.Option(metavar="X", help="No job may take more than X times its time alone.")
    ] = 1.10,
    swap_s: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="S", help="Seconds for one change of hands. Default: the cluster's, or 10."
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="S", help="Seconds to improve the plan of many jobs; any time it is sound."
        ),
    ] = None,
    max_jobs: Annotated[int, typer.Option(min=1, metavar="N", help="At most so many jobs a group.")] = 8,
    share: Annotated[
        list[str] | None,
        typer.Option(metavar="POOL", help="Only these pools share, such as trainer; repeat. Default: all."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the plan as JSON; - prints it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the groups file for coslice up --groups.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the turns: FILE.svg, or FILE.html with the words."),
    ] = None,
) -> None:
    """Which jobs should share which accelerators, in which order, and why others should not.

    Every group that it proposes was played through: its jobs' turns one after the other, with swaps, from
    several starts, under the policy that it names. A job's slowdown is its step time there ÷ its step time
    alone.

      coslice plan profiles/ --max-slowdown 1.10 --out groups.toml --picture plan.html
      coslice plan math.json code.json --swap-s 3 --json plan.json
      coslice up --groups groups.toml
    """
    try:
        from coslice.plan.planner import plan as make_plan
        from coslice.plan.planner import units_of
    except ModuleNotFoundError as error:
        raise ConfigError(f"coslice plan needs {error.name}: pip install 'coslice[plan]'") from None
    from rich.console import Console
    from rich.markup import escape

    from coslice.plan.cluster import load_cluster
    from coslice.plan.explain import explain
    from coslice.plan.groupsfile import format_groups
    from coslice.plan.picture import page, svg
    from coslice.profile.read import read_all

    if picture is not None and picture.suffix not in (".svg", ".html"):
        raise ConfigError(f"--picture {picture}: its name ends in .svg or .html")
    within("--swap-s", swap_s)
    within("--budget", budget)
    where = load_cluster(cluster, swap_s=swap_s)
    found = read_all(profiles, note=note)
    made = make_plan(
        found,
        cluster=where,
        max_slowdown=max_slowdown,
        budget=budget,
        max_jobs=max_jobs,
        share=tuple(share or ()),
    )
    import msgspec

    data = msgspec.json.format(msgspec.json.encode(made), indent=1)
    if json is not None and str(json) != "-":
        write(json, data + b"\n")
    if out is not None:
        write(out, format_groups(made).encode())
    if picture is not None:
        units = units_of(found, where, max_slowdown)
        draw = page if picture.suffix == ".html" else svg
        write(picture, draw(made, units).encode())
    # Last: whoever reads may leave in the middle, and the files are there then.
    if str(json) == "-":
        print(data.decode())
    else:
        Console(highlight=False, emoji=False, soft_wrap=True).print(escape(explain(made)))


def groups_given(group: list[str] | None, file: Path | None, *, node: str | None = None) -> tuple[str, ...]:
    """For ``coslice up`` and ``coslice agent``: ``--group`` options, or those of a file for this node."""
    if file is None:
        return tuple(group or ())
    if group:
        raise ConfigError("--group and --groups: the file has the groups; change them there")
    from coslice.plan.groupsfile import group_options

    return tuple(group_options(file, node or socket.gethostname().split(".")[0]))


def every_group(file: Path) -> tuple[str, ...]:
    """For ``coslice orchestrator``: the groups of all nodes in a file."""
    from coslice.plan.groupsfile import every_option

    return tuple(every_option(file))
