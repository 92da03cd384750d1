"""``coslice up``, ``coslice orchestrator``, ``coslice agent``: their options."""

import os
from pathlib import Path
from typing import Annotated

import typer

from coslice.cli.plan import groups_given
from coslice.observe import decisions
from coslice.security.listening import Security, make_tls

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


def add(app: typer.Typer) -> None:
    for command in (up, orchestrator, agent):
        app.command()(command)


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
    from coslice.cli.up import run_up
    from coslice.cli.up_config import UpOptions

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
    from coslice.cli.up import run_agent
    from coslice.cli.up_config import UpOptions

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
