"""Errors ↔ codes on the wire ↔ gRPC status: the one table."""

from collections.abc import Mapping

import grpc

from coslice import errors
from coslice.wire.v1 import coslice_pb2 as pb

_TABLE: dict[pb.Code.ValueType, tuple[type[errors.CosliceError], grpc.StatusCode]] = {
    pb.UNKNOWN_GROUP: (errors.UnknownGroup, grpc.StatusCode.NOT_FOUND),
    pb.GROUP_EMPTY: (errors.GroupEmpty, grpc.StatusCode.FAILED_PRECONDITION),
    pb.GROUP_GONE: (errors.GroupGone, grpc.StatusCode.NOT_FOUND),
    pb.JOB_RUNNING: (errors.JobRunning, grpc.StatusCode.ALREADY_EXISTS),
    pb.JOB_FAULTED: (errors.JobFaulted, grpc.StatusCode.FAILED_PRECONDITION),
    pb.STALE_LEASE: (errors.StaleLease, grpc.StatusCode.ABORTED),
    pb.NOT_HELD: (errors.NotHeld, grpc.StatusCode.FAILED_PRECONDITION),
    pb.LOCK_ORDER: (errors.LockOrder, grpc.StatusCode.FAILED_PRECONDITION),
    pb.INVALID: (errors.ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    pb.LIMIT: (errors.LimitReached, grpc.StatusCode.RESOURCE_EXHAUSTED),
    pb.SHUTTING_DOWN: (errors.OrchestratorUnreachable, grpc.StatusCode.UNAVAILABLE),
    pb.BUSY: (errors.StateBusy, grpc.StatusCode.ABORTED),
    pb.NO_ROOM: (errors.NoRoom, grpc.StatusCode.RESOURCE_EXHAUSTED),
    pb.FAILED: (errors.OperationFailed, grpc.StatusCode.INTERNAL),
    pb.DENIED: (errors.Denied, grpc.StatusCode.PERMISSION_DENIED),
    pb.NOT_ADMITTED: (errors.NotAdmitted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    pb.STATE_LOST: (errors.StateLost, grpc.StatusCode.DATA_LOSS),
    pb.NODE_LOST: (errors.NodeLost, grpc.StatusCode.UNAVAILABLE),
}


def error_of(
    code: pb.Code.ValueType, message: str, data: Mapping[str, str] | None = None
) -> errors.CosliceError:
    """The error that a client raises for a refusal."""
    kind, _ = _TABLE.get(code, (errors.CosliceError, grpc.StatusCode.UNKNOWN))
    return kind(message, data=data)


def code_of(error: errors.CosliceError) -> pb.Code.ValueType:
    """The code under which an error travels; ``FAILED`` for one that has none of its own."""
    return next((code for code, (kind, _) in _TABLE.items() if type(error) is kind), pb.FAILED)


def grpc_status(code: pb.Code.ValueType) -> grpc.StatusCode:
    return _TABLE.get(code, (errors.CosliceError, grpc.StatusCode.UNKNOWN))[1]
