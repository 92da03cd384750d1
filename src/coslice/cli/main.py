"""The ``coslice`` command. Each sub-command imports what it needs only when it runs."""

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from coslice.cli import admin, bench_commands, doctor, move, proof_commands, security, simulate_commands
from coslice.cli.drain import drain
from coslice.cli.plan import groups_given, plan
from coslice.cli.profile import profile
from coslice.cli.store import store_app
from coslice.errors import ConfigError, CosliceError
from coslice.observe import decisions
from coslice.security import redact
from coslice.security.listening import Security, make_tls

app = typer.Typer(
    name="coslice",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help=(
        "Let independent RL training jobs share the same accelerators by taking turns.\n\n"
        "Start here:  [b]coslice demo[/b]   two real jobs, alone and then together on one accelerator.\n\n"
        "Your own jobs:  [b]coslice up[/b] in one terminal, then in two others\n"
        "[b]coslice run --job a -- python train_a.py[/b] and the same for b; "
        "[b]coslice status[/b] shows who runs."
    ),
)
app.add_typer(store_app, name="store")
app.command()(profile)
app.command()(plan)

Orchestrator = Annotated[
    str,
    typer.Option(
        "--orchestrator",
        "-o",
        envvar="COSLICE_ORCHESTRATOR",
        metavar="HOST:PORT",
        help="Where it listens; with several, commas between.",
    ),
]
GroupsFile = Annotated[
    Path | None,
    typer.Option(
        "--groups", metavar="FILE", help="The groups of this node, as [b]coslice plan --out[/b] wrote them."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A time or a limit, e.g. [b]max_hold=30m[/b]; repeat for several (docs/settings.md lists them).",
    ),
]
proof_commands.add(app)
simulate_commands.add(app, bench_commands.add(app))
security.add(app)
move.add(app)
doctor.add(app)
admin.add(app)
app.command()(drain)
Backend = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="NAME[:key=value,...]",
        help="What moves the state of jobs that do not say, with its settings; repeat to set others.",
    ),
]
TlsCert = Annotated[
    str | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate of this server (PEM): TLS.")
]
TlsKey = Annotated[
    str | None, typer.Option("--tls-key", metavar="FILE", help="Its key; others cannot read it.")
]
TlsCa = Annotated[
    str | None, typer.Option("--tls-ca", metavar="FILE", help="CA of the agents' and servers' certificates.")
]
TokenSecret = Annotated[
    str | None,
    typer.Option(
        "--token-secret", metavar="FILE", help="Ask every caller for a token ([b]coslice token --help[/b])."
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Listen beyond loopback without TLS and tokens: whoever reaches the port may do everything.",
    ),
]
ListenAgents = Annotated[
    str | None,
    typer.Option(
        "--listen-agents", metavar="HOST:PORT", help="With TLS: where agents attach. Default: the next port."
    ),
]
Http = Annotated[
    str | None,
    typer.Option(
        "--http",
        metavar="HOST:PORT",
        help="Serve [b]/metrics[/b] for Prometheus, [b]/healthz[/b] and [b]/readyz[/b] here, and "
        "an orchestrator's dashboard at [b]/[/b]; port 0: any. "
        "Beyond loopback it needs TLS and tokens as the other ports do.",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Host memory for saved state. Default: half of what is available."),
]
HostPerJob = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The most of it that one job may have; a job with more state is not moved out, and says so. "
        "Default: all.",
    ),
]
Disk = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Disk behind host memory: when that is short, state that was idle longest goes there, and is "
        "back before its job's turn. Default: none.",
    ),
]
DiskDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Where; it makes a folder of its own there. Default: in the state folder."
    ),
]
Otlp = Annotated[
    str | None,
    typer.Option(
        "--otlp",
        metavar="URL",
        help="Send a trace of every hand-over to the OpenTelemetry collector here, e.g. "
        "http://127.0.0.1:4317. Needs [b]pip install 'coslice\\[otel]'[/b].",
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level",
        metavar="LEVEL",
        help="What goes to standard error: [b]warning[/b] and above, [b]info[/b] (every turn with its "
        "reason), or [b]debug[/b].",
    ),
]
LogFormat = Annotated[
    str, typer.Option("--log-format", metavar="text|json", help="Lines for people, or one JSON object each.")
]
Admission = Annotated[
    str,
    typer.Option(
        metavar="off|warn|enforce",
        help="Watch what jobs do to each other: [b]warn[/b] says when one is slowed down beyond "
        "--max-slowdown, [b]enforce[/b] refuses newcomers, changes the order or queues the newest; "
        "see docs/planning.md.",
    ),
]
MaxSlowdown = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="With --admission: no job may take more than X times its time alone, over ten steps.",
    ),
]
DEFAULT_ORCHESTRATOR = "127.0.0.1:50051"
DEFAULT_AGENT = "127.0.0.1:9001"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"coslice {importlib.metadata.version('coslice')}")
        raise typer.Exit


