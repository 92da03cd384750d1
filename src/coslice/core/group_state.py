"""What is true of one group: the structs that are stored, and questions about them.

``Group`` is everything the lock machine (core.group) knows. Exactly one occupancy is true::

    Empty      nobody's state is known to be on the accelerators
    Resident   a job's state is (or may be) still there; the lock is free, its snapshot deferred
    Held       a lease is out, under an epoch, shared by processes of one incarnation of one job
    Swapping   nodes have been told to make a job resident; the lease follows when all have reported

Nothing here decides anything. The questions are asked in every step: those that are asked often are written
as plain loops, which cost a fraction of what generators do. Members of a union are final, and told apart by
``type(x) is``: for a struct that is of another class ``isinstance`` and a class pattern cost five times as
much. ``gc=False``: frozen values of frozen values cannot form cycles, so that the collector need not look at
them.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Literal, final

from msgspec import Struct

from coslice.core.effects import Reason, RefuseCode
from coslice.core.events import ContextFact, ContextState, NodeFacts
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, NodeId, OpId, RequestId, SessionId
from coslice.core.policy.base import Ask, Reserve, Waiter
from coslice.core.policy.past import Past


class GroupRules(Struct, frozen=True, gc=False, kw_only=True):
    """All in seconds unless said otherwise."""

    session_grace: float = 10.0
    resettle: float = 1.5
    """After a restart nobody is passed over for that long, or until its session is given up: clients need a
    moment to come back."""
    confirm_timeout: float = 5.0
    quantum: float = 30.0
    """A holder is asked to give way once it held that long and somebody waited that long."""
    max_hold: float = 3600.0
    """Counted only while somebody waits."""
    on_overrun: Literal["evict", "warn"] = "evict"
    node_loss: float = 60.0
    op_timeout: float = 900.0
    """For one command to one node. A backstop: more than an agent takes for all its attempts (by its defaults
    four moves of 150 s, and 70 s for one that is stuck), because then the node itself is at fault."""
    max_waiters: int = 10_000
    """Requests in the queue, all jobs together."""
    max_attempts: int = 3
    """Swaps for one waiter that may fail by other jobs' faults before it is refused."""
    stuck_retry: float = 30.0
    """An evictee that could not be moved is tried again after that long: it may have left its section."""


@final
class Empty(Struct, frozen=True, gc=False, tag=True):
    pass


@final
class Resident(Struct, frozen=True, gc=False, kw_only=True, tag=True):
    job: JobId


class HolderState(StrEnum):
    ACTIVE = "active"
    YIELDED = "yielded"
    GONE = "gone"  # abandoned, unconfirmed, or its session ended


ACTIVE = HolderState.ACTIVE


class Holder(Struct, frozen=True, gc=False, kw_only=True):
    """One process's share of a lease."""

    request: RequestId
    session: SessionId
    epoch: Epoch
    """Under which it was granted, and will be yielded. The lease's own is a later one after a freeze."""
    waited: float
    state: HolderState = ACTIVE
    more: bool = False
    confirmed: bool = False
    confirm_by: float | None = None
    """None: the clock does not run (confirmed, part of a larger request, or the session is lost)."""


@final
class Held(Struct, frozen=True, gc=False, kw_only=True, tag=True):
    job: JobId
    incarnation: Incarnation
    epoch: Epoch
    since: float
    holders: tuple[Holder, ...]
    reason: Reason
    phase: str = ""
    world: int = 0
    restored: bool = False
    bytes_in: int = 0
    bytes_out: int = 0
    contended_s: float = 0.0
    """Held while somebody waited, before ``contended_since``."""
    contended_since: float | None = None
    asked: bool = False
    overran: bool = False


