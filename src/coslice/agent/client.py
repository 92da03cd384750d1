"""A client of the agent alone, for services that schedule themselves: no orchestrator, no lock.

    with AgentClient("127.0.0.1:9001") as agent:
        agent.snapshot_and_wait("tenant-7")     # its state is in host memory, measured
        agent.restore_and_wait("tenant-7")      # and back on the device

The job's processes have registered with this agent, without a group. Moves of one job never overlap: a second
caller waits, and is told that nothing was left to do. ``AsyncAgentClient`` has the same methods, awaited.
Needs grpc and protobuf only.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from coslice.errors import (
    ConfigError,
    CosliceError,
    Denied,
    NoRoom,
    OperationFailed,
    Refused,
    StateBusy,
)
from coslice.security.credentials import Credentials, credentials_from
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

DEFAULT_AGENT = "127.0.0.1:9001"
STATUS = 10.0
ENDLESS = 24 * 3600.0
"""The agent has time limits of its own for every move; this one only ends calls to an agent that hangs."""


class AgentUnreachable(CosliceError, ConnectionError):
    """Nobody answers at the agent's address."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """``reason``: why nothing moved, if nothing did."""

    bytes: int
    seconds: float
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """``state``: live, saved, lost. ``bytes``: registered."""

    job: str
    state: str
    bytes: int
    pids: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class AgentStatus:
    node: str
    accelerator: str
    jobs: Mapping[str, JobState] = field(default_factory=dict)
    """Those without a group."""


def _snapshot(
    job: str, mode: str, tags: Iterable[str], timeout: float, pids: Iterable[int], backend: str
) -> pb.SnapshotRequest:
    return pb.SnapshotRequest(
        job=job, mode=mode, tags=list(tags), timeout_s=timeout, pids=list(pids), backend=backend
    )


def _moved(answer: pb.MoveResponse) -> Moved:
    return Moved(bytes=answer.bytes, seconds=answer.seconds, reason=answer.reason)


def _status(answer: pb.GetNodeStatusResponse) -> AgentStatus:
    jobs = {
        context.job: JobState(
            job=context.job,
            state=pb.ContextState.Name(context.state).lower(),
            bytes=context.bytes,
            pids=tuple(context.pids),
            reason=context.reason,
        )
        for context in answer.direct
    }
    return AgentStatus(node=answer.node, accelerator=answer.accelerator, jobs=jobs)


_ERRORS: dict[grpc.StatusCode, type[CosliceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ConfigError,
    grpc.StatusCode.NOT_FOUND: Refused,
    grpc.StatusCode.FAILED_PRECONDITION: Refused,
    grpc.StatusCode.PERMISSION_DENIED: Denied,
    grpc.StatusCode.UNAUTHENTICATED: Denied,
    grpc.StatusCode.ABORTED: StateBusy,
    grpc.StatusCode.RESOURCE_EXHAUSTED: NoRoom,
    grpc.StatusCode.UNAVAILABLE: AgentUnreachable,
}


@contextmanager
def _explained(address: str) -> Iterator[None]:
    """A gRPC error as one of ours."""
    try:
        yield
    except grpc.RpcError as error:
        kind = _ERRORS.get(error.code(), OperationFailed)
        text = error.details() or error.code().name
        if kind is AgentUnreachable:
            text = f"no agent answers at {address}: start one with `coslice up` or `coslice agent` ({text})"
        raise kind(text) from None


class AgentClient:
    """Connection settings (TLS, token) come from ``COSLICE_*`` unless given as ``credentials``.

    Its calls raise ``StateBusy`` (in use; nothing moved), ``NoRoom``, ``Refused``, ``Denied``,
    ``OperationFailed`` or ``AgentUnreachable``. After a failed snapshot the state is on the device, as it
    was. ``timeout`` of a move: seconds that the agent gives it; 0: its own limit.
    """

    def __init__(self, address: str = DEFAULT_AGENT, *, credentials: Credentials | None = None) -> None:
        self.address = address
        self._credentials = credentials or credentials_from(os.environ)
        self._channel = self._credentials.channel(address)
        self._stub = rpc.AgentStub(self._channel)

    def snapshot_and_wait(
        self,
        job: str,
        *,
        mode: str = "offload",
        tags: Iterable[str] = (),
        timeout: float = 0.0,
        pids: Iterable[int] = (),
        backend: str = "",
    ) -> Moved:
        """Device → host. ``tags``: only these regions. ``pids``: only these processes of the job (admin)."""
        request = _snapshot(job, mode, tags, timeout, pids, backend)
        with _explained(self.address):
            return _moved(self._stub.Snapshot(request, timeout=ENDLESS, metadata=self._shown()))

    def restore_and_wait(self, job: str, *, timeout: float = 0.0) -> Moved:
        """Host → device."""
        request = pb.RestoreRequest(job=job, timeout_s=timeout)
        with _explained(self.address):
            return _moved(self._stub.Restore(request, timeout=ENDLESS, metadata=self._shown()))

    def status(self) -> AgentStatus:
        request = pb.GetNodeStatusRequest()
        with _explained(self.address):
            return _status(self._stub.GetNodeStatus(request, timeout=STATUS, metadata=self._shown()))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _shown(self) -> tuple[tuple[str, str], ...]:
        return self._credentials.metadata(self.address)


class AsyncAgentClient:
    """As ``AgentClient``, awaited. A cancelled move goes on at the agent, to its end."""

    def __init__(self, address: str = DEFAULT_AGENT, *, credentials: Credentials | None = None) -> None:
        """Must be made inside a running loop."""
        self.address = address
        self._credentials = credentials or credentials_from(os.environ)
        self._channel = self._credentials.aio_channel(address)
        self._stub = rpc.AgentStub(self._channel)

    async def snapshot_and_wait(
        self,
        job: str,
        *,
        mode: str = "offload",
        tags: Iterable[str] = (),
        timeout: float = 0.0,
        pids: Iterable[int] = (),
        backend: str = "",
    ) -> Moved:
        request = _snapshot(job, mode, tags, timeout, pids, backend)
        with _explained(self.address):
            return _moved(await self._stub.Snapshot(request, timeout=ENDLESS, metadata=self._shown()))

    async def restore_and_wait(self, job: str, *, timeout: float = 0.0) -> Moved:
        request = pb.RestoreRequest(job=job, timeout_s=timeout)
        with _explained(self.address):
            return _moved(await self._stub.Restore(request, timeout=ENDLESS, metadata=self._shown()))

    async def status(self) -> AgentStatus:
        request = pb.GetNodeStatusRequest()
        with _explained(self.address):
            return _status(await self._stub.GetNodeStatus(request, timeout=STATUS, metadata=self._shown()))

    async def close(self) -> None:
        await self._channel.close(grace=None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _shown(self) -> tuple[tuple[str, str], ...]:
        return self._credentials.metadata(self.address)