@app.callback()
def coslice(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


@app.command()
def up(
    group: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            "-g",
            metavar="NAME[:cpus=1,2][:memory=SIZE][:admission=warn][:max_slowdown=X][:policy=NAME]",
            help="A group of accelerators of this machine; repeat for several. Default: one, [b]default[/b].",
        ),
    ] = None,
    groups: GroupsFile = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Device memory of each group's host accelerator, e.g. 512MiB."),
    ] = None,
    cpus: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Cores of the host accelerator, e.g. 1 or 2,3. Default: the last core."
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="[b]host[/b] (CPU cores), [b]cuda[/b], or [b]auto[/b]: cuda where torch finds one."
        ),
    ] = "auto",
    host_memory: HostMemory = None,
    host_per_job: HostPerJob = None,
    disk: Disk = None,
    disk_dir: DiskDir = None,
    policy: Annotated[str, typer.Option(help="Who goes next; see docs/policies.md.")] = "fair_share",
    admission: Admission = "off",
    max_slowdown: MaxSlowdown = 1.10,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the orchestrator.")
    ] = DEFAULT_ORCHESTRATOR,
    agent_listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the agent.")
    ] = DEFAULT_AGENT,
    state: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Store and journal. Default: ~/.local/state/coslice.")
    ] = None,
    ephemeral: Annotated[bool, typer.Option(help="Keep nothing after the end (a temporary folder).")] = False,
    backend: Backend = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    token_secret: TokenSecret = None,
    listen_agents: ListenAgents = None,
    insecure: Insecure = False,
    http: Http = None,
    otlp: Otlp = None,
    log_level: LogLevel = "warning",
    log_format: LogFormat = "text",
    set_: Set = None,
    json: Json = False,
) -> None:
    """Run orchestrator and agent of this machine in one process, until Ctrl-C."""
    from coslice.cli.up import UpOptions, run_up

    decisions.set_up(log_level, log_format)
    run_up(
        UpOptions(
            groups=groups_given(group, groups),
            groups_file=groups,
            memory=memory,
            cpus=cpus,
            device=device,
            host_memory=host_memory,
            host_per_job=host_per_job,
            disk=disk,
            disk_dir=disk_dir,
            policy=policy,
            admission=admission,
            max_slowdown=max_slowdown,
            listen=listen,
            agent_listen=agent_listen,
            state=state,
            ephemeral=ephemeral,
            backends=tuple(backend or ()),
            security=Security(make_tls(tls_cert, tls_key, tls_ca), token_secret, insecure),
            listen_agents=listen_agents,
            http=http,
            otlp=otlp,
            settings=tuple(set_ or ()),
            json=json,
        )
    )


@app.command()
def orchestrator(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT")] = DEFAULT_ORCHESTRATOR,
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="Store and journal.")] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where the state of the groups is: [b]sqlite:PATH[/b] (default, in --state), or shared by "
            "several orchestrators of which one leads: [b]etcd://HOST:PORT,…/PREFIX[/b] or "
            "[b]kubernetes://NAMESPACE/PREFIX[/b] (docs/high-availability.md).",
        ),
    ] = None,
    advertise: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="With a shared store: where others reach this one while it leads. Default: --listen.",
        ),
    ] = "",
    leader_ttl: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="With a shared store: so long a silent leader stays one."),
    ] = 5.0,
    policy: Annotated[str, typer.Option(help="Who goes next; see docs/policies.md.")] = "fair_share",
    admission: Admission = "off",
    max_slowdown: MaxSlowdown = 1.10,
    groups: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What the groups file of the agents says of policy, admission and max_slowdown.",
        ),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    token_secret: TokenSecret = None,
    listen_agents: ListenAgents = None,
    insecure: Insecure = False,
    http: Http = None,
    otlp: Otlp = None,
    log_level: LogLevel = "warning",
    log_format: LogFormat = "text",
    set_: Set = None,
    json: Json = False,
) -> None:
    """Run the orchestrator alone; agents of several nodes dial in. Several of them may share a store."""
    from coslice.runtime.poller import one_thread

    one_thread()
    from coslice.cli.up import run_orchestrator

    decisions.set_up(log_level, log_format)
    run_orchestrator(
        listen=listen,
        state=state,
        store=store,
        advertise=advertise,
        leader_ttl=leader_ttl,
        policy=policy,
        admission=admission,
        max_slowdown=max_slowdown,
        security=Security(make_tls(tls_cert, tls_key, tls_ca), token_secret, insecure),
        listen_agents=listen_agents,
        http=http,
        otlp=otlp,
        settings=tuple(set_ or ()),
        groups_file=groups,
        json=json,
    )


