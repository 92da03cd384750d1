"""Every error that coslice raises at its users, in one tree.

::

    CosliceError
    ├── ConfigError            a setting, name or size is malformed; nothing was started
    ├── OrchestratorUnreachable  nobody answers at the address (bounded; says how to start one)
    ├── AcquireTimeout         not granted within the caller's time; the place in the queue is given up
    ├── Refused                the orchestrator or an agent said no
    │   ├── UnknownGroup       names the groups there are
    │   ├── GroupEmpty         no node serves the group
    │   ├── GroupGone          the group was removed while we waited
    │   ├── JobRunning         another incarnation of the job is alive
    │   ├── JobFaulted         the job's state could not be moved; register again
    │   ├── LockOrder          groups must be taken in their global order
    │   ├── LimitReached       a configured limit
    │   ├── NotAdmitted        the group's members would be slowed down beyond their bound
    │   ├── Denied             the caller has not shown that it may: token, ticket or role
    │   ├── NodeLost           a node of the group is missing
    │   └── NoRoom             device or host memory does not suffice
    ├── LeaseError
    │   ├── NotHeld            a yield without a lease
    │   ├── StaleLease         the lease was another epoch's
    │   └── LeaseLost          we held it and lost it: expiry, overrun or a lost session
    ├── StateError
    │   ├── StateOffloaded     offloaded state was touched outside an accelerator section
    │   ├── StateBusy          state is in use: inside an accelerator section
    │   └── StateLost          saved state cannot be brought back
    └── OperationFailed        a snapshot or restore failed; the message has the figures

Each message says whose fault it is and names the next step; figures are in ``data``.
Stdlib only: this module runs inside training jobs.
"""

from collections.abc import Mapping


class CosliceError(Exception):
    """Base of all errors of coslice. ``data`` carries the facts behind the message."""

    def __init__(self, message: str, *, data: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.data: dict[str, str] = dict(data or {})


class ConfigError(CosliceError, ValueError):
    pass


class OrchestratorUnreachable(CosliceError, ConnectionError):
    pass


class AcquireTimeout(CosliceError, TimeoutError):
    pass


class Refused(CosliceError):
    pass


class UnknownGroup(Refused):
    pass


class GroupEmpty(Refused):
    pass


class GroupGone(Refused):
    pass


class JobRunning(Refused):
    pass


class JobFaulted(Refused):
    pass


class LockOrder(Refused):
    pass


class LimitReached(Refused):
    pass


class Denied(Refused):
    pass


class NotAdmitted(Refused):
    pass


class NodeLost(Refused):
    pass


class NoRoom(Refused):
    pass


class LeaseError(CosliceError):
    pass


class NotHeld(LeaseError):
    pass


class StaleLease(LeaseError):
    pass


class LeaseLost(LeaseError):
    pass


class StateError(CosliceError, RuntimeError):
    pass


class StateOffloaded(StateError):
    pass


class StateBusy(StateError):
    pass


class StateLost(StateError):
    pass


class OperationFailed(CosliceError):
    pass
