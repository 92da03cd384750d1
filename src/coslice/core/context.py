"""What one node does for one group: hears commands, processes and measurements, and says what shall move.

Called by the agent's driver (and by simulator and tests) with one event at a time. This module dispatches and
hears commands, time, measurements and the backend's answers; ``core.node_members`` hears processes come and
go, ``core.node_swap`` takes the operation on with ``node_leaving`` and ``node_returning``, and
``core.holdings`` has the structs. None of them knows who holds the lock, who waits, or how bytes are moved.

    holdings = restarted(loaded, now=clock.now())
    perform(resume(holdings))
    taken = step(holdings, event)      # save taken.state, then perform taken.effects in order
"""

from typing import assert_never

from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.effects import NodeEffect, ReasonCode
from coslice.core.events import NodeEvent
from coslice.core.holdings import (
    MIB,
    TRYING,
    Context,
    Effort,
    Holdings,
    Leaving,
    Live,
    Lost,
    Member,
    NodeRules,
    Operation,
    Partly,
    Returning,
    Saved,
    find,
    in_transit,
    mib,
    placed,
)
from coslice.core.ids import MemberId
from coslice.core.node_facts import facts, same_word
from coslice.core.node_leaving import leaving_overdue, snapshot_failed
from coslice.core.node_members import (
    LOST_KEPT,
    forget_old_losses,
    on_forgotten,
    on_gone,
    on_killed,
    on_registered,
    on_resized,
    settled,
)
from coslice.core.node_returning import restore_failed, returning_overdue
from coslice.core.node_swap import advance
from coslice.core.node_turn import NodeTurn, asked, evicted
from coslice.core.outcome import Rejected, Step

__all__ = [
    "Context",
    "Holdings",
    "Member",
    "NodeRules",
    "facts",
    "find",
    "mib",
    "next_deadline",
    "restarted",
    "resume",
    "step",
]

_PUSH = fx.PushFacts()
_WHOLE = Live()
_EVICT, _RESTORE = ReasonCode.EVICT, ReasonCode.RESTORE


def step(holdings: Holdings, event: NodeEvent) -> Step[Holdings, NodeEffect]:
    """Apply one event. A stale command or a second incarnation is ``Rejected``, and nothing changed."""
    turn = NodeTurn(holdings, event.at)
    if _hear(turn, event) or in_transit(turn.holdings) is None:
        advance(turn)
    after = turn.holdings
    if after.contexts is not holdings.contexts and len(after.contexts) > LOST_KEPT:
        forget_old_losses(turn)
        after = turn.holdings
    if after is holdings or same_word(holdings, after):
        return Step(after, tuple(turn.effects), tuple(turn.reasons))
    after = replace(after, version=holdings.version + 1)
    # First, so that a report is never ahead of what it reports.
    return Step(after, (_PUSH, *turn.effects), tuple(turn.reasons))


def next_deadline(holdings: Holdings) -> float | None:
    """When ``DeadlinePassed`` is due if nothing else happens first, in seconds on the driver's clock."""
    running = holdings.running
    if running is None:
        return None
    for context in holdings.contexts:
        place = context.place
        if type(place) is Leaving or type(place) is Returning:
            return place.until
    return running.room_by


def restarted(holdings: Holdings, now: float) -> Holdings:
    """The stored holdings as a new agent process must see them: contexts kept, processes to be heard again.

    The clock may have started anew, so everything that waits gets its full time again.
    """
    rules = holdings.rules
    contexts = []
    for context in holdings.contexts:
        place = context.place
        match place:
            case Leaving(effort=Effort.KILLING):
                place = replace(place, until=now + rules.kill_timeout)
            case Leaving():
                since = None if place.stuck_since is None else now
                rest = (
                    rules.stuck_grace
                    if place.effort is Effort.PAUSING and not place.of
                    else rules.snapshot_timeout
                )
                place = replace(place, until=now + rest, stuck_since=since)
                place = replace(place, effort=Effort.TRYING) if place.of else place
            case Returning():
                place = replace(place, effort=Effort.TRYING, until=now + rules.restore_timeout)
            case Live() | Partly() | Saved() | Lost():
                pass
        members = tuple(replace(m, seen=False) for m in context.members)
        contexts.append(replace(context, members=members, place=place))
    running = holdings.running
    if running is not None:
        running = replace(
            running, begun=now, room_by=now + rules.room_wait if running.room_by is not None else None
        )
    return replace(holdings, contexts=tuple(contexts), running=running)


