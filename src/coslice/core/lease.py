"""Leases: who holds the lock, when a share of it is given back, and when the lease is over.

Called by ``core.group`` with a ``Turn``. Knows nothing of nodes or state: whoever calls ``hold`` has made
sure that the job may run.
"""

from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.effects import Grant, Reason, ReasonCode
from coslice.core.group_state import (
    ACTIVE,
    ON_DEVICE,
    Group,
    Held,
    Holder,
    HolderState,
    LastYield,
    Resident,
    active,
    context_of,
    frozen_lease,
    has_live_ask,
    is_lost,
    lease_with,
    record_of,
)
from coslice.core.ids import Epoch, RequestId, SessionId
from coslice.core.outcome import Rejected
from coslice.core.policy.base import Ask, Waiter
from coslice.core.turn import Turn

_YIELDED, _GONE = HolderState.YIELDED, HolderState.GONE
_OVER, _DEFERRED = ReasonCode.YIELDED, ReasonCode.SNAPSHOT_DEFERRED


def hold(
    turn: Turn,
    waiter: Waiter,
    *,
    epoch: Epoch,
    reason: Reason,
    restored: bool = False,
    bytes_in: int = 0,
    bytes_out: int = 0,
) -> None:
    """Give the lease to every process that asked in ``waiter``. Provisional until each confirms.

    One that was frozen goes on as it was; its processes know it under the epoch that they were granted.
    """
    asks, group = waiter.asks, turn.group
    if len(asks) == 1:  # most often
        new: tuple[Holder, ...] = (_holder(turn, asks[0], epoch),)
    else:
        new = tuple([_holder(turn, ask, epoch) for ask in asks])
    frozen = frozen_lease(group, waiter.job) if group.frozen else None
    held = Held(
        job=waiter.job,
        incarnation=waiter.incarnation,
        epoch=epoch,
        since=turn.at,
        holders=new if frozen is None else (*frozen.holders, *new),
        reason=reason,
        phase=waiter.phase if frozen is None else frozen.phase,
        world=waiter.world if frozen is None else max(frozen.world, waiter.world),
        restored=restored,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
    )
    turn.group = replace(group, occupancy=held)
    if frozen is not None:
        turn.thaw(held.job)
        turn.say(ReasonCode.THAWED, f"{held.job} goes on with lease {frozen.epoch}, now under epoch {epoch}")
    for holder in new:
        if not group.lost or not is_lost(group, holder.session):
            _tell(turn, held, holder, reason)


def can_freeze(group: Group, held: Held) -> bool:
    """Can every process of the lease be frozen as it is?

    By the word of the agents: the job is on their devices only in processes that a backend can freeze. A
    process that has not taken up its grant yet is not known to be one of them.
    """
    found = False
    if not all(h.confirmed for h in active(held)):
        return False
    for view in group.views:
        context = context_of(view, held.job)
        if context is None:
            continue
        known = view.attached and context.incarnation == held.incarnation
        if not (known and context.whole) or context.state not in ON_DEVICE:
            return False
        found = True
    return found


def freeze(turn: Turn, held: Held, why: str) -> None:
    """The lock passes on in the middle of a phase. The job is queued, at the end, and will go on there."""
    group = turn.group
    turn.say(ReasonCode.FROZEN, f"{held.job} is frozen and queued: {why}")
    if all(w.job != held.job for w in group.waiters):
        waiter = Waiter(job=held.job, incarnation=held.incarnation, asks=(), since=turn.at, world=held.world)
        turn.set(waiters=(*group.waiters, waiter))
    turn.set(
        frozen=(*group.frozen, replace(held, asked=False, contended_since=None, contended_s=0.0)),
        occupancy=Resident(job=held.job),
        held_s=group.held_s + max(0.0, turn.at - held.since),
    )


def join(turn: Turn, held: Held, ask: Ask, *, world: int) -> None:
    """One more process of the job that holds the lease comes in under the same epoch."""
    reason = turn.say(
        ReasonCode.JOINED,
        f"another process of {held.job} joins its lease {held.epoch}: the state is there already",
    )
    holder = _holder(turn, ask, held.epoch)
    others = tuple(h for h in held.holders if (h.session, h.state) != (ask.session, _GONE))
    held = replace(held, holders=(*others, holder), world=max(held.world, world))
    turn.set(occupancy=held)
    _tell(turn, held, holder, reason)


def can_join(held: Held, session: SessionId) -> bool:
    """A process that has yielded in this lease is done with it: it queues again."""
    return all(h.session != session or h.state is not _YIELDED for h in held.holders)