@app.command()
def agent(
    node: Annotated[str | None, typer.Option(help="Name of this node. Default: the host name.")] = None,
    group: Annotated[
        list[str] | None, typer.Option("--group", "-g", metavar="NAME[:cpus=1,2][:memory=SIZE]")
    ] = None,
    groups: GroupsFile = None,
    topology: Annotated[
        str | None,
        typer.Option(
            metavar="kubernetes|slurm",
            help="Where node and groups are read from. [b]kubernetes[/b]: labels of this node and of its "
            "pods; --group then only says what a group has. [b]slurm[/b]: the step that this is, with the "
            "orchestrator on the job's first node.",
        ),
    ] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    cpus: Annotated[str | None, typer.Option(metavar="LIST")] = None,
    device: Annotated[str, typer.Option(help="host, cuda or auto.")] = "auto",
    host_memory: HostMemory = None,
    host_per_job: HostPerJob = None,
    disk: Disk = None,
    disk_dir: DiskDir = None,
    direct: Annotated[
        bool,
        typer.Option(
            "--direct",
            help="Serve no group, dial no orchestrator: state moves on request (docs/plain-services.md).",
        ),
    ] = False,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT")] = DEFAULT_AGENT,
    orchestrator: Orchestrator = DEFAULT_ORCHESTRATOR,
    state: Annotated[Path | None, typer.Option(metavar="DIR")] = None,
    backend: Backend = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    token_secret: TokenSecret = None,
    insecure: Insecure = False,
    http: Http = None,
    otlp: Otlp = None,
    log_level: LogLevel = "warning",
    log_format: LogFormat = "text",
    set_: Set = None,
    json: Json = False,
) -> None:
    """Run the Snapshot Agent of this node alone; it dials the orchestrator."""
    from coslice.cli.up import UpOptions, run_agent

    decisions.set_up(log_level, log_format)
    if topology == "slurm":
        from coslice.agent.topology.slurm import step_of

        step, topology = step_of(os.environ), None
        node = node or step.node
        group = group or ([step.group] if groups is None else None)
        orchestrator = step.orchestrator if orchestrator == DEFAULT_ORCHESTRATOR else orchestrator
    options = UpOptions(
        groups=groups_given(group, groups, node=node),
        groups_file=groups,
        topology=topology,
        memory=memory,
        cpus=cpus,
        device=device,
        host_memory=host_memory,
        host_per_job=host_per_job,
        disk=disk,
        disk_dir=disk_dir,
        direct=direct,
        agent_listen=listen,
        listen=orchestrator,
        state=state,
        node=node,
        backends=tuple(backend or ()),
        security=Security(make_tls(tls_cert, tls_key, tls_ca), token_secret, insecure),
        http=http,
        otlp=otlp,
        settings=tuple(set_ or ()),
        json=json,
    )
    run_agent(options)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    job: Annotated[str, typer.Option("--job", "-j", help="Name of the job: one name, one running training.")],
    group: Annotated[
        str | None,
        typer.Option("--group", "-g", help="Group (or several, comma-separated) whose accelerators it uses."),
    ] = None,
    need: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Device memory the job needs; without it the first turn evicts all others."
        ),
    ] = None,
    world: Annotated[
        int,
        typer.Option(
            help="Processes that share a lease; it ends when all have yielded. 0: whoever took part."
        ),
    ] = 0,
    backend: Annotated[
        str,
        typer.Option(
            metavar="NAME[:key=value]",
            help="What moves its state; [b]cuda[/b] needs no code for it. Default: what the job registers.",
        ),
    ] = "",
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="The command is (or starts) a vLLM or SGLang server that answers here: its memory moves "
            "over HTTP. Repeat for several.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="What the job will do: a profile, or any file that [b]coslice profile[/b] reads. Admission "
            "judges it at the door then, and not after a few of its steps.",
        ),
    ] = None,
    orchestrator: Orchestrator = DEFAULT_ORCHESTRATOR,
    agent: Annotated[
        str,
        typer.Option("--agent", envvar="COSLICE_AGENT", metavar="HOST:PORT", help="The agent of this node."),
    ] = DEFAULT_AGENT,
) -> None:
    """Run a training command as a job: [b]coslice run --job a -- python train.py[/b]"""
    from coslice.cli.run import RunOptions, backend_of, run_job

    options = RunOptions(
        job=job,
        group=group,
        need=need,
        world=world,
        orchestrator=orchestrator,
        agent=agent,
        command=tuple(context.args),
        backend=backend_of(backend, endpoint or ()),
        profile=profile,
    )
    raise typer.Exit(run_job(options))


