"""The few unary calls that the command line makes, each bounded and each with an error that helps."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from coslice.errors import OrchestratorUnreachable, UnknownGroup
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc

TIMEOUT = 5.0


@contextmanager
def orchestrator(address: str) -> Iterator[pb_grpc.OrchestratorStub]:
    """A stub for one call or stream; an unreachable or refusing server becomes one of our errors."""
    with grpc.insecure_channel(address) as channel:
        try:
            yield pb_grpc.OrchestratorStub(channel)
        except grpc.RpcError as error:
            raise _explained(error, address) from None


def _explained(error: grpc.RpcError, address: str) -> Exception:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.NOT_FOUND:
        return UnknownGroup(details)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return OrchestratorUnreachable(
            f"no orchestrator answers at {address}: start one with `coslice up`, or name another "
            "with --orchestrator"
        )
    return OrchestratorUnreachable(f"the orchestrator at {address} answered {code.name}: {details}")


def group_status(address: str, group: str = "") -> pb.GetStatusResponse:
    with orchestrator(address) as stub:
        return stub.GetStatus(pb.GetStatusRequest(group=group), timeout=TIMEOUT)


def agent_status(address: str) -> pb.GetNodeStatusResponse:
    """Raises ``grpc.RpcError``: whether an agent is needed is the caller's decision."""
    with grpc.insecure_channel(address) as channel:
        return pb_grpc.AgentStub(channel).GetNodeStatus(pb.GetNodeStatusRequest(), timeout=TIMEOUT)
