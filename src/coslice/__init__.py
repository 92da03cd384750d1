"""coslice: independent RL post-training jobs share the same accelerators by taking turns.

::

    import coslice

    orchestrator = coslice.connect()

    @orchestrator.on_accelerators
    def train(batch): ...

This module is the public surface (a test locks it). It stays cheap: gRPC is imported with the first call that
needs an orchestrator, asyncio and the workload side on first use.
"""

from typing import TYPE_CHECKING, Any

from coslice.client.sync import Client
from coslice.client.types import Grant, GroupStatus, Lease, Status, Waiter
from coslice.errors import (
    AcquireTimeout,
    ConfigError,
    CosliceError,
    Denied,
    GroupEmpty,
    GroupGone,
    JobFaulted,
    JobRunning,
    LeaseError,
    LeaseLost,
    LimitReached,
    LockOrder,
    NodeLost,
    NoRoom,
    NotAdmitted,
    NotHeld,
    OperationFailed,
    OrchestratorUnreachable,
    Refused,
    StaleLease,
    StateBusy,
    StateError,
    StateLost,
    StateOffloaded,
    UnknownGroup,
)

if TYPE_CHECKING:
    from coslice import workload
    from coslice.client.aio import AsyncClient

__all__ = [
    "AcquireTimeout",
    "AsyncClient",
    "Client",
    "ConfigError",
    "CosliceError",
    "Denied",
    "Grant",
    "GroupEmpty",
    "GroupGone",
    "GroupStatus",
    "JobFaulted",
    "JobRunning",
    "Lease",
    "LeaseError",
    "LeaseLost",
    "LimitReached",
    "LockOrder",
    "NoRoom",
    "NodeLost",
    "NotAdmitted",
    "NotHeld",
    "OperationFailed",
    "OrchestratorUnreachable",
    "Refused",
    "StaleLease",
    "StateBusy",
    "StateError",
    "StateLost",
    "StateOffloaded",
    "Status",
    "UnknownGroup",
    "Waiter",
    "connect",
    "workload",
]


def connect(**settings: Any) -> Client:
    """The client that the environment describes (``coslice run`` sets it); settings given here come first.

    Dials nothing yet. Without ``COSLICE_ORCHESTRATOR`` it is a no-op, so the same script runs anywhere.
    """
    return Client.from_env(**settings)


def __getattr__(name: str) -> Any:
    if name == "AsyncClient":
        from coslice.client.aio import AsyncClient

        return AsyncClient
    if name == "workload":
        import importlib

        return importlib.import_module("coslice.workload")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