def repeat(turn: Turn, held: Held, holder: Holder) -> None:
    """The answer may have been lost: give it again. Nothing changes but the time to confirm."""
    if not holder.confirmed and not holder.more:
        holder = replace(holder, confirm_by=turn.at + turn.group.rules.confirm_timeout)
        held = _with_holder(held, holder)
        turn.put_lease(held)
    turn.say(
        ReasonCode.REPEATED,
        f"{held.job} asked again with request {holder.request}: same grant, epoch {held.epoch}",
    )
    _tell(turn, held, holder, held.reason)


def confirm(turn: Turn, request: RequestId) -> None:
    group = turn.group
    held = group.occupancy
    if type(held) is Held and (holder := _active_request(held, request)) is not None:
        held = _with_holder(held, replace(holder, confirmed=True, confirm_by=None, more=False))
        turn.group = replace(group, occupancy=held)
    else:
        turn.say(ReasonCode.STALE, f"confirmation of {request}, which is no part of a lease: ignored")


def complete(turn: Turn, request: RequestId) -> None:
    """All groups of one request are granted: from now on the client is expected to confirm."""
    held = turn.group.occupancy
    holder = _active_request(held, request) if type(held) is Held else None
    if type(held) is not Held or holder is None or holder.confirmed:
        return
    lost = is_lost(turn.group, holder.session)
    confirm_by = None if lost else turn.at + turn.group.rules.confirm_timeout
    turn.put_lease(_with_holder(held, replace(holder, more=False, confirm_by=confirm_by)))


def abandon(turn: Turn, held: Held, request: RequestId) -> None:
    """The caller of one share is gone; whether it had confirmed makes no difference."""
    holder = _active_request(held, request)
    if holder is None:
        return
    held = _with_holder(held, replace(holder, state=_GONE, confirm_by=None))
    turn.put_lease(held)
    settle(turn, held)


def yield_(turn: Turn, event: ev.LeaseYielded) -> None:
    """Give back one process's share, exactly once: a repeat of its last yield succeeds, changing nothing."""
    held = lease_with(turn.group, event.job)
    record = record_of(turn.group, event.job)
    holders = None if held is None else _yielded(held, event)
    last = LastYield(event.session, event.epoch)
    if held is None or holders is None:
        if record is not None and last in record.yields:
            turn.say(ReasonCode.REPEATED, f"{event.job} had yielded lease {event.epoch} already")
            return
        raise _rejection(turn.group, event)
    if record is not None:
        before = record.yields
        if len(before) == 1 and before[0].session == event.session:
            yields: tuple[LastYield, ...] = (last,)
        else:
            yields = (*[y for y in before if y.session != event.session], last)
        turn.put_record(replace(record, yields=yields))
    settle(turn, replace(held, holders=holders))


def ask(turn: Turn, held: Held, why: str) -> None:
    """Every process of the lease hears that it should give way. Once in a lease."""
    waiting = [w for w in turn.group.waiters if has_live_ask(turn.group, w)]
    longest = turn.at - min([w.since for w in waiting]) if waiting else 0.0
    turn.set(occupancy=replace(held, asked=True))
    turn.say(ReasonCode.ASKED_TO_YIELD, f"{held.job} is asked to give way: {why}")
    for session, epoch in {h.session: h.epoch for h in active(held)}.items():
        turn.effects.append(
            fx.AskYield(
                session=session, job=held.job, epoch=epoch, waiting=len(waiting), longest_wait=longest
            )
        )


def ask_again(turn: Turn, session: SessionId) -> None:
    """It may not have heard that it should give way."""
    held = turn.group.occupancy
    share = next((h for h in active(held) if h.session == session), None) if isinstance(held, Held) else None
    if isinstance(held, Held) and share is not None and held.asked:
        turn.effects.append(
            fx.AskYield(
                session=session,
                job=held.job,
                epoch=share.epoch,
                waiting=len(turn.group.waiters),
                longest_wait=turn.at - min([w.since for w in turn.group.waiters], default=turn.at),
            )
        )