@app.command()
def status(
    group: Annotated[str, typer.Argument(help="One group; all if left out.")] = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Keep it on screen, updated as it changes.")
    ] = False,
    orchestrator: Orchestrator = DEFAULT_ORCHESTRATOR,
    json: Json = False,
) -> None:
    """Who runs, who waits, and what is where."""
    from coslice.cli.show import show_status

    show_status(group, address=orchestrator, watch=watch, as_json=json)


@app.command()
def top(
    group: Annotated[str, typer.Argument(help="One group; all if left out.")] = "",
    once: Annotated[bool, typer.Option("--once", help="One picture, then end.")] = False,
    orchestrator: Orchestrator = DEFAULT_ORCHESTRATOR,
    json: Annotated[
        bool, typer.Option("--json", help="A line of JSON for each change; with --once: one.")
    ] = False,
) -> None:
    """All groups on one screen, live: locks, queues, who held what in the last minute, each job's story.

    Keys: arrows or j and k choose, Tab goes to the jobs, / filters, s sorts, Space stands still, q ends.
    Needs [b]pip install 'coslice\\[top]'[/b]; --once and --json do without.
    """
    from coslice.cli.top import top as show

    show(group, address=orchestrator, once=once, as_json=json)


@app.command()
def explain(
    group: Annotated[str, typer.Argument(help="The group to explain.")],
    job: Annotated[str, typer.Option("--job", "-j", help="Only what concerns this job.")] = "",
    last: Annotated[int, typer.Option(min=1, help="How many decisions to show.")] = 20,
    orchestrator: Orchestrator = DEFAULT_ORCHESTRATOR,
    json: Json = False,
) -> None:
    """Why does a job wait? The group's recent decisions, in prose."""
    from coslice.cli.show import show_explain

    show_explain(group, job=job, last=last, address=orchestrator, as_json=json)


@app.command()
def demo(
    jobs: Annotated[int, typer.Option(min=2, max=4, help="How many jobs share the accelerator.")] = 2,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Device memory. Default: room for one job only, measured first."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Alternations of solo and shared blocks.")] = 2,
    steps: Annotated[int | None, typer.Option(min=4, help="Training steps per block.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One short round: shows the machinery, proves less.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of data, models and sampling.")] = 0,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where journal and replay page go.")] = Path(
        "coslice-demo"
    ),
) -> None:
    """The main job: two real GRPO trainings, alone and then together on one accelerator."""
    from coslice.demo.runner import DemoOptions, main

    options = DemoOptions(
        jobs=jobs,
        memory=memory,
        rounds=rounds,
        steps=steps,
        quick=quick,
        seed=seed,
        json=str(json) if json else None,
        out=str(out),
    )
    raise typer.Exit(main(options))


@app.command()
def replay(
    journal: Annotated[Path, typer.Argument(help="A journal written by [b]coslice up[/b] or the demo.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The page to write. Default: replay.html."),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev or chrome://tracing."),
    ] = None,
) -> None:
    """Draw a journal as one self-contained HTML page, or as a Perfetto trace."""
    from coslice.cli.show import write_replay

    write_replay(journal, out, perfetto)


@app.command(name="check-phases", context_settings={"allow_interspersed_args": False})
def check_phases(
    command: Annotated[list[str], typer.Argument(help="The job's command, after `--`.", metavar="COMMAND…")],
    group: Annotated[
        str, typer.Option("--group", help="Groups in the order they must be taken, the trainer's first.")
    ] = "trainer,sampler",
    swap_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds that a swap takes: shorter phases are reported.")
    ] = 1.0,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write phases and findings as JSON.")
    ] = None,
) -> None:
    """Run a job alone, without a cluster, and report what its phases would do to others.

    Reports, with phase and line: groups taken in the wrong order, accelerators never given up, yields of what
    is not held, work of registered state outside a phase, phases too short to be worth a swap. Status 1 if
    there is anything, or no phase at all; the command's own if it failed.
    """
    from coslice.cli.check_phases import check_phases as check
    from coslice.client.config import group_names

    names = group_names(group)
    if not names:
        raise ConfigError("--group names no group")
    raise typer.Exit(check(command, groups=names, swap_s=swap_s, out=json))


def main() -> None:
    """Entry point: an error of ours is one line on standard error, never a traceback."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core prints what we say better
    redact.set_up()
    try:
        app()
    except ConfigError as error:
        _fail(error, 2)
    except CosliceError as error:
        _fail(error, 1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def _fail(error: CosliceError, code: int) -> None:
    print(f"coslice: {redact.redact(str(error))}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
