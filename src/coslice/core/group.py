"""The lock of one group: who is on its accelerators, who waits, and what must happen next.

``step`` is called by the orchestrator's driver, the simulator, the property tests and the explorer, with one
event at a time. It is pure: store the state it returns, then carry out the effects in order. It decides about
the lock only; what has to leave a device is the agents' decision. It knows no sockets, clocks and stores.

::

    Empty ──acquire──────────────────────────────▶ Held ◀──┐ all nodes ready
      ▲                                             │      │
      │ state gone      yielded, expired, overran   │   Swapping ──failed: whose fault?──▶ next waiter
      └──────────────── Resident ◀──────────────────┘      ▲
                           └──another job acquires─────────┘

A job's fault, a lost client or a lost node never stops the lock: each only changes who is eligible next.
"""

from collections.abc import Sequence
from typing import assert_never

from msgspec.structs import replace

from coslice.core import (
    deadlines,
    draining,
    lease,
    membership,
    memory,
    operator_verbs,
    sessions,
    swap,
    swap_failed,
)
from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.deadlines import next_deadline
from coslice.core.effects import ReasonCode, RefuseCode
from coslice.core.group_state import (
    ACTIVE,
    Empty,
    Group,
    GroupRules,
    Held,
    Holder,
    HolderState,
    JobRecord,
    NodeView,
    Occupancy,
    Resident,
    SessionProcess,
    Swapping,
    contended,
    eligible,
    frozen_lease,
    job_of,
    lease_with,
    missing,
    occupant,
    record_of,
    waiting,
)
from coslice.core.ids import GroupId, NodeId
from coslice.core.outcome import Rejected, Step
from coslice.core.policy import policy_named
from coslice.core.policy.base import NOTHING, Ask, Choice, Policy, Reserve, Waiter
from coslice.core.restart import restarted, resume, stalled, told_late
from coslice.core.turn import Turn

__all__ = [
    "Empty",
    "Group",
    "GroupRules",
    "Held",
    "Holder",
    "Occupancy",
    "Rejected",
    "Resident",
    "Step",
    "Swapping",
    "new_group",
    "next_deadline",
    "restarted",
    "resume",
    "stalled",
    "step",
    "told_late",
]

_FREE = (Empty, Resident)
_QUEUED = ReasonCode.QUEUED


def new_group(
    id: GroupId, *, nodes: Sequence[NodeId] = (), rules: GroupRules | None = None, at: float = 0.0
) -> Group:
    """A group nobody has used. Nodes named here have ``node_loss`` seconds to attach; others may join."""
    views = tuple(NodeView(node=n, detached_at=at) for n in sorted(set(nodes)))
    return Group(id=id, rules=rules or GroupRules(), views=views, since=at)


