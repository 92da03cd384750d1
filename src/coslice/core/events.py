"""What happened. Past tense, immutable, and each says when: ``at`` is seconds on the driver's clock.

Two unions: ``GroupEvent`` is what a group's lock hears (core.group), ``NodeEvent`` what one node's holdings
for one group hear (core.context).
"""

from enum import StrEnum
from typing import final

from msgspec import Struct

from coslice.core.ids import Epoch, Incarnation, JobId, MemberId, NodeId, OpId, RequestId, SessionId

OPERATOR = "an operator"


class ContextState(StrEnum):
    """Where the state of one job is, on one node, for one group."""

    LIVE = "live"  # on the device (or about to be created there)
    LEAVING = "leaving"
    SAVED = "saved"  # in host memory
    RETURNING = "returning"
    LOST = "lost"  # gone, with a reason; the next registration of the job starts afresh


class ContextFact(Struct, frozen=True, gc=False, kw_only=True):
    """What an agent says of one job. A job without processes and without state has no fact at all."""

    job: JobId
    state: ContextState
    bytes: int = 0
    pids: tuple[int, ...] = ()
    incarnation: Incarnation = Incarnation("")
    reason: str = ""
    whole: bool = False
    """Its processes can be frozen as they are, also in the middle of a phase."""
    crowded: bool = False
    """``LEAVING``, yet whole on the device and not moved: others are there too, without room for all."""


class EndedProcess(Struct, frozen=True, gc=False, kw_only=True):
    """A registered process whose end the agent saw: a pid and a start time name it for good."""

    job: JobId
    incarnation: Incarnation
    pid: int
    start_time: int


class NodeFacts(Struct, frozen=True, gc=False, kw_only=True):
    """An agent's own word on what it holds for one group; the orchestrator only keeps a copy."""

    version: int = 0
    contexts: tuple[ContextFact, ...] = ()
    ended: tuple[EndedProcess, ...] = ()
    """The latest, in the order in which they were seen to end."""
    device_budget: int = 0
    device_used: int = 0
    host_budget: int = 0
    host_used: int = 0
    host_held: int = 0
    """Of ``host_used``, what has content: the rest can be lent at once."""
    disk_budget: int = 0
    disk_used: int = 0
    accelerator: str = "host"


class _Event(Struct, frozen=True, gc=False, kw_only=True, tag=True):
    at: float
    """Seconds on the driver's clock. The core has no other notion of time."""


# ── the group ──────────────────────────────────────────────────────────────


@final
class AcquireRequested(_Event, frozen=True, kw_only=True):
    job: JobId
    incarnation: Incarnation
    session: SessionId
    request: RequestId
    world: int = 0
    """0: the lease ends when every participant has yielded. N: when N participants have."""
    need: int = 0
    """Declared device memory in bytes per node; 0: unknown."""
    more: bool = False
    """Part of a request for several groups: the confirmation clock starts at ``AcquireCompleted``."""
    phase: str = ""
    final: bool = False
    """Its caller hears the answer or is known to be gone, and confirms nothing."""
    node: str = ""
    """Where the session's process runs, as it says itself; with ``pid`` and ``start_time`` of the process."""
    pid: int = 0
    start_time: int = 0


@final
class AcquireCompleted(_Event, frozen=True, kw_only=True):
    """Every group of a request for several is granted; the answer goes to the client now."""

    request: RequestId


@final
class AcquireAbandoned(_Event, frozen=True, kw_only=True):
    """The caller went away (cancelled, timed out) before it confirmed a grant."""

    request: RequestId
    reason: str = ""


@final
class GrantConfirmed(_Event, frozen=True, kw_only=True):
    request: RequestId


@final
class LeaseYielded(_Event, frozen=True, kw_only=True):
    job: JobId
    session: SessionId
    epoch: Epoch


@final
class SessionLost(_Event, frozen=True, kw_only=True):
    """The stream of a client ended without a goodbye; its grace begins."""

    session: SessionId


@final
class SessionResumed(_Event, frozen=True, kw_only=True):
    """The client is back within its grace; this is how a lease is renewed."""

    session: SessionId


@final
class SessionClosed(_Event, frozen=True, kw_only=True):
    """The client said goodbye: its waiters and leases end now."""

    session: SessionId


@final
class NodeAttached(_Event, frozen=True, kw_only=True):
    node: NodeId
    epoch: Epoch
    """The highest epoch this agent ever saw for the group."""
    facts: NodeFacts


@final
class NodeDetached(_Event, frozen=True, kw_only=True):
    node: NodeId


@final
class NodeReported(_Event, frozen=True, kw_only=True):
    node: NodeId
    facts: NodeFacts


@final
class OpSucceeded(_Event, frozen=True, kw_only=True):
    op: OpId
    node: NodeId
    restored: bool = False
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    reason: str = ""
    facts: NodeFacts | None = None


@final
class OpFailed(_Event, frozen=True, kw_only=True):
    op: OpId
    node: NodeId
    culprit: JobId
    reason: str
    stuck: bool = False
    """The culprit is still on the device: nobody else can be granted until it left."""
    pid: int = 0
    facts: NodeFacts | None = None


@final
class NodesChanged(_Event, frozen=True, kw_only=True):
    nodes: tuple[NodeId, ...]


@final
class PolicySet(_Event, frozen=True, kw_only=True):
    """An operator (or whoever is named) says who goes next from now on. It is kept over restarts."""

    policy: str
    """As ``core.policy.policy_named`` reads it; empty: the configured one."""
    by: str = OPERATOR


