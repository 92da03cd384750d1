"""The few unary calls that the command line makes, each bounded and each with an error that helps."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coslice.errors import ConfigError, Denied, OrchestratorUnreachable, UnknownGroup
from coslice.security.credentials import credentials_from
from coslice.wire.leader import STANDS_BY, Dial, addresses_of
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc

TIMEOUT = 5.0
SERVICE = "coslice.v1.Orchestrator"
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class _Shows(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    """The token goes with every call."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(client_call_details._replace(metadata=self._metadata), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(client_call_details._replace(metadata=self._metadata), request)


@contextmanager
def connection(address: str, flag: str) -> Iterator[grpc.Channel]:
    """A channel with the credentials of the environment. ``flag``: the option that the address came with."""
    try:
        addresses_of(address)
    except ConfigError:
        raise ConfigError(
            f"{flag} {address[:80]!r} is no address: write host:port, for example 127.0.0.1:50051"
        ) from None
    credentials = credentials_from(os.environ)
    metadata = credentials.metadata(address)
    with credentials.channel(address) as channel:
        yield grpc.intercept_channel(channel, _Shows(metadata)) if metadata else channel


@contextmanager
def orchestrator(address: str) -> Iterator[pb_grpc.OrchestratorStub]:
    """A stub for one call or stream; an unreachable or refusing server becomes one of our errors."""
    with connection(_leader(address), "--orchestrator") as channel:
        try:
            yield pb_grpc.OrchestratorStub(channel)
        except grpc.RpcError as error:
            raise _explained(error, address) from None


def _leader(addresses: str) -> str:
    """The one of them that leads, or that a standby names; the first if none is found: the call will say
    why."""
    try:
        dial = Dial(addresses, encrypted=credentials_from(os.environ).encrypted)
    except ConfigError:
        return addresses  # refused below, with the name of the option
    first = dial.address
    while True:
        with connection(dial.address, "--orchestrator") as channel:
            try:
                ask = health_pb2.HealthCheckRequest(service=SERVICE)
                answer = health_pb2_grpc.HealthStub(channel).Check(ask, timeout=TIMEOUT)
                if answer.status is answer.SERVING:
                    return dial.address
                pb_grpc.OrchestratorStub(channel).Explain(pb.ExplainRequest(), timeout=TIMEOUT)
                return dial.address
            except grpc.RpcError as error:
                if error.code() not in _AWAY:
                    return dial.address
                if dial.failed(error.trailing_metadata()):
                    return first


def _explained(error: grpc.RpcError, address: str) -> Exception:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.NOT_FOUND:
        return UnknownGroup(details)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ConfigError(
            f"what answers at {address} is no orchestrator, or an older one; an agent, perhaps: are "
            "--orchestrator (-o) and --agent swapped?"
        )
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return Denied(f"the orchestrator at {address} says no: {details}")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return ConfigError(details)
    if code in _AWAY:
        if details.startswith(f"{STANDS_BY}; no leader"):
            return OrchestratorUnreachable(
                f"{address}: no orchestrator leads now. Does the store answer that they elect in? Their logs "
                "say so; once it does, one of them leads within seconds"
            )
        if details.startswith(STANDS_BY):  # and the leader it names was not among the addresses given
            return OrchestratorUnreachable(f"{address}: {details}. Ask there, or give all addresses")
        tls = f" ({details})" if "SSL" in details or "handshake" in details.lower() else ""
        return OrchestratorUnreachable(
            f"no orchestrator answers at {address}{tls}: start one with `coslice up`, or name another "
            "with --orchestrator"
        )
    return OrchestratorUnreachable(f"the orchestrator at {address} answered {code.name}: {details}")


def group_status(address: str, group: str = "") -> pb.GetStatusResponse:
    with orchestrator(address) as stub:
        return stub.GetStatus(pb.GetStatusRequest(group=group), timeout=TIMEOUT)


def agent_status(address: str) -> pb.GetNodeStatusResponse:
    """Raises ``grpc.RpcError`` if nobody answers: whether an agent is needed is the caller's decision.

    Raises ``CosliceError`` if somebody else answers, or says no.
    """
    with connection(address, "--agent") as channel:
        try:
            return pb_grpc.AgentStub(channel).GetNodeStatus(pb.GetNodeStatusRequest(), timeout=TIMEOUT)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ConfigError(
                    f"what answers at {address} is no agent; an orchestrator, perhaps: are --agent and "
                    "--orchestrator (-o) swapped?"
                ) from None
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                raise Denied(f"the agent at {address} says no: {error.details()}") from None
            raise