@final
class Swapping(Struct, frozen=True, gc=False, kw_only=True, tag=True):
    incoming: JobId
    waiter: Waiter | None
    """None once every caller gave up; the swap still runs to its end."""
    epoch: Epoch
    since: float
    pending: tuple[NodeId, ...]
    done: tuple[NodeId, ...] = ()
    outgoing: JobId | None = None
    need: int = 0
    restored: bool = False
    bytes_in: int = 0
    bytes_out: int = 0
    notes: tuple[str, ...] = ()
    """What the agents said of their part."""


Occupancy = Empty | Resident | Held | Swapping


UNASKED = -1.0


class NodeView(Struct, frozen=True, gc=False, kw_only=True):
    """The orchestrator's copy of one node: what its agent said last, and whether its stream is up."""

    node: NodeId
    facts: NodeFacts = NodeFacts()
    attached: bool = False
    detached_at: float = 0.0
    asked_at: float = 0.0
    """When that command was last sent; ``UNASKED``: not since its stream is up."""
    outstanding: Epoch = Epoch(0)
    """The last command not answered yet: until it is, the facts may be about to change. 0: none."""


class Hung(Struct, frozen=True, gc=False, kw_only=True):
    """A node that left the group because it did not answer this command; it is back when it does."""

    op: OpId
    node: NodeId
    job: JobId
    epoch: Epoch
    need: int = 0
    freeze: tuple[JobId, ...] = ()


class Fault(Struct, frozen=True, gc=False, kw_only=True):
    """Why a job is refused until it registers afresh."""

    code: RefuseCode
    reason: str
    node: NodeId | None = None
    """Set when the fault is only that this node is out of reach."""


class LastYield(Struct, frozen=True, gc=False):
    session: SessionId
    epoch: Epoch


class SessionProcess(Struct, frozen=True, gc=False, kw_only=True):
    """The process that a session speaks for, in its own words."""

    session: SessionId
    node: str
    pid: int
    start_time: int


class JobRecord(Struct, frozen=True, gc=False, kw_only=True):
    job: JobId
    incarnation: Incarnation
    sessions: tuple[SessionId, ...] = ()
    """Connected, or lost and still within their grace."""
    processes: tuple[SessionProcess, ...] = ()
    """Of those sessions that said what they are."""
    fault: Fault | None = None
    need: int = 0
    yields: tuple[LastYield, ...] = ()
    past: Past = Past()
    """Empty unless the policy asks for it."""


class LostSession(Struct, frozen=True, gc=False, kw_only=True):
    session: SessionId
    deadline: float


class Stuck(Struct, frozen=True, gc=False, kw_only=True):
    """A job (or, with no name, a stray process) that could not be evicted from a node."""

    node: NodeId
    job: JobId
    pid: int
    reason: str
    retry_at: float


class Drained(Struct, frozen=True, gc=False, kw_only=True):
    """A node that is out for maintenance."""

    node: NodeId
    by: str
    reason: str = ""
    epoch: Epoch = Epoch(0)
    """Of the lease that was out then, and may use the node to its end; 0: none."""


class Group(Struct, frozen=True, gc=False, kw_only=True):
    id: GroupId
    rules: GroupRules = GroupRules()
    views: tuple[NodeView, ...] = ()
    """By node name."""
    occupancy: Occupancy = Empty()
    since: float = 0.0
    """When the occupancy last changed its kind or its job."""
    waiters: tuple[Waiter, ...] = ()
    """In the order of the queue."""
    frozen: tuple[Held, ...] = ()
    """Leases stopped in the middle of a phase. Each has its job's place in the queue (or in the swap that is
    on), and goes on under a new epoch when that is served."""
    jobs: tuple[JobRecord, ...] = ()
    """In the order of first appearance."""
    lost: tuple[LostSession, ...] = ()
    hung: tuple[Hung, ...] = ()
    deleted: bool = False
    """By an operator: there is no such group any more, whoever still speaks to it."""
    settle_by: float | None = None
    """Set by a restart while waiters are not back yet: until then each keeps its turn, not only its place."""
    stuck: tuple[Stuck, ...] = ()
    drained: tuple[Drained, ...] = ()
    """By node name; also nodes that are not of the group for now: they are drained when they come."""
    reserved: Reserve | None = None
    """The policy keeps the lock free for somebody although others wait."""
    policy: str = ""
    """Set by an operator; empty: the one given to ``step``."""
    epoch: Epoch = Epoch(0)
    """The highest ever used or heard of."""
    swaps: int = 0
    """Hand-overs for which state really moved."""
    bytes_moved: int = 0
    held_s: float = 0.0
    """Sum over all leases that ended."""

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(v.node for v in self.views)