@final
class JobForgotten(_Event, frozen=True, kw_only=True):
    """An operator says that this job is over: whatever is remembered of it shall be cleared."""

    job: JobId


@final
class JobEvicted(_Event, frozen=True, kw_only=True):
    """An operator takes a job's lease and its places away; it may ask again. Anybody else (admission) takes
    its places only, for good: a turn that it has is not interrupted."""

    job: JobId
    reason: str = ""
    by: str = OPERATOR


@final
class NodeDrained(_Event, frozen=True, kw_only=True):
    """An operator takes a node out for maintenance: no lease begins there until ``NodeUndrained``. Kept over
    restarts, of this process and of the agent; the node may as well not be attached."""

    node: NodeId
    reason: str = ""
    by: str = OPERATOR


@final
class NodeUndrained(_Event, frozen=True, kw_only=True):
    """The node serves again."""

    node: NodeId
    by: str = OPERATOR


@final
class GroupDeleted(_Event, frozen=True, kw_only=True):
    """An operator says that there shall be no such group any more."""

    reason: str = ""
    idle: bool = False
    """Only if nobody is in it."""


@final
class DeadlinePassed(_Event, frozen=True, kw_only=True):
    """The driver woke up because ``next_deadline`` was reached."""


GroupEvent = (
    AcquireRequested
    | AcquireCompleted
    | AcquireAbandoned
    | GrantConfirmed
    | LeaseYielded
    | SessionLost
    | SessionResumed
    | SessionClosed
    | NodeAttached
    | NodeDetached
    | NodeReported
    | OpSucceeded
    | OpFailed
    | NodesChanged
    | PolicySet
    | JobForgotten
    | JobEvicted
    | NodeDrained
    | NodeUndrained
    | GroupDeleted
    | DeadlinePassed
)


# ── one node's holdings for one group ──────────────────────────────────────


@final
class MakeResidentCommanded(_Event, frozen=True, kw_only=True):
    op: OpId
    epoch: Epoch
    job: JobId
    need: int = 0
    freeze: tuple[JobId, ...] = ()


@final
class MemberRegistered(_Event, frozen=True, kw_only=True):
    """A process offers its state. It may come back (same member), then it says where the state is."""

    job: JobId
    incarnation: Incarnation
    member: MemberId
    pid: int
    start_time: int
    bytes: int
    need: int = 0
    parked: bool = False
    part: bool = False
    """Some of its state is in host memory, and some on the device."""
    divisible: bool = False
    """Can move a part of its state and leave the rest."""
    whole: bool = False
    """Can be frozen as it is, also in the middle of a phase."""
    unkept: int = 0
    """Of ``bytes``, what needs no host memory of its own when it leaves."""
    common: tuple[tuple[str, int], ...] = ()
    """Beside ``bytes``: names and bytes of weights that are on the device once for all that have them."""


@final
class MemberResized(_Event, frozen=True, kw_only=True):
    job: JobId
    member: MemberId
    bytes: int
    need: int = 0
    unkept: int = 0
    common: tuple[tuple[str, int], ...] = ()


@final
class MemberGone(_Event, frozen=True, kw_only=True):
    """The process exited (or, ``lost``, its channel ended and the process with it)."""

    job: JobId
    member: MemberId
    reason: str = ""


@final
class UsageMeasured(_Event, frozen=True, kw_only=True):
    """Device memory of one job as measured now: all its members together, above their baselines."""

    job: JobId
    bytes: int


@final
class SnapshotSucceeded(_Event, frozen=True, kw_only=True):
    job: JobId
    op: OpId
    bytes: int
    residual: int
    """What the parked processes leave on the device, in bytes."""
    seconds: float
    partly: bool = False
    """Some of the state stayed on the device (it is in ``residual``)."""
    attempt: int = 0
    """Which attempt this answers; 0: the one that runs."""


@final
class SnapshotFailed(_Event, frozen=True, kw_only=True):
    job: JobId
    op: OpId
    reason: str
    busy: bool = False
    """The state was in use; nothing was touched."""
    no_room: bool = False
    """Host memory did not suffice; nothing was touched, and asking again will not help."""
    attempt: int = 0
    """Which attempt this answers; 0: the one that runs."""


@final
class RestoreSucceeded(_Event, frozen=True, kw_only=True):
    job: JobId
    op: OpId
    bytes: int
    seconds: float
    attempt: int = 0
    """Which attempt this answers; 0: the one that runs."""


@final
class RestoreFailed(_Event, frozen=True, kw_only=True):
    job: JobId
    op: OpId
    reason: str
    lost: bool = False
    """The state cannot be brought back by trying again."""
    attempt: int = 0
    """Which attempt this answers; 0: the one that runs."""


@final
class JobKilled(_Event, frozen=True, kw_only=True):
    job: JobId
    reason: str
    incarnation: Incarnation = Incarnation("")
    """Which one was killed; empty: whichever is here."""


NodeEvent = (
    MakeResidentCommanded
    | MemberRegistered
    | MemberResized
    | MemberGone
    | UsageMeasured
    | SnapshotSucceeded
    | SnapshotFailed
    | RestoreSucceeded
    | RestoreFailed
    | JobKilled
    | JobForgotten
    | DeadlinePassed
)

Event = GroupEvent | NodeEvent
