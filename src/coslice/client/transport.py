"""What both transports share: how to dial, who says hello, and the one unary call.

Imports gRPC, so the public modules import it only once there is an address to dial.
"""

import os
import random
import socket
import uuid
from collections.abc import Iterable
from typing import Any, Protocol

import grpc

from coslice.client.config import ClientConfig
from coslice.client.types import GroupStatus, Status, Waiter
from coslice.errors import ConfigError, CosliceError, Denied, OrchestratorUnreachable, UnknownGroup
from coslice.security import redact
from coslice.wire.protocol import PROTOCOL
from coslice.wire.v1 import coslice_pb2 as pb

_log = redact.logger("coslice")

OPTIONS: tuple[tuple[str, int], ...] = (
    # Liveness is the stream's own: these pings are answered by gRPC's threads even while Python is busy.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # what gRPC obeys: its default is 60 s
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),  # a ping beside every message, to size windows we never fill
    ("grpc.min_reconnect_backoff_ms", 5_000),  # gRPC's name for the time limit of one connection attempt
    # A new attempt must not inherit the back-off of the one before it.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

Trailers = Iterable[Any] | None
"""What a call ended with, beside its status."""

FAREWELL_S = 2.0
"""How long the end of a process waits for the orchestrator to take the goodbye."""


class Backoff:
    """Growing waits between attempts to connect: the network does not tell when a server comes back."""

    _FIRST_S, _LAST_S = (
        0.05,
        1.0,
    )  # the last below ``OrchestratorConfig.resettle``: back in time for its place

    def __init__(self) -> None:
        self._next = self._FIRST_S
        self._random = random.Random()  # of our own: a training job's sequence must not depend on outages

    def reset(self) -> None:
        self._next = self._FIRST_S

    def next(self) -> float:
        wait, self._next = self._next, min(self._next * 2, self._LAST_S)
        return wait * self._random.uniform(0.5, 1.0)


def hello_of(config: ClientConfig) -> pb.Hello:
    return pb.Hello(
        job=config.job,
        incarnation=config.incarnation,
        session=str(uuid.uuid4()),
        node=config.node or socket.gethostname(),
        pid=os.getpid(),
        start_time=_start_time(),
        rank=config.rank,
        profile=config.profile,
        protocol=PROTOCOL,
    )


def _start_time() -> int:
    """Clock ticks since boot, field 22 of /proc/self/stat; the name in field 2 may contain blanks."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def note_of(name: str, value: float, step: int, text: str) -> pb.Note | None:
    """A note for the journal; None, with a warning, for what does not fit into one."""
    try:
        return pb.Note(name=name, value=value, step=step, text=text)
    except (TypeError, ValueError) as error:
        _log.warning("coslice: note %r dropped: %s", name, error)
        return None


class _Ended(Protocol):
    def code(self) -> grpc.StatusCode | None: ...
    def details(self) -> str | None: ...


def elsewhere(ended: _Ended) -> bool:
    """Does this failure leave open that another orchestrator answers?"""
    return ended.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def trouble_of(ended: _Ended) -> str:
    """Why a stream ended, in the words of gRPC."""
    code = ended.code()
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "what answers there is no orchestrator: are its address and the agent's swapped?"
    return ended.details() or (code.name.lower() if code is not None else "the stream ended")


def status_error(error: _Ended, *, address: str, group: str) -> CosliceError:
    """A failed GetStatus as an error of ours."""
    code, details = error.code(), trouble_of(error)
    if code is grpc.StatusCode.NOT_FOUND:
        return UnknownGroup(details, data={"group": group})
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return OrchestratorUnreachable(
            f"no orchestrator answers at {address} ({details}). Start one with `coslice up`",
            data={"address": address},
        )
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return Denied(f"the orchestrator at {address}: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ConfigError(
            f"{address} is no orchestrator; an agent, perhaps: COSLICE_ORCHESTRATOR and COSLICE_AGENT may be "
            "swapped"
        )
    return CosliceError(details)


def status_of(response: pb.GetStatusResponse) -> Status:
    return Status(
        orchestrator=response.orchestrator,
        groups=tuple(
            GroupStatus(
                group=group.group,
                state=group.state,
                job=group.job,
                epoch=group.epoch,
                waiters=tuple(Waiter(w.job, w.waited_s, w.reason) for w in group.waiters),
                nodes=tuple(node.node for node in group.nodes),
            )
            for group in response.groups
        ),
    )