def resume(holdings: Holdings) -> tuple[NodeEffect, ...]:
    """What may not have been carried out before a restart. Safe to repeat: the state names the operations."""
    again: list[NodeEffect] = [] if holdings.finished is None else [holdings.finished]
    for context in holdings.contexts:
        if type(context.place) is Leaving and context.place.effort is Effort.KILLING:
            again.append(fx.KillJob(job=context.job, reason=context.place.reason))
    return (*again, *asked(holdings))


def _hear(turn: NodeTurn, event: NodeEvent) -> bool:
    """True: nobody is in transit for sure."""
    if type(event) is ev.MakeResidentCommanded:  # what happens often comes first
        return _on_command(turn, event)
    if type(event) is ev.SnapshotSucceeded:
        return _on_snapshot_succeeded(turn, event)
    if type(event) is ev.RestoreSucceeded:
        return _on_restore_succeeded(turn, event)
    if type(event) is ev.UsageMeasured:
        _on_measured(turn, event)
    elif type(event) is ev.MemberRegistered:
        on_registered(turn, event)
    elif type(event) is ev.MemberResized:
        on_resized(turn, event)
    elif type(event) is ev.MemberGone:
        on_gone(turn, event)
    elif type(event) is ev.SnapshotFailed:
        if (found := _leaving(turn, event)) is not None:
            snapshot_failed(turn, *found, event.reason, busy=event.busy, no_room=event.no_room)
    elif type(event) is ev.RestoreFailed:
        if (back := _returning(turn, event)) is not None:
            restore_failed(turn, *back, event.reason, lost=event.lost)
    elif type(event) is ev.JobKilled:
        on_killed(turn, event)
    elif type(event) is ev.JobForgotten:
        on_forgotten(turn, event.job)
    elif type(event) is ev.DeadlinePassed:
        _on_deadline(turn)
    else:
        assert_never(event)
    return False


# ── commands and time ──────────────────────────────────────────────────────


def _on_command(turn: NodeTurn, event: ev.MakeResidentCommanded) -> bool:
    held = turn.holdings
    running, queued = held.running, held.queued
    if (running is not None and running.op == event.op) or (queued is not None and queued.op == event.op):
        turn.say(ReasonCode.REPEATED, f"{event.op} is on its way")
    elif held.finished is not None and held.finished.op == event.op:
        turn.effects.append(held.finished)
        turn.say(ReasonCode.REPEATED, f"{event.op} is over; its report goes out again")
    else:
        return _take(turn, event)
    return False


def _take(turn: NodeTurn, event: ev.MakeResidentCommanded) -> bool:
    """True: it begins at once."""
    held = turn.holdings
    if event.epoch <= held.epoch:
        raise Rejected(
            fx.RefuseCode.STALE_LEASE,
            f"{event.op} is from epoch {event.epoch} and this node has seen {held.epoch}: "
            "it comes from an older orchestrator, or was overtaken",
            epoch=str(held.epoch),
        )
    if held.queued is not None:
        turn.say(ReasonCode.STALE, f"{held.queued.op} is dropped before it began: {event.op} is newer")
    begins = held.running is None
    op = Operation(
        op=event.op,
        epoch=event.epoch,
        job=event.job,
        need=event.need,
        freeze=event.freeze,
        begun=turn.at if begins else 0.0,
    )
    if held.running is None:
        turn.holdings = replace(held, epoch=event.epoch, running=op, queued=None)
    else:
        turn.holdings = replace(held, epoch=event.epoch, queued=op)
        turn.say(ReasonCode.QUEUED, f"{event.op} waits for {held.running.op}")
    return begins


def _on_deadline(turn: NodeTurn) -> None:
    moving = in_transit(turn.holdings)
    if moving is None:
        return  # a wait for room; ``advance`` looks at its end
    match moving.place:
        case Leaving() as place if turn.at >= place.until:
            leaving_overdue(turn, moving, place)
        case Returning() as back if turn.at >= back.until:
            returning_overdue(turn, moving, back)
        case _:
            pass


# ── measurements and answers of the backend ────────────────────────────────


