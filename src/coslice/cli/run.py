"""``coslice run``: start a training command as a job, with its identity in the environment.

Everything a job needs to take part is a handful of variables; the command itself runs unmodified, as a child
in the same terminal and process group, and its exit status is ours.
"""

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import msgspec

from coslice.cli.rpc import agent_status, group_status
from coslice.core.ids import check_name
from coslice.errors import ConfigError, JobRunning, UnknownGroup
from coslice.sizes import format_size, parse_size
from coslice.tied import tie
from coslice.wire.v1 import coslice_pb2 as pb

_GIVEN = "COSLICE_RUN_GAVE"
"""What a ``coslice run`` set that people set too, and what was there before: one within takes it back."""


@dataclass(frozen=True)
class RunOptions:
    environment: Mapping[str, str]
    """Outside; the command's has the job's names beside."""
    job: str
    group: str | None
    need: str | None
    world: int
    orchestrator: str
    agent: str
    command: tuple[str, ...]
    backend: str = ""
    profile: Path | None = None


def backend_of(backend: str, endpoints: Sequence[str]) -> str:
    """``--backend`` as it is, or what ``--endpoint`` means."""
    if backend and endpoints:
        raise ConfigError("--endpoint chooses the backend app_endpoint: leave --backend out")
    return f"app_endpoint:url={' '.join(endpoints)}" if endpoints else backend


def run_job(options: RunOptions) -> int:
    """Run the command to its end; returns its exit status (128 + n if signal n ended it)."""
    command = _command(options.command)
    job = _name("job", options.job)
    need = parse_size(options.need) if options.need else 0
    state = group_status(options.orchestrator)
    groups = _groups(options.group, state)
    if not _given_start(options.environment):
        _refuse_if_running(job, groups, state)
    try:
        node: pb.GetNodeStatusResponse | None = agent_status(options.agent)
    except grpc.RpcError:
        node = None
        print(
            f"coslice: no agent answers at {options.agent}: {job} will take turns, but its state cannot be "
            "moved from this node; start one with `coslice up` or `coslice agent`",
            file=sys.stderr,
        )
    _refuse_if_too_big(need, groups, node)
    cpus = _accelerator_cpus(node, groups)
    environment = job_environment(
        options.environment,
        job=job,
        groups=groups,
        need=need,
        world=options.world,
        orchestrator=options.orchestrator,
        agent=options.agent if node is not None else "",
        node=node.node if node is not None else "",
        profile=_profile(options.profile) if options.profile is not None else "",
        moved=_moved(options.backend, node, groups),
        cpus=cpus,
    )
    with _launched(options.backend, environment):
        code = _supervise(command, environment, _host_cpus(cpus))
    if code == 128 + signal.SIGKILL:
        _say_who_killed(job, options.agent)
    return code


def _profile(path: Path) -> str:
    """Of anything that ``coslice profile`` reads, as the job's processes send it along."""
    from coslice.profile.model import brief_profile, encode_profile
    from coslice.profile.read import read_profiles

    found = read_profiles(path)
    if len(found) > 1:
        names = ", ".join(profile.name for profile in found)
        raise ConfigError(f"{path} has the profiles of {names}: which one? coslice profile --out splits them")
    return encode_profile(brief_profile(found[0])).decode()


def _moved(backend: str, node: pb.GetNodeStatusResponse | None, groups: tuple[str, ...]) -> dict[str, str]:
    """Raises ``ConfigError`` where nobody could move it."""
    if not backend:
        return {}
    if node is None:
        raise ConfigError(f"--backend {backend} needs the agent of this node: start `coslice up` first")
    kinds = {device.accelerator for device in node.devices if device.group in groups}
    return {"COSLICE_BACKEND": backend, "COSLICE_DEVICE": kinds.pop() if len(kinds) == 1 else "host"}


@contextmanager
def _launched(backend: str, environment: Mapping[str, str]) -> Iterator[None]:
    """While the command runs, this process stands for it with the agent: its children are the job's.

    Only for backends that move processes as they are. Raises ``CosliceError`` if the agent refuses.
    """
    if not backend:
        yield
        return
    from coslice import workload

    handle = workload.register(on_snapshot=_nothing, on_restore=_nothing, for_children=True, env=environment)
    if handle.error is not None:
        raise handle.error
    yield  # with the end of this process the agent lets the job go


def _nothing() -> None:
    pass


def job_environment(
    base: Mapping[str, str],
    *,
    job: str,
    groups: tuple[str, ...],
    need: int,
    world: int,
    orchestrator: str,
    agent: str,
    node: str = "",
    profile: str = "",
    moved: Mapping[str, str] | None = None,
    cpus: tuple[int, ...],
) -> dict[str, str]:
    """The environment of a job's processes: ``base`` plus the variables that make it a job.

    ``base`` may be another job's: what its own ``coslice run`` gave it (``_GIVEN``) is not this one's. What
    people set themselves stays, unless an option says otherwise.
    """
    environment = _without_given(base) | {
        "COSLICE_ORCHESTRATOR": orchestrator,
        "COSLICE_JOB": job,
        "COSLICE_GROUP": ",".join(groups),
        "COSLICE_INCARNATION": _given_start(base) or uuid.uuid4().hex,
        "COSLICE_NEED": str(need),
        "COSLICE_WORLD": str(world),
    }
    for name, value in (("COSLICE_AGENT", agent), ("COSLICE_NODE", node)):
        environment.pop(name, None)
        if value:
            environment[name] = value
    given = dict(moved or {})
    if profile:
        given["COSLICE_PROFILE"] = profile
    if cpus:
        given["COSLICE_ACCELERATOR_CPUS"] = ",".join(map(str, cpus))
        # Huge pages make the way back in cheaper: 2 MiB instead of 4 KiB per page fault.
        given["THP_MEM_ALLOC_ENABLE"] = environment.get("THP_MEM_ALLOC_ENABLE", "1")
    if given:
        environment[_GIVEN] = msgspec.json.encode(
            {name: (given[name], environment.get(name)) for name in given}
        ).decode()
    return environment | given


