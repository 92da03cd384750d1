"""``coslice snapshot`` and ``coslice restore``: move one job's state by hand, through the agent alone.

For services that schedule themselves, and for looking whether a job can be moved at all. Jobs that take turns
in a group are moved by their lock, and refused here.
"""

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from coslice.errors import ConfigError
from coslice.sizes import format_size

if TYPE_CHECKING:
    from coslice.agent.client import Moved

Job = Annotated[str, typer.Option("--job", "-j", metavar="NAME", help="The job, as it registered.")]
Pid = Annotated[
    list[int] | None,
    typer.Option(
        "--pid",
        metavar="PID",
        help="Only this registered process; repeat for more. Needs an agent with --token-secret and a token "
        "of the role admin.",
    ),
]
Timeout = Annotated[
    float, typer.Option(min=0.0, metavar="SECONDS", help="Give the move so long. 0: the agent's own limit.")
]
Agent = Annotated[
    str, typer.Option("--agent", envvar="COSLICE_AGENT", metavar="HOST:PORT", help="The agent of this node.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
DEFAULT_AGENT = "127.0.0.1:9001"


def snapshot(
    job: Job = "",
    pid: Pid = None,
    mode: Annotated[
        str, typer.Option(help="[b]offload[/b] keeps the state in host memory; [b]discard[/b] drops it.")
    ] = "offload",
    tag: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="REGION", help="Only this region of its state; repeat for more."),
    ] = None,
    backend: Annotated[str, typer.Option(metavar="NAME", help="What moves it; default: the job's own.")] = "",
    timeout: Timeout = 0.0,
    agent: Agent = DEFAULT_AGENT,
    json: Json = False,
) -> None:
    """Move a job's state from the device to host memory: [b]coslice snapshot --job judge[/b]

    Returns when the device memory was measured to be free. A job that is in host memory already stays there.
    After a failure its state is on the device, as it was.
    """
    from coslice.agent.client import AgentClient

    name, pids = _named(job, pid, agent)
    with AgentClient(agent) as client:
        done = _waited(
            f"moving {name} out",
            lambda: client.snapshot_and_wait(
                name, mode=mode, tags=tag or (), timeout=timeout, pids=pids, backend=backend
            ),
        )
    _tell(name, "saved", done, as_json=json)


def restore(
    job: Job = "",
    pid: Pid = None,
    timeout: Timeout = 0.0,
    agent: Agent = DEFAULT_AGENT,
    json: Json = False,
) -> None:
    """Bring a job's state back onto the device: [b]coslice restore --job judge[/b]"""
    from coslice.agent.client import AgentClient

    name, _ = _named(job, pid, agent)
    with AgentClient(agent) as client:
        done = _waited(f"bringing {name} back", lambda: client.restore_and_wait(name, timeout=timeout))
    _tell(name, "live", done, as_json=json)


def add(app: typer.Typer) -> None:
    app.command()(snapshot)
    app.command()(restore)


def _named(job: str, pid: list[int] | None, agent: str) -> tuple[str, tuple[int, ...]]:
    """The job, also where only its processes are named."""
    import grpc

    from coslice.agent.client import AgentUnreachable
    from coslice.cli.rpc import agent_status

    pids = tuple(pid or ())
    if not job and not pids:
        raise ConfigError("which job? Say --job NAME (or --pid); `coslice doctor` lists what has registered")
    try:
        node = agent_status(agent)
    except grpc.RpcError:
        raise AgentUnreachable(
            f"no agent answers at {agent}: start one with `coslice up` or `coslice agent`, or name another "
            "with --agent"
        ) from None
    if job:
        return job, pids
    jobs = {member.pid: member.job for member in node.members}
    if missing := [str(each) for each in pids if each not in jobs]:
        known = ", ".join(f"{each} ({name})" for each, name in sorted(jobs.items())) or "none"
        raise ConfigError(
            f"no process {', '.join(missing)} has registered with the agent at {agent}; registered: {known}"
        )
    if len(found := {jobs[each] for each in pids}) > 1:
        raise ConfigError(f"these processes are of several jobs ({', '.join(sorted(found))}): one at a time")
    return found.pop(), pids


def _waited(what: str, move: "Callable[[], Moved]") -> "Moved":
    print(f"{what} …", file=sys.stderr)
    try:
        return move()
    except KeyboardInterrupt:
        print("coslice: not waiting any longer; the agent ends what it has begun", file=sys.stderr)
        raise SystemExit(130) from None


def _tell(job: str, state: str, done: "Moved", *, as_json: bool) -> None:
    if as_json:
        facts = {"job": job, "state": state, "bytes": done.bytes, "seconds": done.seconds}
        print(json.dumps(facts | {"reason": done.reason}))
    elif done.reason:
        print(f"{job}: nothing moved: {done.reason}")
    else:
        where = "is in host memory" if state == "saved" else "is on the device"
        print(f"{job} {where}: {format_size(done.bytes)} in {done.seconds:.2f} s")