def settle(turn: Turn, held: Held) -> None:
    """Store the lease, held or frozen, as it is now; or end it, if nobody is left who would end it."""
    left, gone = 0, False
    for holder in held.holders:
        if holder.state is ACTIVE:
            left += 1
        elif holder.state is _GONE:
            gone = True
    if left:
        turn.put_lease(held)
        turn.say(
            ReasonCode.PARTLY_YIELDED, f"{held.job}: {left} more of its processes hold lease {held.epoch}"
        )
        return
    if held.world and not gone:
        record = record_of(turn.group, held.job)
        yielded = len({h.session for h in held.holders})
        if yielded < held.world and record is not None and record.sessions:
            turn.put_lease(held)
            text = f"{held.job}: {yielded} of {held.world} processes have yielded"
            turn.say(ReasonCode.PARTLY_YIELDED, text)
            return
    if not turn.group.frozen or frozen_lease(turn.group, held.job) is None:
        end(turn, held, f"{held.job} gave up lease {held.epoch} after {turn.at - held.since:.3f} s")
        return
    turn.drop_frozen(held.job)
    turn.say(ReasonCode.YIELDED, f"{held.job} gave up lease {held.epoch} while it was frozen")


def revoke(turn: Turn, held: Held, why: str) -> None:
    """End the lease although not everybody gave it up."""
    turn.take_back(held, why)
    end(turn, held, f"{held.job} lost lease {held.epoch} after {turn.at - held.since:.3f} s: {why}")


def end(turn: Turn, held: Held, text: str) -> None:
    """The lock is free; the job's state stays where it is until somebody needs the room."""
    group, spent = turn.group, turn.at - held.since
    turn.group = replace(
        group,
        occupancy=Resident(job=held.job),
        held_s=group.held_s + spent if spent > 0 else group.held_s,
        # it is out of its section now, so that moving it is worth another try
        stuck=tuple([s for s in group.stuck if s.job != held.job]) if group.stuck else (),
    )
    turn.say(_OVER, text)
    if not group.waiters:
        turn.say(_DEFERRED, f"nobody waits: the state of {held.job} stays where it is")


def _holder(turn: Turn, ask: Ask, epoch: Epoch) -> Holder:
    group, at = turn.group, turn.at
    silent = ask.more or ask.final or (group.lost and is_lost(group, ask.session))
    return Holder(
        request=ask.request,
        session=ask.session,
        epoch=epoch,
        waited=at - ask.since if at > ask.since else 0.0,
        more=ask.more,
        confirmed=ask.final,
        confirm_by=None if silent else at + group.rules.confirm_timeout,
    )


def _tell(turn: Turn, held: Held, holder: Holder, reason: Reason) -> None:
    turn.effects.append(
        Grant(
            request=holder.request,
            session=holder.session,
            job=held.job,
            epoch=holder.epoch,
            restored=held.restored,
            waited=holder.waited,
            bytes_in=held.bytes_in,
            bytes_out=held.bytes_out,
            reason=reason,
            more=holder.more,
        )
    )


def _active_request(held: Held, request: RequestId) -> Holder | None:
    for holder in held.holders:
        if holder.request == request and holder.state is ACTIVE:
            return holder
    return None


def _with_holder(held: Held, holder: Holder) -> Held:
    """``holder`` in the place of the one of its request."""
    if len(held.holders) == 1:
        return replace(held, holders=(holder,))
    holders = [holder if h.request == holder.request else h for h in held.holders]
    return replace(held, holders=tuple(holders))


def _yielded(held: Held, event: ev.LeaseYielded) -> tuple[Holder, ...] | None:
    """The shares after the yield; None if it gives back none of this lease.

    A share of a request that still waits for another group is not the caller's yet, nor its to yield.
    """
    found, holders = False, list(held.holders)
    for i, holder in enumerate(held.holders):
        mine = holder.session == event.session and holder.epoch == event.epoch
        if mine and not holder.more and holder.state is ACTIVE:
            found = True
            holders[i] = replace(holder, state=_YIELDED, confirm_by=None)
    return tuple(holders) if found else None


def _rejection(group: Group, event: ev.LeaseYielded) -> Rejected:
    current = group.epoch
    data = {"group": group.id, "job": event.job, "epoch": str(event.epoch), "current_epoch": str(current)}
    held = lease_with(group, event.job)
    is_current = held is not None and event.epoch in (held.epoch, *(h.epoch for h in active(held)))
    if event.epoch <= 0 or event.epoch > current or is_current:
        return Rejected(
            fx.RefuseCode.NOT_HELD.value,
            f"{event.job} (session {event.session}) does not hold group {group.id} "
            f"under epoch {event.epoch}: acquire it before yielding it",
            **data,
        )
    return Rejected(
        fx.RefuseCode.STALE_LEASE.value,
        f"the lease {event.epoch} of {event.job} on group {group.id} is over; "
        f"the current epoch is {current}: acquire again before touching the accelerators",
        **data,
    )