def _without_given(base: Mapping[str, str]) -> dict[str, str]:
    """As it was before another ``coslice run`` gave it something. What was set anew since then stays."""
    environment = dict(base)
    try:
        given = msgspec.json.decode(environment.pop(_GIVEN, "{}"), type=dict[str, tuple[str, str | None]])
    except msgspec.MsgspecError:
        raise ConfigError(f"{_GIVEN} is not as `coslice run` wrote it: unset it") from None
    for name, (value, before) in given.items():
        if environment.get(name) == value:
            environment.pop(name)
            if before is not None:
                environment[name] = before
    return environment


def _given_start(base: Mapping[str, str]) -> str:
    """The token of a start on several nodes that this is a part of: one without a job's name beside it, which
    the processes of a job would have. Else empty."""
    return "" if "COSLICE_JOB" in base else base.get("COSLICE_INCARNATION", "")


def _command(command: tuple[str, ...]) -> list[str]:
    arguments = list(command[1:] if command[:1] == ("--",) else command)
    if not arguments:
        raise ConfigError(
            "nothing to run: write the command after `--`, as in `coslice run --job a -- python train.py`"
        )
    if shutil.which(arguments[0]) is None:
        raise ConfigError(f"command not found: {arguments[0]}")
    return arguments


def _name(kind: str, text: str) -> str:
    try:
        return check_name(kind, text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _groups(asked: str | None, state: pb.GetStatusResponse) -> tuple[str, ...]:
    known = sorted(group.group for group in state.groups)
    if asked is None:
        if len(known) == 1:
            return (known[0],)
        raise ConfigError(
            f"which group? Say --group with one of: {', '.join(known) or '(there is none yet)'}"
        )
    groups = tuple(dict.fromkeys(_name("group", part.strip()) for part in asked.split(",")))
    for group in groups:
        if group not in known:
            raise UnknownGroup(
                f"there is no group {group!r}; known groups: {', '.join(known) or '(none)'}",
                data={"known_groups": ",".join(known)},
            )
    return groups


def _refuse_if_running(job: str, groups: tuple[str, ...], state: pb.GetStatusResponse) -> None:
    for group in state.groups:
        for record in group.jobs:
            if record.job == job and record.sessions > 0:
                raise JobRunning(
                    f"job {job!r} is already running in group {group.group}: stop it, or choose another "
                    "--job name",
                    data={"job": job, "group": group.group},
                )


def _accelerator_cpus(node: pb.GetNodeStatusResponse | None, groups: tuple[str, ...]) -> tuple[int, ...]:
    if node is None:
        return ()
    return tuple(sorted({cpu for device in node.devices if device.group in groups for cpu in device.cpus}))


def _say_who_killed(job: str, agent: str) -> None:
    """SIGKILL leaves no word of its own; if the agent did it, the agent has the reason."""
    try:
        node = agent_status(agent)
    except grpc.RpcError:
        return
    contexts = [context for group in node.groups for context in group.contexts if context.job == job]
    reasons = [context.reason for context in contexts if context.state == pb.LOST and context.reason]
    if reasons:
        print(f"coslice: {job} was killed: {reasons[0]}", file=sys.stderr)


def _refuse_if_too_big(need: int, groups: tuple[str, ...], node: pb.GetNodeStatusResponse | None) -> None:
    for device in node.devices if node is not None else ():
        if device.group in groups and 0 < device.budget_bytes < need:
            raise ConfigError(
                f"--need {format_size(need)} is more than group {device.group} has on this node: "
                f"{format_size(device.budget_bytes)}"
            )


def _host_cpus(accelerator: tuple[int, ...]) -> set[int]:
    """Where a job's work outside accelerator sections runs: every core that is not the accelerator's."""
    allowed = os.sched_getaffinity(0)
    return (allowed - set(accelerator)) or allowed


def _supervise(command: list[str], environment: dict[str, str], cpus: set[int]) -> int:
    parent = os.getpid()

    def prepare() -> None:  # in the child, before exec: it must not outlive a `coslice run` that is killed
        tie(parent, signal.SIGTERM)
        os.sched_setaffinity(0, cpus)

    return wait_for(subprocess.Popen(command, env=environment, preexec_fn=prepare))


def wait_for(child: "subprocess.Popen[bytes]") -> int:
    """Its exit status (128 + n if signal n ended it). SIGTERM and SIGHUP are handed on to it."""

    def forward(signum: int, _frame: object) -> None:
        child.send_signal(signum)

    # Ctrl-C reaches the child through the terminal's process group already; we only wait for it to finish.
    previous = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    for signum in (signal.SIGTERM, signal.SIGHUP):
        previous[signum] = signal.signal(signum, forward)
    try:
        code = child.wait()
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    return code if code >= 0 else 128 - code
