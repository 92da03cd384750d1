"""The command line of the simulator and of policies: ``coslice simulate``, ``bench sim`` and ``policy``."""

from pathlib import Path
from typing import Annotated

import typer


def add(app: typer.Typer, bench_app: typer.Typer) -> None:
    app.command()(simulate)
    bench_app.command()(sim)
    policy_app = typer.Typer(no_args_is_help=True, help="Who goes next in a group: show it, change it.")
    policy_app.command("set")(policy_set)
    policy_app.command("show")(policy_show)
    app.add_typer(policy_app, name="policy")


def simulate(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="JOB…",
            help="What [b]coslice profile[/b] reads or writes (profiles, journals, trainers' logs, step "
            "files, GPU utilisation), or [b]NAME=ON/OFF[/b] in seconds, as in math=120/220.",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="Who goes next; see docs/policies.md. Default: fair_share; of a scenario, what its file "
            "says, or fifo."
        ),
    ] = "",
    compare: Annotated[
        str | None, typer.Option(metavar="POLICY,…", help="Several policies, side by side in one table.")
    ] = None,
    swap_s: Annotated[
        float | None,
        typer.Option(
            "--swap-s", min=0.0, help="Seconds of a whole hand-over, half for each way. Default: 0."
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Bytes a second, each way, as in 40GiB: state takes its size's time."
        ),
    ] = None,
    overlap: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Share of the way in that runs beside the way out. Default: 0."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Device memory per node: who fits beside others stays there."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory per node for saved state. Default: no limit."),
    ] = None,
    staleness: Annotated[
        float | None, typer.Option(help="Batches that may be ahead, where the files do not say.")
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="Simulated time. Default: 200 steps of the slowest job.")
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="crashes (of a job, per hour), restart_s, outages (of an agent, per hour), outage_s, "
            "failed_moves (share). Repeat for several.",
        ),
    ] = None,
    admission: Annotated[
        str,
        typer.Option(
            metavar="off|warn|enforce",
            help="As in [b]coslice up[/b]: what would be said, or done, when jobs slow each other down.",
        ),
    ] = "off",
    max_slowdown: Annotated[
        float | None,
        typer.Option(min=1.0, metavar="X", help="With --admission: the bound of each job. Default: 1.1."),
    ] = None,
    declared: Annotated[
        bool, typer.Option("--declared", help="With --admission: jobs say at the door what they will do.")
    ] = False,
    drift: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JOB:AT_S:FACTOR[:on|off]",
            help="From that second on the job's phases (those on, or off, the accelerators) take FACTOR "
            "times as long. Repeat for several.",
        ),
    ] = None,
    scenario: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Groups, jobs, arrivals and costs as JSON, in place of JOB…."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of what is drawn: faults, phases known by quantiles. Default: the scenario's, or 0."
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the journal, as a live run does.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it as a page (of the first policy compared).")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it as a trace for ui.perfetto.dev.")
    ] = None,
) -> None:
    """What would these jobs do to each other? The orchestrator's own core, on a virtual clock."""
    from coslice.cli.simulate import SimulateOptions, run_simulate

    run_simulate(
        SimulateOptions(
            jobs=tuple(jobs or ()),
            scenario=scenario,
            policy=policy,
            compare=tuple(word.strip() for word in compare.split(",")) if compare is not None else (),
            swap_s=swap_s,
            bandwidth=bandwidth,
            overlap=overlap,
            device=device,
            host=host,
            staleness=staleness,
            hours=hours,
            faults=tuple(fault or ()),
            admission=admission,
            max_slowdown=max_slowdown,
            declared=declared,
            drift=tuple(drift or ()),
            seed=seed,
            json=json,
            journal=journal,
            replay=replay,
            perfetto=perfetto,
        )
    )


def sim(
    processes: Annotated[
        int, typer.Option(min=0, help="Worker processes; groups are independent. 0: one for each core.")
    ] = 0,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes, a group on each.")] = 1000,
    jobs: Annotated[int, typer.Option(min=1, help="Jobs that come in the day.")] = 10_000,
    quick: Annotated[
        bool, typer.Option("--quick", help="The first hour of the day: how fast, not how long.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")
    ] = None,
) -> None:
    """How fast is the simulator? Core steps a second, and one day of 10,000 jobs on 1,000 nodes."""
    from coslice.cli.bench_sim import bench_sim

    bench_sim(processes=processes, nodes=nodes, jobs=jobs, hours=1 if quick else 24, out=json)


Address = Annotated[
    str,
    typer.Option(
        "--orchestrator", "-o", envvar="COSLICE_ORCHESTRATOR", metavar="HOST:PORT", help="Where it listens."
    ),
]
HERE = "127.0.0.1:50051"


def policy_set(
    group: Annotated[str, typer.Argument(help="The group.")],
    policy: Annotated[
        str,
        typer.Argument(
            help="As in least_recent, fewest_swaps:max_wait=300 or fair_share:weight/math=2,weight/code=1."
        ),
    ] = "",
    orchestrator: Address = HERE,
) -> None:
    """Change who goes next in a group, from now on. Without POLICY: the configured one again."""
    from coslice.cli.policy import set_policy

    set_policy(group, policy, address=orchestrator)


def policy_show(
    group: Annotated[str, typer.Argument(help="One group. Default: all.")] = "",
    orchestrator: Address = HERE,
) -> None:
    """The policies in force, and the known ones."""
    from coslice.cli.policy import show_policies

    show_policies(group, address=orchestrator)