def step(group: Group, event: ev.GroupEvent, policy: Policy) -> Step[Group, fx.GroupEffect]:
    """Apply one event. Raises ``Rejected``, with nothing changed, if the event is not allowed."""
    turn = Turn(group, event.at)
    if group.deleted and type(event) is not ev.AcquireRequested:
        return Step(group)
    # What happens often comes first.
    if type(event) is ev.AcquireRequested:
        _on_acquire(turn, event)
    elif type(event) is ev.GrantConfirmed:
        lease.confirm(turn, event.request)
    elif type(event) is ev.LeaseYielded:
        lease.yield_(turn, event)
    elif type(event) is ev.OpSucceeded:
        if not (group.hung and membership.answered(turn, event)):
            membership.heard(turn, event)
            swap.succeeded(turn, event)
    elif type(event) is ev.DeadlinePassed:
        deadlines.passed(turn)
    elif type(event) is ev.NodeReported:
        membership.reported(turn, event.node, event.facts)
    elif type(event) is ev.AcquireCompleted:
        lease.complete(turn, event.request)
    elif type(event) is ev.AcquireAbandoned:
        _on_abandoned(turn, event)
    elif type(event) is ev.SessionLost:
        sessions.lost(turn, event.session)
    elif type(event) is ev.SessionResumed:
        sessions.resumed(turn, event.session)
    elif type(event) is ev.SessionClosed:
        sessions.ended(turn, event.session, "its client said goodbye", tell=False)
    elif type(event) is ev.NodeAttached:
        membership.attached(turn, event)
    elif type(event) is ev.NodeDetached:
        membership.detached(turn, event.node)
    elif type(event) is ev.OpFailed:
        if not (group.hung and membership.answered(turn, event)):
            membership.heard(turn, event)
            swap_failed.failed(turn, event)
    elif type(event) is ev.NodesChanged:
        membership.changed(turn, event.nodes)
    elif type(event) is ev.PolicySet:
        _on_policy(turn, event.policy, event.by)
    elif type(event) is ev.JobForgotten:
        operator_verbs.forget(turn, event.job)
    elif type(event) is ev.JobEvicted:
        operator_verbs.evict(turn, event.job, event.reason, event.by)
    elif type(event) is ev.NodeDrained:
        draining.drain(turn, event)
    elif type(event) is ev.NodeUndrained:
        draining.undrain(turn, event)
    elif type(event) is ev.GroupDeleted:
        operator_verbs.delete(turn, event.reason, idle=event.idle)
    else:
        assert_never(event)
    after = turn.group
    if after.settle_by is not None and not missing(after):
        turn.group = after = replace(after, settle_by=None)
    if after.policy:
        policy = policy_named(after.policy)
    if policy.remembers:
        memory.note_ask(turn, event)
        memory.note_end(turn, group)
        after = turn.group
    # Unless it is plain that nobody more waits for a state that is lost than before the event.
    if (
        after.views is not group.views
        or after.waiters is not group.waiters
        or (after.occupancy is not group.occupancy and type(after.occupancy) is Swapping)
    ):
        swap.fault_lost(turn)
    _advance(turn, policy)
    if turn.group.drained:
        draining.ask(turn)
    if turn.group is not group:
        _keep_books(turn, group)
    return Step(turn.group, tuple(turn.effects), tuple(turn.reasons))


def _on_acquire(turn: Turn, event: ev.AcquireRequested) -> None:
    if turn.group.lost:
        sessions.heard_from(turn, event.session)
    queue = waiting(turn.group)
    if _repeated(turn, event, queue):
        return
    record = record_of(turn.group, event.job)
    refusal = _refusal(turn.group, event, record, queue)
    if refusal is not None:
        code, text = refusal
        turn.say(ReasonCode.REFUSED, text)
        turn.effects.append(fx.Refuse(request=event.request, session=event.session, code=code, reason=text))
        return
    _register(turn, event, record)
    ask = Ask(
        request=event.request,
        session=event.session,
        since=turn.at,
        more=event.more,
        phase=event.phase,
        final=event.final,
    )
    held = turn.group.occupancy
    if type(held) is Held and held.job == event.job and lease.can_join(held, event.session):
        lease.join(turn, held, ask, world=event.world)
    else:
        _enqueue(turn, event, ask)


def _repeated(turn: Turn, event: ev.AcquireRequested, queue: tuple[Waiter, ...]) -> bool:
    """A request we know keeps its place, or gets its answer again."""
    held = lease_with(turn.group, event.job)
    if held is not None:
        for holder in held.holders:
            if holder.request == event.request and holder.state is not HolderState.GONE:
                if holder.state is ACTIVE:
                    lease.repeat(turn, held, holder)
                return True
    for waiter in queue:
        for ask in waiter.asks:
            if ask.request == event.request:
                text = f"{event.job} asked again with request {event.request}: it keeps its place"
                turn.say(ReasonCode.REPEATED, text)
                return True
    return False