def _on_measured(turn: NodeTurn, event: ev.UsageMeasured) -> None:
    context = find(turn.holdings, event.job)
    if context is None:
        return
    place = context.place
    if type(place) is Saved:
        if _notable(place.residual, event.bytes):
            turn.put(replace(context, place=replace(place, residual=event.bytes)))
        return
    if type(place) is Partly:
        if _notable(place.left, event.bytes):
            left = replace(place, left=max(1, event.bytes))
            turn.put(replace(context, place=left, use=event.bytes))
        return
    use = event.bytes if _notable(context.use, event.bytes) else context.use
    # One that leaves in the middle of a phase computes until it stands still.
    grows = type(place) is Live or type(place) is Leaving
    peak = max(context.peak, event.bytes) if grows else context.peak
    if (use, peak) != (context.use, context.peak):
        turn.put(replace(context, use=use, peak=peak))


def _notable(old: int, new: int) -> bool:
    """At least 1 MiB and 5 %: less is noise, and every change is stored and pushed."""
    return abs(new - old) >= max(MIB, old * 5 // 100)


def _leaving(
    turn: NodeTurn, event: ev.SnapshotSucceeded | ev.SnapshotFailed
) -> tuple[Context, Leaving] | None:
    """The context that this answer is about, unless the answer is a duplicate or comes too late."""
    context, op = find(turn.holdings, event.job), turn.holdings.running
    if context is None or op is None or op.op != event.op:
        return None
    place = context.place
    if type(place) is not Leaving or place.effort is not TRYING:
        return None
    return (context, place) if event.attempt == place.attempt or not event.attempt else None


def _returning(
    turn: NodeTurn, event: ev.RestoreSucceeded | ev.RestoreFailed
) -> tuple[Context, Returning] | None:
    context, op = find(turn.holdings, event.job), turn.holdings.running
    if context is None or op is None or op.op != event.op:
        return None
    place = context.place
    if type(place) is not Returning or place.effort is not TRYING:
        return None
    return (context, place) if event.attempt == place.attempt or not event.attempt else None


def _marked(
    context: Context, of: tuple[MemberId, ...], *, parked: bool = False, part: bool = False
) -> tuple[Member, ...]:
    members = context.members
    if len(members) == 1 and members[0].id in of:
        return (replace(members[0], parked=parked, part=part),)
    return tuple([replace(m, parked=parked, part=part) if m.id in of else m for m in members])


def _on_snapshot_succeeded(turn: NodeTurn, event: ev.SnapshotSucceeded) -> bool:
    held, found = turn.holdings, _leaving(turn, event)
    if found is None or held.running is None:
        return False
    (context, place), partly = found, event.partly
    saved = place.saved + event.bytes
    to: Saved | Partly
    if partly:
        to = Partly(saved=saved, left=max(1, event.residual))
    else:
        to = Saved(bytes=saved, residual=event.residual)
    members = _marked(context, place.of, parked=not partly, part=partly)
    context = replace(context, members=members, place=to, use=event.residual if partly else 0)
    for member in members:
        if not member.parked and not member.part:  # it joined meanwhile, and is still on the device
            context = settled(context)
            break
    op = evicted(held.running, context.job, event.bytes)
    turn.holdings = replace(held, contexts=placed(held, context), running=op)
    turn.say(
        _EVICT,
        f"{context.job} is{' partly' if partly else ''} in host memory: {mib(event.bytes)} in "
        f"{event.seconds:.2f} s, "
        f"{mib(event.residual)} stay on the device",
    )
    return True


def _on_restore_succeeded(turn: NodeTurn, event: ev.RestoreSucceeded) -> bool:
    held, found = turn.holdings, _returning(turn, event)
    op = held.running
    if found is None or op is None:
        return False
    context, place = found
    size, moved = context.bytes, event.bytes
    use = size if size > moved else moved  # of a job that was partly here, less has moved
    members = _marked(context, place.of)
    context = replace(context, members=members, place=_WHOLE, use=use)
    for member in members:
        if member.parked or member.part:  # it joined meanwhile, and is not all there
            context = settled(context)
            break
    op = replace(op, restored=True, bytes_in=op.bytes_in + moved)
    turn.holdings = replace(held, contexts=placed(held, context), running=op)
    turn.say(_RESTORE, f"{context.job} is back: {mib(moved)} in {event.seconds:.2f} s")
    return True
