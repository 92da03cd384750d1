"""What the shell must do next. Imperative mood, immutable, idempotent by identifier.

Every step also gives its reasons: an enum for metrics and tests, prose for people.
"""

from enum import StrEnum
from typing import final

from msgspec import Struct

from coslice.core.ids import Epoch, JobId, MemberId, NodeId, OpId, RequestId, SessionId


class ReasonCode(StrEnum):
    """Why something was decided. Stable names: metrics, tests and ``explain`` use them."""

    QUEUED = "queued"
    JOINED = "joined"  # another process of the job that holds the lease
    REPEATED = "repeated"  # a request we had already; the answer is given again
    GRANTED_EMPTY = "granted_empty"  # nobody's state was on the device
    GRANTED_RESIDENT = "granted_resident"  # the state was still there: nothing moved
    GRANTED_BOTH_FIT = "granted_both_fit"  # others stay beside it
    GRANTED_SWAPPED = "granted_swapped"
    SWAP_BEGUN = "swap_begun"
    NODE_READY = "node_ready"
    YIELDED = "yielded"
    PARTLY_YIELDED = "partly_yielded"  # other processes of the job have not yielded yet
    SNAPSHOT_DEFERRED = "snapshot_deferred"
    ABANDONED = "abandoned"
    UNCONFIRMED = "unconfirmed"
    SESSION_LOST = "session_lost"
    SESSION_EXPIRED = "session_expired"
    SESSION_ENDED = "session_ended"
    SESSION_RESUMED = "session_resumed"
    OVERRAN = "overran"
    FROZEN = "frozen"  # in the middle of a phase, and queued
    THAWED = "thawed"
    ASKED_TO_YIELD = "asked_to_yield"
    JOB_FAULTED = "job_faulted"
    BLOCKED = "blocked"
    NODE_LOST = "node_lost"
    NODE_ATTACHED = "node_attached"
    NODE_CHANGED = "node_changed"
    STALE = "stale"
    REFUSED = "refused"
    FORGOTTEN = "forgotten"
    EVICTED = "evicted"  # by an operator
    DRAINED = "drained"  # a node, by an operator
    UNDRAINED = "undrained"
    DELETED = "deleted"
    EVICT = "evict"
    RESTORE = "restore"
    FITS = "fits"
    NO_ROOM = "no_room"
    RETRY = "retry"
    KILLED = "killed"
    LOST = "lost"
    REGISTERED = "registered"
    MEASURED = "measured"
    RESERVED = "reserved"  # the lock stays free for a job that is about to come
    POLICY_SET = "policy_set"


class Reason(Struct, frozen=True, gc=False):
    code: ReasonCode
    text: str


class RefuseCode(StrEnum):
    """Same names, in lower case, as ``Code`` on the wire."""

    GROUP_EMPTY = "group_empty"
    JOB_RUNNING = "job_running"
    JOB_FAULTED = "job_faulted"
    STALE_LEASE = "stale_lease"
    NOT_HELD = "not_held"
    GROUP_GONE = "group_gone"
    NODE_LOST = "node_lost"
    LIMIT = "limit"
    NOT_ADMITTED = "not_admitted"
    FAILED = "failed"
    INVALID = "invalid"


class _Effect(Struct, frozen=True, gc=False, kw_only=True, tag=True):
    pass


# ── of the group ───────────────────────────────────────────────────────────


@final
class MakeResident(_Effect, frozen=True, kw_only=True):
    """Tell one node: job J shall be on the device. What has to leave is the agent's decision."""

    op: OpId
    node: NodeId
    job: JobId
    epoch: Epoch
    need: int
    freeze: tuple[JobId, ...] = ()
    """Who must not be on the device meanwhile, though there be room: they are in the middle of a phase."""


@final
class Grant(_Effect, frozen=True, kw_only=True):
    request: RequestId
    session: SessionId
    job: JobId
    epoch: Epoch
    restored: bool
    waited: float
    bytes_in: int
    bytes_out: int
    reason: Reason
    more: bool = False
    """Of a request for several groups: it is no answer to the client before all are granted."""


@final
class Refuse(_Effect, frozen=True, kw_only=True):
    request: RequestId
    session: SessionId
    code: RefuseCode
    reason: str


@final
class LoseLease(_Effect, frozen=True, kw_only=True):
    """Tell a client that its lease is over although it did not yield."""

    session: SessionId
    job: JobId
    epoch: Epoch
    reason: str


@final
class AskYield(_Effect, frozen=True, kw_only=True):
    session: SessionId
    job: JobId
    epoch: Epoch
    waiting: int
    longest_wait: float


@final
class ForgetJob(_Effect, frozen=True, kw_only=True):
    """Tell one node that a job is over: what it remembers of it can go."""

    node: NodeId
    job: JobId


GroupEffect = MakeResident | Grant | Refuse | LoseLease | AskYield | ForgetJob


# ── of one node's holdings ─────────────────────────────────────────────────


@final
class RunSnapshot(_Effect, frozen=True, kw_only=True):
    """Move the state of all live members of the job to host memory."""

    op: OpId
    job: JobId
    attempt: int
    least: int = 0
    """So many bytes or some more, where a part can move alone; 0: all."""


@final
class RunRestore(_Effect, frozen=True, kw_only=True):
    op: OpId
    job: JobId
    attempt: int


@final
class KillJob(_Effect, frozen=True, kw_only=True):
    """Kill the job's registered processes on this node: it cannot be evicted otherwise."""

    job: JobId
    reason: str


@final
class ReportDone(_Effect, frozen=True, kw_only=True):
    op: OpId
    epoch: Epoch
    restored: bool
    bytes_in: int
    bytes_out: int
    seconds: float
    reason: str


@final
class ReportFailed(_Effect, frozen=True, kw_only=True):
    op: OpId
    epoch: Epoch
    culprit: JobId
    stuck: bool
    pid: int
    reason: str


@final
class PushFacts(_Effect, frozen=True, kw_only=True):
    """What we hold changed: push it to the orchestrator."""


@final
class FreeBuffers(_Effect, frozen=True, kw_only=True):
    """Nothing of these processes is left to restore: their host memory can go.

    Of these only: another one of the job may have set its state aside already, before it was heard of here.
    """

    job: JobId
    members: tuple[MemberId, ...]


NodeEffect = RunSnapshot | RunRestore | KillJob | ReportDone | ReportFailed | PushFacts | FreeBuffers
Effect = GroupEffect | NodeEffect
