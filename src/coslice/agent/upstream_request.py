"""What a request of the upstream protocol asks for, in our words: backend, mode, tags, and the processes that
it names. Decides who may name processes; moves nothing.
"""

import asyncio
import os
from collections.abc import Sequence

import grpc
from google.protobuf.unknown_fields import UnknownFieldSet
from msgspec import Struct

from coslice.agent.backends.resolve import CHANNEL
from coslice.agent.direct import WHOLE, DirectRefused
from coslice.agent.discovery import procfs
from coslice.agent.endpoints import allowed_endpoint
from coslice.agent.peer import Unidentified, user_of
from coslice.agent.processes import owner
from coslice.errors import ConfigError
from coslice.security import access
from coslice.wire.upstream import snapshot_agent_pb2 as up
from coslice.workload.listening import listener

MODES = {
    up.SUSPEND_MODE_UNSPECIFIED: "",
    up.SUSPEND_MODE_OFFLOAD: "offload",
    up.SUSPEND_MODE_DISCARD: "discard",
}
ENGINES = {up.APP_VLLM: "vllm", up.APP_SGLANG: "sglang"}
ENDPOINT, TPU = "app_endpoint", "tpu"


class Asked(Struct, frozen=True, kw_only=True):
    backend: str = ""
    """Its name; empty: the job's own."""
    spec: str = ""
    """The backend with its settings, for processes that the request names."""
    mode: str = ""
    tags: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    urls: tuple[str, ...] = ()
    fault: str = ""
    """Why it cannot be done, where upstream fails the operation and not the call."""


def asked(config: up.BackendConfig) -> Asked:
    """Raises ``DirectRefused`` for what fails the call itself."""
    kind = config.WhichOneof("backend")
    match kind:
        case "cuda":
            return Asked(backend=WHOLE, spec=WHOLE, pids=tuple(config.cuda.explicit_target.pids))
        case "tpu":
            return Asked(backend=TPU, spec=TPU, pids=tuple(config.tpu.explicit_target.pids))
        case "app_channel":
            return Asked(
                backend=CHANNEL, mode=_mode(config.app_channel.mode), tags=tuple(config.app_channel.tags)
            )
        case "app_endpoint":
            return _endpoints(config.app_endpoint)
        case "direct_memory" | "memory_regions":
            raise DirectRefused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the feature gate of {kind} is off: coslice has no such backend; leave backend_config out "
                "(the job's own), or use cuda, tpu, app_endpoint or app_channel",
            )
        case _:
            unknown = UnknownFieldSet(config)
            if len(unknown) > 0:  # never by another backend than the one that was asked for
                text = f"backend_config names a backend that is unknown here: field {unknown[0].field_number}"
                raise DirectRefused(grpc.StatusCode.NOT_FOUND, text)
            return Asked()


def _endpoints(config: up.AppEndpointConfig) -> Asked:
    engine, urls = ENGINES.get(config.app), tuple(config.endpoints)
    fault = ""
    if engine is None:
        fault = "app is not set: APP_VLLM or APP_SGLANG"
    elif not urls:
        fault = "no endpoints are given"
    return Asked(
        backend=ENDPOINT,
        spec=f"{ENDPOINT}:url={' '.join(urls)},engine={engine}" if not fault else "",
        mode=_mode(config.mode),
        tags=tuple(config.tags),
        urls=urls,
        fault=fault,
    )


def _mode(mode: up.SuspendMode.ValueType) -> str:
    if mode not in MODES:
        raise DirectRefused(grpc.StatusCode.INVALID_ARGUMENT, f"{mode} is no suspend mode: 0, 1 or 2")
    return MODES[mode]


async def engines(urls: Sequence[str]) -> tuple[int, ...]:
    """The processes that listen there; raises ``ConfigError``."""
    found = []
    for url in urls:
        endpoint = allowed_endpoint(url)
        pid = await asyncio.to_thread(listener, endpoint.port)
        if pid is None:
            raise ConfigError(f"no process of this user listens on port {endpoint.port} of this machine")
        found.append(pid)
    return tuple(dict.fromkeys(found))


def may_name(pids: Sequence[int], peer: str, port: int) -> None:
    """With tokens: an administrator may name processes. Without: whoever could stop them anyhow, which is
    their own user, by the kernel's word. Raises ``DirectRefused``."""
    who = access.caller()
    if who.proven_admin:
        return
    if who.claims is not None:
        raise _denied("naming processes needs the admin role: `coslice token create --role admin`")
    try:
        user = user_of(peer, port)
    except Unidentified as error:
        raise _denied(f"who names processes has to be known: {error}") from None
    ours = {os.getpid(), *procfs.line(os.getpid()), 1}
    for pid in pids:
        if pid in ours or pid <= 0:
            raise _denied(f"process {pid} is the agent's own, or the machine's: it is never moved")
        if (found := owner(pid)) is not None and not found == user == os.getuid():
            raise _denied(
                f"process {pid} is user {found}'s, the caller is user {user}, the agent {os.getuid()}: only "
                "processes of the caller's and the agent's own user can be named without an admin token"
            )


def _denied(text: str) -> DirectRefused:
    return DirectRefused(grpc.StatusCode.PERMISSION_DENIED, text)