LIVE, LOST = ContextState.LIVE, ContextState.LOST
ON_DEVICE = frozenset({ContextState.LIVE, ContextState.LEAVING, ContextState.RETURNING})
PARKED = frozenset({ContextState.SAVED, ContextState.LEAVING, ContextState.RETURNING})


def view_of(group: Group, node: NodeId) -> NodeView | None:
    for view in group.views:
        if view.node == node:
            return view
    return None


def drain_of(group: Group, node: NodeId) -> Drained | None:
    for drained in group.drained:
        if drained.node == node:
            return drained
    return None


def uses(group: Group, view: NodeView, job: JobId) -> bool:
    """Has the job anything on that node that a lease of it would need: state, or a process that asks?"""
    context = context_of(view, job)
    if context is not None and context.state is not LOST:
        return True
    record = record_of(group, job)
    processes = record.processes if record is not None else ()
    return any(view.node in (p.node, p.node.partition(".")[0]) for p in processes)


def held_up(group: Group, job: JobId) -> tuple[Drained, ...]:
    """The drained nodes for whose sake ``job`` gets no lease: those that it uses, or all that there are."""
    if not group.drained:
        return ()
    here = [(d, view) for d in group.drained if (view := view_of(group, d.node)) is not None]
    if len(here) == len(group.views):
        return tuple([d for d, _ in here])
    return tuple([d for d, view in here if uses(group, view, job)])


def held_by(group: Group, node: NodeId) -> JobId | None:
    """Who holds a lease that may use the drained node, or has something there all the same."""
    held, drained, view = group.occupancy, drain_of(group, node), view_of(group, node)
    if type(held) is not Held or drained is None or view is None:
        return None
    return held.job if held.epoch <= drained.epoch or uses(group, view, held.job) else None


def contended(group: Group) -> bool:
    """Does somebody wait who could have the lock, as far as drained nodes go?"""
    if not group.drained:
        return bool(group.waiters)
    return any(not held_up(group, w.job) for w in group.waiters)


def record_of(group: Group, job: JobId) -> JobRecord | None:
    for record in group.jobs:
        if record.job == job:
            return record
    return None


def context_of(view: NodeView, job: JobId) -> ContextFact | None:
    for context in view.facts.contexts:
        if context.job == job:
            return context
    return None


def on_device(group: Group) -> Iterator[tuple[NodeId, ContextFact]]:
    """Every context that takes device memory, by node and then in the agent's order."""
    return ((v.node, c) for v in group.views for c in v.facts.contexts if c.state in ON_DEVICE)


def is_on_device(group: Group, job: JobId) -> bool:
    for view in group.views:
        for context in view.facts.contexts:
            if context.job == job and context.state in ON_DEVICE:
                return True
    return False


def occupant(group: Group) -> JobId | None:
    """The job that the accelerators belong to now, if any (of a swap, the one that comes)."""
    return job_of(group.occupancy)


def job_of(on: Occupancy) -> JobId | None:
    if type(on) is Held:
        return on.job
    if type(on) is Swapping:
        return on.incoming
    return on.job if type(on) is Resident else None


def is_lost(group: Group, session: SessionId) -> bool:
    return bool(group.lost) and any(s.session == session for s in group.lost)


