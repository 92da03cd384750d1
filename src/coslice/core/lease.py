"""Leases: who holds the lock, when a share of it is given back, and when the lease is over.

Called by ``core.group`` with a ``Turn``. Knows nothing of nodes or state: whoever calls ``hold`` has made
sure that the job may run.
"""

from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.effects import ReasonCode
from coslice.core.group_state import (
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


def hold(
    turn: Turn,
    waiter: Waiter,
    *,
    epoch: Epoch,
    reason: fx.Reason,
    restored: bool = False,
    bytes_in: int = 0,
    bytes_out: int = 0,
) -> None:
    """Give the lease to every process that asked in ``waiter``. Provisional until each confirms.

    One that was frozen goes on as it was; its processes know it under the epoch that they were granted.
    """
    asks = waiter.asks
    if len(asks) == 1:  # most often
        new: tuple[Holder, ...] = (_holder(turn, asks[0], epoch),)
    else:
        new = tuple([_holder(turn, ask, epoch) for ask in asks])
    frozen = frozen_lease(turn.group, waiter.job) if turn.group.frozen else None
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
    turn.group = replace(turn.group, occupancy=held)
    if frozen is not None:
        turn.thaw(held.job)
        turn.say(ReasonCode.THAWED, f"{held.job} goes on with lease {frozen.epoch}, now under epoch {epoch}")
    lost = turn.group.lost
    for holder in new:
        if not lost or not is_lost(turn.group, holder.session):
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
    others = tuple(h for h in held.holders if (h.session, h.state) != (ask.session, HolderState.GONE))
    held = replace(held, holders=(*others, holder), world=max(held.world, world))
    turn.set(occupancy=held)
    _tell(turn, held, holder, reason)


def can_join(held: Held, session: SessionId) -> bool:
    """A process that has yielded in this lease is done with it: it queues again."""
    return all(h.session != session or h.state is not HolderState.YIELDED for h in held.holders)


def repeat(turn: Turn, held: Held, holder: Holder) -> None:
    """The answer may have been lost: give it again. Nothing changes but the time to confirm."""
    if not holder.confirmed and not holder.more:
        holder = replace(holder, confirm_by=turn.at + turn.group.rules.confirm_timeout)
        held = _with_holder(turn, held, holder)
    turn.say(
        ReasonCode.REPEATED,
        f"{held.job} asked again with request {holder.request}: same grant, epoch {held.epoch}",
    )
    _tell(turn, held, holder, held.reason)


def confirm(turn: Turn, request: RequestId) -> None:
    held = turn.group.occupancy
    holder = _active_request(held, request) if type(held) is Held else None
    if type(held) is not Held or holder is None:
        turn.say(ReasonCode.STALE, f"confirmation of {request}, which is no part of a lease: ignored")
        return
    _with_holder(turn, held, replace(holder, confirmed=True, confirm_by=None, more=False))


def complete(turn: Turn, request: RequestId) -> None:
    """All groups of one request are granted: from now on the client is expected to confirm."""
    held = turn.group.occupancy
    holder = _active_request(held, request) if type(held) is Held else None
    if type(held) is not Held or holder is None or holder.confirmed:
        return
    lost = is_lost(turn.group, holder.session)
    confirm_by = None if lost else turn.at + turn.group.rules.confirm_timeout
    _with_holder(turn, held, replace(holder, more=False, confirm_by=confirm_by))


def abandon(turn: Turn, held: Held, request: RequestId) -> None:
    """The caller of one share is gone; whether it had confirmed makes no difference."""
    holder = _active_request(held, request)
    if holder is None:
        return
    held = _with_holder(turn, held, replace(holder, state=HolderState.GONE, confirm_by=None))
    settle(turn, held)


def yield_(turn: Turn, event: ev.LeaseYielded) -> None:
    """Give back one process's share, exactly once: a repeat of its last yield succeeds, changing nothing."""
    held = lease_with(turn.group, event.job)
    record = record_of(turn.group, event.job)
    holders = None if held is None else _yielded(held, event)
    if held is None or holders is None:
        if record is not None and LastYield(event.session, event.epoch) in record.yields:
            turn.say(ReasonCode.REPEATED, f"{event.job} had yielded lease {event.epoch} already")
            return
        raise _rejection(turn.group, event)
    if record is not None:
        last, yields = LastYield(event.session, event.epoch), record.yields
        if len(yields) == 1 and yields[0].session == event.session:
            yields = (last,)
        else:
            yields = (*[y for y in yields if y.session != event.session], last)
        turn.put_record(replace(record, yields=yields))
    settle(turn, replace(held, holders=holders))


def ask(turn: Turn, held: Held, why: str) -> None:
    """Every process of the lease hears that it should give way. Once in a lease."""
    waiting = [w for w in turn.group.waiters if has_live_ask(turn.group, w)]
    longest = turn.at - min([w.since for w in waiting]) if waiting else 0.0
    turn.set(occupancy=replace(held, asked=True))
    turn.say(ReasonCode.ASKED_TO_YIELD, f"{held.job} is asked to give way: {why}")
    for session, epoch in {h.session: h.epoch for h in active(held)}.items():
        turn.emit(
            fx.AskYield(
                session=session, job=held.job, epoch=epoch, waiting=len(waiting), longest_wait=longest
            )
        )


def ask_again(turn: Turn, session: SessionId) -> None:
    """It may not have heard that it should give way."""
    held = turn.group.occupancy
    share = next((h for h in active(held) if h.session == session), None) if isinstance(held, Held) else None
    if isinstance(held, Held) and share is not None and held.asked:
        turn.emit(
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
    states = [h.state for h in held.holders]
    if left := states.count(HolderState.ACTIVE):
        turn.put_lease(held)
        turn.say(
            ReasonCode.PARTLY_YIELDED, f"{held.job}: {left} more of its processes hold lease {held.epoch}"
        )
        return
    if held.world and HolderState.GONE not in states:
        record = record_of(turn.group, held.job)
        yielded = len({h.session for h in held.holders})
        if yielded < held.world and record is not None and record.sessions:
            turn.put_lease(held)
            text = f"{held.job}: {yielded} of {held.world} processes have yielded"
            turn.say(ReasonCode.PARTLY_YIELDED, text)
            return
    if frozen_lease(turn.group, held.job) is None:
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
    turn.say(ReasonCode.YIELDED, text)
    if not turn.group.waiters:
        turn.say(ReasonCode.SNAPSHOT_DEFERRED, f"nobody waits: the state of {held.job} stays where it is")


def _holder(turn: Turn, ask: Ask, epoch: Epoch) -> Holder:
    silent = ask.more or ask.final or (bool(turn.group.lost) and is_lost(turn.group, ask.session))
    return Holder(
        request=ask.request,
        session=ask.session,
        epoch=epoch,
        waited=turn.at - ask.since if turn.at > ask.since else 0.0,
        more=ask.more,
        confirmed=ask.final,
        confirm_by=None if silent else turn.at + turn.group.rules.confirm_timeout,
    )


def _tell(turn: Turn, held: Held, holder: Holder, reason: fx.Reason) -> None:
    turn.emit(
        fx.Grant(
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
        if holder.request == request and holder.state is HolderState.ACTIVE:
            return holder
    return None


def _with_holder(turn: Turn, held: Held, holder: Holder) -> Held:
    holders = held.holders
    if len(holders) == 1 and holders[0].request == holder.request:
        holders = (holder,)
    else:
        holders = tuple([holder if h.request == holder.request else h for h in holders])
    held = replace(held, holders=holders)
    turn.put_lease(held)
    return held


def _yielded(held: Held, event: ev.LeaseYielded) -> tuple[Holder, ...] | None:
    """The shares after the yield; None if it gives back none of this lease.

    A share of a request that still waits for another group is not the caller's yet, nor its to yield.
    """
    found, holders = False, list(held.holders)
    for i, holder in enumerate(held.holders):
        mine = holder.session == event.session and holder.epoch == event.epoch
        if mine and not holder.more and holder.state is HolderState.ACTIVE:
            found = True
            holders[i] = replace(holder, state=HolderState.YIELDED, confirm_by=None)
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
