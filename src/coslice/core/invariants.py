"""What must hold of a group's lock, always. Called after every step by tests, the simulator and debug mode.

The numbers are those of the design's list of invariants. Each check is written against the state and the
step, not against the code that made them. Raises ``InvariantBroken``; of one node's holdings see
``core.invariants_node``.
"""

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.events import ContextState
from coslice.core.group_state import (
    ON_DEVICE,
    PARKED,
    Empty,
    Group,
    Held,
    HolderState,
    Occupancy,
    Resident,
    Swapping,
    active,
    context_of,
    eligible,
    missing,
    open_asks,
    share_of,
    waiting,
)
from coslice.core.ids import JobId, op_id
from coslice.core.outcome import Step


class InvariantBroken(AssertionError):
    """The machine is in a state, or took a step, that must not exist: a bug in coslice."""


def check_group(group: Group) -> None:
    """Every invariant that one state can show."""
    _check_queue(group)
    _check_sessions(group)
    now = group.occupancy
    if isinstance(now, Held | Swapping):
        _require(now.epoch <= group.epoch, f"1: epoch {now.epoch} is above the group's {group.epoch}")
    if isinstance(now, Swapping):
        both = set(now.pending) | set(now.done)
        _require(bool(now.pending), "8: a swap waits for nobody")
        _require(both == set(group.nodes), f"2: a swap covers {sorted(both)}, the group has {group.nodes}")
        _require(not set(now.pending) & set(now.done), "a node is both pending and done")
    _check_frozen(group)
    if isinstance(now, Held):
        record = next((r for r in group.jobs if r.job == now.job), None)
        failed = any(h.state is HolderState.GONE for h in now.holders)
        waits = 0 < len({h.session for h in now.holders}) < now.world or any(
            h.state is HolderState.YIELDED for h in now.holders
        )
        _require(
            bool(active(now)) or (now.world > 0 and waits and not failed),
            "8: a lease that nobody is left to end",
        )
        _require(
            record is not None and record.fault is None,
            f"7: {now.job} holds a lease but is faulted or unknown",
        )
    if isinstance(now, Empty | Resident):
        _require(
            not group.views or not eligible(group) or group.reserved is not None,
            "8: the lock is free although somebody could have it",
        )
    _require(bool(group.views) or not group.waiters, "8: waiters in a group of no nodes")
    _require(not {h.node for h in group.hung} & set(group.nodes), "9: a hung node is waited for")
    _require(list(group.nodes) == sorted(set(group.nodes)), "nodes are not in their stated order")
    drained = [d.node for d in group.drained]
    _require(drained == sorted(set(drained)), "drained nodes are not in their stated order")


def check_group_step(before: Group, event: ev.GroupEvent, step: Step[Group, fx.GroupEffect]) -> None:
    """Every invariant that needs the state before, the event and the effects."""
    after = step.state
    check_group(after)
    if after.reserved is not None:
        _require(
            isinstance(after.occupancy, Empty | Resident) and after.reserved.until > event.at,
            "8: the lock is kept for somebody although it is not free, or without an end",
        )
    _require(after.epoch >= before.epoch, f"1: the epoch fell from {before.epoch} to {after.epoch}")
    was, now = before.occupancy, after.occupancy
    for lease in after.frozen:
        kept = isinstance(was, Held) and was.job == lease.job and was.epoch == lease.epoch
        kept = kept or any((f.job, f.epoch) == (lease.job, lease.epoch) for f in before.frozen)
        _require(kept, f"1: {lease.job} is frozen under {lease.epoch}, which it did not hold")
    if isinstance(now, Held | Swapping) and (not isinstance(was, Held | Swapping) or was.epoch != now.epoch):
        _require(now.epoch > before.epoch, f"1: epoch {now.epoch} is not new")
    if after.settle_by is not None and isinstance(now, Held | Swapping) and now.epoch > before.epoch:
        mine = now.job if isinstance(now, Held) else now.incoming
        queue = waiting(before)
        place = next((i for i, w in enumerate(queue) if w.job == mine), len(queue))
        passed = [w.job for w in queue[:place] if any(v.job == w.job for v in missing(after))]
        _require(not passed, f"8: after a restart {mine} goes before {passed}, who may be about to return")
    if isinstance(was, Held) and isinstance(now, Held) and was.epoch == now.epoch:
        _require(was.job == now.job, "1: a lease changed its job")
    for effect in step.effects:
        match effect:
            case fx.Grant():
                _check_grant(before, after, effect)
            case fx.MakeResident():
                owed = any((h.op, h.node) == (effect.op, effect.node) for h in after.hung)
                _require(
                    owed
                    or (
                        effect.op == op_id(after.id, effect.epoch, effect.node)
                        and isinstance(now, Held | Swapping)
                        and effect.epoch == now.epoch
                    ),
                    f"1: {effect.op} is not an operation of the current epoch",
                )
            case fx.Refuse():
                _require(
                    effect.request not in _requests(after), f"5: {effect.request} was refused but is open"
                )
            case fx.LoseLease():
                share = share_of(before, effect.session)
                _require(
                    share is not None and share.epoch == effect.epoch,
                    f"1: {effect.job} lost a lease {effect.epoch} that it did not hold",
                )
            case fx.ForgetJob():
                _require(isinstance(event, ev.JobForgotten), f"6: {effect.job} is forgotten unasked")
            case fx.AskYield():
                _require(
                    isinstance(now, Held) and any(h.epoch == effect.epoch for h in active(now)),
                    "8: nobody to ask to yield",
                )
    if isinstance(event, ev.AcquireAbandoned):
        _require(
            event.request not in _requests(after),
            f"5: {event.request} was abandoned and left something behind",
        )
    if isinstance(event, ev.LeaseYielded) and isinstance(was, Held) and not _same_lease(was, now):
        _require(
            was.job == event.job
            and any((h.session, h.epoch) == (event.session, event.epoch) for h in was.holders),
            "1: somebody yielded a lease of another",
        )


