"""What the client hands to its callers: plain values, so that neither gRPC nor protobuf shows through."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """One group's lock, held by this process."""

    group: str
    epoch: int
    """Fencing token: only ever grows within a group."""
    restored: bool = False
    """State was really moved back to the device for this grant."""
    waited_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    reason: str = ""
    """Why it was granted when it was, in prose."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to an acquire. Without an orchestrator it has no leases."""

    leases: tuple[Lease, ...] = ()

    @property
    def restored(self) -> bool:
        return any(lease.restored for lease in self.leases)

    @property
    def waited_s(self) -> float:
        return max((lease.waited_s for lease in self.leases), default=0.0)


@dataclass(frozen=True, slots=True)
class Waiter:
    job: str
    waited_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class GroupStatus:
    group: str
    state: str
    """``empty``, ``resident``, ``held`` or ``swapping``."""
    job: str
    epoch: int
    waiters: tuple[Waiter, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """What the orchestrator says of one group or of all. Without an orchestrator there are none."""

    orchestrator: str = ""
    groups: tuple[GroupStatus, ...] = ()