def frozen_lease(group: Group, job: JobId) -> Held | None:
    for held in group.frozen:
        if held.job == job:
            return held
    return None


def lease_with(group: Group, job: JobId) -> Held | None:
    """The lease of a job, held or frozen."""
    on = group.occupancy
    if type(on) is Held and on.job == job:
        return on
    return frozen_lease(group, job) if group.frozen else None


def share_of(group: Group, session: SessionId) -> Holder | None:
    """What a session holds, be it frozen for now."""
    on = group.occupancy
    for held in (on, *group.frozen) if type(on) is Held else group.frozen:
        for holder in held.holders:
            if holder.session == session and holder.state is ACTIVE:
                return holder
    return None


def has_live_ask(group: Group, waiter: Waiter) -> bool:
    """Is somebody there to take a grant? A waiter whose sessions are all lost is passed over for now.

    A frozen job may be silent for the very reason that it is frozen: its agent tells whether it lives.
    """
    if not group.lost or any(not is_lost(group, a.session) for a in waiter.asks):
        return True
    return frozen_lease(group, waiter.job) is not None


def given_up_at(group: Group, sessions: Iterable[SessionId]) -> float | None:
    """When the last of ``sessions`` is given up; None as long as one of them is connected (or none given)."""
    deadlines = {s.session: s.deadline for s in group.lost}
    due = [deadlines.get(session) for session in sessions]
    return max((d for d in due if d is not None), default=None) if None not in due else None


def waiting(group: Group) -> tuple[Waiter, ...]:
    """Who has no answer yet, the one being swapped in first."""
    swap = group.occupancy
    if type(swap) is not Swapping or swap.waiter is None:
        return group.waiters
    return (swap.waiter, *group.waiters)


def open_asks(group: Group) -> Iterator[Ask]:
    """Every request that is not answered yet, the one being swapped in first."""
    for waiter in waiting(group):
        yield from waiter.asks


def active(held: Held) -> tuple[Holder, ...]:
    holders = held.holders
    for holder in holders:
        if holder.state is not ACTIVE:
            return tuple([h for h in holders if h.state is ACTIVE])
    return holders


def blockers(group: Group, job: JobId) -> tuple[Stuck, ...]:
    """What keeps ``job`` from being loaded: every stuck evictee on a node where it is not loaded itself.

    On a drained node nobody is loaded; only one that would compute on beside ``job`` matters there.
    """
    if not group.stuck:
        return ()
    return tuple(
        s
        for s in group.stuck
        if s.job != job
        and not _is_live(group, s.node, job)
        and (drain_of(group, s.node) is None or frozen_lease(group, s.job) is not None)
    )


def _is_live(group: Group, node: NodeId, job: JobId) -> bool:
    view = view_of(group, node)
    context = context_of(view, job) if view is not None else None
    return context is not None and context.state is LIVE


def overdue_at(group: Group, view: NodeView) -> float | None:
    """When a node that a swap waits for, and that is connected, counts as hung."""
    swap = group.occupancy
    if type(swap) is not Swapping or not view.attached or view.outstanding != swap.epoch:
        return None
    return view.asked_at + group.rules.op_timeout if view.node in swap.pending else None


def missing(group: Group) -> tuple[Waiter, ...]:
    """The waiters of whom nobody is connected, the one being swapped in first."""
    if not group.lost:
        return ()
    return tuple(w for w in waiting(group) if not has_live_ask(group, w))


def eligible(group: Group) -> tuple[Waiter, ...]:
    """The waiters that may be granted now, in the order of the queue."""
    queue = group.waiters
    if not group.lost and not group.stuck and not group.drained:
        return queue
    if group.settle_by is not None:
        ahead = next((i for i, w in enumerate(queue) if not has_live_ask(group, w)), len(queue))
        queue = queue[:ahead]
    return tuple(
        w
        for w in queue
        if has_live_ask(group, w) and not blockers(group, w.job) and not held_up(group, w.job)
    )