def _refusal(
    group: Group, event: ev.AcquireRequested, record: JobRecord | None, queue: tuple[Waiter, ...]
) -> tuple[RefuseCode, str] | None:
    if group.deleted:
        return RefuseCode.GROUP_GONE, f"group {group.id} was deleted: ask for another group"
    if not group.views:
        return RefuseCode.GROUP_EMPTY, (f"no node serves group {group.id}: {_nobody(group)}")
    same = record is not None and record.incarnation == event.incarnation
    if record is not None and not same and record.sessions:
        lost = {s.session for s in group.lost}
        gone = all(s in lost for s in record.sessions)
        state = (
            f"lost its connection and is given up within {group.rules.session_grace:g} s: try again then"
            if gone
            else f"runs, with {len(record.sessions)} connected process(es): stop it, or use another job name"
        )
        return RefuseCode.JOB_RUNNING, (
            f"another start of {event.job} (incarnation {record.incarnation or 'without a token'}) {state}"
        )
    if record is not None and same and record.fault is not None:
        return record.fault.code, f"{event.job} is refused until it is started again: {record.fault.reason}"
    queued = 0
    for waiter in queue:
        queued += len(waiter.asks)
    if queued >= group.rules.max_waiters:
        return RefuseCode.LIMIT, (
            f"group {group.id} has {group.rules.max_waiters} requests in its queue already: try again later"
        )
    return None


def _nobody(group: Group) -> str:
    """Why there is no node, and what to do."""
    if group.hung:
        owing = ", ".join(f"{h.node} does not finish {h.op}" for h in group.hung)
        return f"{owing}; restart its agent, or give it time"
    return "start an agent that offers it (coslice up, or coslice agent)"


def _register(turn: Turn, event: ev.AcquireRequested, known: JobRecord | None) -> None:
    record = known
    if record is None or record.incarnation != event.incarnation:
        record = JobRecord(job=event.job, incarnation=event.incarnation)  # a new start: no fault, no past
    if event.session not in record.sessions:
        record = replace(record, sessions=(*record.sessions, event.session))
        if event.pid and event.incarnation:
            process = SessionProcess(
                session=event.session, node=event.node, pid=event.pid, start_time=event.start_time
            )
            record = replace(record, processes=(*record.processes, process))
    if event.need > record.need:
        record = replace(record, need=event.need)
    if record is not known:
        turn.put_record(record)


def _enqueue(turn: Turn, event: ev.AcquireRequested, ask: Ask) -> None:
    group = turn.group
    busy, queue = group.occupancy, group.waiters
    place, mine = 0, None
    for i, waiter in enumerate(queue, 1):
        if waiter.job == event.job:
            place, mine = i, waiter
            break
    if type(busy) is Swapping and busy.incoming == event.job:  # its state is on the way already
        busy = replace(busy, waiter=_joined(busy.waiter or mine, event, ask))
        turn.group = replace(group, occupancy=busy)
    elif mine is not None:
        queue = (*queue[: place - 1], _joined(mine, event, ask), *queue[place:])
        turn.group = replace(group, waiters=queue)
    else:
        turn.group = replace(group, waiters=(*queue, _joined(None, event, ask)))
        place = len(queue) + 1
    where = f"place {place}" if place else "its swap is on"
    turn.say(_QUEUED, f"{event.job} asks for {group.id}: {where}")


def _joined(waiter: Waiter | None, event: ev.AcquireRequested, ask: Ask) -> Waiter:
    """The place of its job, with one more request, or a new place."""
    if waiter is None:
        return Waiter(
            job=event.job,
            incarnation=event.incarnation,
            asks=(ask,),
            since=ask.since,
            world=event.world,
            need=event.need,
        )
    return replace(
        waiter,
        asks=(*waiter.asks, ask),
        world=max(waiter.world, event.world),
        need=max(waiter.need, event.need),
    )