def _same_lease(was: Held, now: Occupancy) -> bool:
    return isinstance(now, Held) and (now.epoch, now.holders) == (was.epoch, was.holders)


def _check_grant(before: Group, after: Group, grant: fx.Grant) -> None:
    held, was = after.occupancy, before.occupancy
    if not isinstance(held, Held):
        raise InvariantBroken(f"1: {grant.request} was granted without a lease")
    _require(
        held.job == grant.job
        and any((h.request, h.epoch) == (grant.request, grant.epoch) for h in active(held)),
        f"1: {grant.request} was granted a lease that is not the current one",
    )
    _require(
        (held.restored, held.bytes_in) == (grant.restored, grant.bytes_in), "a grant that is not truthful"
    )
    if isinstance(was, Held) and was.epoch == held.epoch:
        return  # a repeat, or one who joins
    _check_drained(before, after, grant.job)
    others = {f.job for f in after.frozen}
    drained = {d.node for d in after.drained}
    for view in after.views:
        if view.node in drained and not view.attached:
            continue
        for other in view.facts.contexts:
            computes = other.job in others and other.state in ON_DEVICE
            _require(not computes, f"1: {other.job} is frozen, and on {view.node} beside {grant.job}")
        context = context_of(view, grant.job)
        parked = context is not None and context.state in PARKED
        _require(not parked, f"2: {grant.job} was granted while its state is parked on {view.node}")
        if view.node in drained:
            continue
        commanded = isinstance(was, Swapping) and was.epoch == held.epoch
        _require(commanded or view.attached, f"2: granted on the word of {view.node}, which is not connected")
        _require(view.outstanding != held.epoch, f"2: granted before {view.node} reported")


def _check_drained(before: Group, after: Group, job: JobId) -> None:
    """Of a lease that begins: some node serves it (though it may leave at once), and none has its state that
    does not."""
    drained = {d.node for d in after.drained}
    nodes = {*before.nodes, *after.nodes}
    _require(bool(nodes - drained), f"10: {job} is granted, and all nodes are drained")
    for view in after.views:
        context = context_of(view, job) if view.node in drained else None
        there = context is not None and context.state is not ContextState.LOST
        _require(not there, f"10: {job} is granted with its state on {view.node}, which is drained")


def _check_frozen(group: Group) -> None:
    """Every frozen lease will go on: it has its place, once, and somebody who will end it."""
    places = [w.job for w in waiting(group)]
    for lease in group.frozen:
        _require(places.count(lease.job) == 1, f"8: {lease.job} is frozen and has no place in the queue")
        _require(bool(active(lease)) or lease.world > 0, f"8: nobody is left of the frozen {lease.job}")
        held = group.occupancy
        _require(
            not isinstance(held, Held) or held.job != lease.job, f"1: {lease.job} holds and is frozen at once"
        )
        _require(lease.epoch <= group.epoch, f"1: a frozen epoch {lease.epoch} is above the group's")


def _check_queue(group: Group) -> None:
    jobs = [w.job for w in group.waiters]
    _require(len(jobs) == len(set(jobs)), f"a job waits in two places: {jobs}")
    frozen = {f.job for f in group.frozen}
    _require(all(w.asks or w.job in frozen for w in group.waiters), "5: a waiter without a caller")
    asks = [a.request for a in open_asks(group)]
    _require(len(asks) == len(set(asks)), "a request waits twice")


def _check_sessions(group: Group) -> None:
    known = [s for r in group.jobs for s in r.sessions]
    _require(len(known) == len(set(known)), "a session speaks for two jobs")
    _require({s.session for s in group.lost} <= set(known), "a lost session that nobody knows")
    held = group.occupancy
    speaking = [(w.job, a.session) for w in group.waiters for a in w.asks]
    for lease in (held, *group.frozen) if isinstance(held, Held) else group.frozen:
        speaking += [(lease.job, h.session) for h in active(lease)]
    if isinstance(held, Swapping) and held.waiter is not None:
        speaking += [(held.incoming, a.session) for a in held.waiter.asks]
    sessions = {r.job: r.sessions for r in group.jobs}
    for job, session in speaking:
        _require(
            session in sessions.get(job, ()), f"5: {job} waits or holds through the ended session {session}"
        )


def _requests(group: Group) -> set[str]:
    held = group.occupancy
    leases = (held, *group.frozen) if isinstance(held, Held) else group.frozen
    mine = {h.request for lease in leases for h in active(lease)}
    return mine | {a.request for a in open_asks(group)}


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantBroken(message)