def _on_abandoned(turn: Turn, event: ev.AcquireAbandoned) -> None:
    held, group = turn.group.occupancy, turn.group
    why = f": {event.reason}" if event.reason else ""

    def without(waiter: Waiter) -> Waiter | None:
        asks = tuple(a for a in waiter.asks if a.request != event.request)
        return replace(waiter, asks=asks) if asks or frozen_lease(group, waiter.job) else None

    if type(held) is Swapping and held.waiter is not None:
        turn.set(occupancy=replace(held, waiter=without(held.waiter)))
    kept = (without(w) for w in group.waiters)
    turn.set(waiters=tuple(w for w in kept if w is not None))
    turn.say(ReasonCode.ABANDONED, f"request {event.request} was given up by its caller{why}")
    for one in (held, *group.frozen) if type(held) is Held else group.frozen:
        lease.abandon(turn, one, event.request)


def _advance(turn: Turn, policy: Policy) -> None:
    """Give the lock to the next waiter if it is free. One place decides this, after every event."""
    group = turn.group
    candidates: tuple[Waiter, ...] = ()
    if not group.views:
        for waiter in group.waiters:
            turn.refuse(
                waiter.job,
                RefuseCode.GROUP_EMPTY,
                f"the last node of group {group.id} is gone: {_nobody(group)}",
            )
    elif group.waiters and type(group.occupancy) in _FREE:
        candidates = _willing(group)
    elif group.reserved is None:
        return
    reserved: Reserve | None = None
    if candidates:
        past = memory.remembered(group) if policy.remembers else NOTHING
        last = job_of(group.occupancy)
        choice = policy.choose(candidates, resident=last, now=turn.at, past=past)
        if type(choice) is Choice:
            swap.begin(turn, choice, last)
        elif choice.until > turn.at:
            reserved = choice
        else:
            swap.begin(turn, Choice(candidates[0], f"the time kept for {choice.job} is over"), last)
    if reserved is not None or group.reserved is not None:
        _reserve(turn, reserved)


def _willing(group: Group) -> tuple[Waiter, ...]:
    """Whoever may be granted; but the job that was frozen just now does not go before those it made wait."""
    if not (group.lost or group.stuck or group.drained or group.frozen):
        return group.waiters
    candidates = eligible(group)
    if not group.frozen or len(candidates) < 2:
        return candidates
    last = occupant(group)
    if last is None or frozen_lease(group, last) is None:
        return candidates
    return tuple(w for w in candidates if w.job != last)


def _reserve(turn: Turn, reserved: Reserve | None) -> None:
    was = turn.group.reserved
    if reserved is not None and (was is None or (was.job, was.until) != (reserved.job, reserved.until)):
        turn.set(reserved=reserved)
        turn.say(ReasonCode.RESERVED, f"the lock is kept for {reserved.job}: {reserved.reason}")
    elif reserved is None and was is not None:
        turn.set(reserved=None)


def _on_policy(turn: Turn, spec: str, by: str) -> None:
    if spec:
        try:
            policy_named(spec)
        except ValueError as error:
            raise Rejected(RefuseCode.INVALID.value, str(error), group=turn.group.id) from None
    turn.set(policy=spec)
    turn.say(ReasonCode.POLICY_SET, f"the policy is now {spec or 'the configured one'}, {by} says")


def _keep_books(turn: Turn, before: Group) -> None:
    """What follows from the rest: since when, whether the holder is waited for, records nobody needs."""
    group, at = turn.group, turn.at
    was, now = before.occupancy, group.occupancy
    if type(now) is Held:
        waited_for = group.waiters and (not group.drained or contended(group))
        if now.contended_since is None:
            if waited_for:
                now = replace(now, contended_since=at)
        elif not waited_for:
            spent = now.contended_s + max(0.0, at - now.contended_since)
            now = replace(now, contended_s=spent, contended_since=None)
        other = type(was) is not Held or was.job != now.job
    else:
        other = was is not now and (type(was) is not type(now) or job_of(was) != job_of(now))
    if other and at != group.since:
        turn.group = replace(group, since=at, occupancy=now)
    elif now is not group.occupancy:
        turn.group = replace(group, occupancy=now)
    if turn.spare:
        turn.set(jobs=tuple([r for r in group.jobs if r.sessions or r.fault is not None]))
