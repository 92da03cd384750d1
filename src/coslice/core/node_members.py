"""Processes of a job come, come back and go; what that means for the state that they had.

Called by ``core.context``. The rule behind all of it: a process says where its state is, and with the last
process of a job its state is gone.
"""

from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.effects import ReasonCode
from coslice.core.events import EndedProcess
from coslice.core.holdings import (
    Context,
    Effort,
    Leaving,
    Live,
    Lost,
    Member,
    Partly,
    Returning,
    Saved,
    find,
    mib,
)
from coslice.core.ids import JobId
from coslice.core.node_returning import take_back
from coslice.core.node_turn import NodeTurn, asked, evicted, lose
from coslice.core.outcome import Rejected

IN_PART = "some of it is in host memory"
LOST_KEPT = 32
"""Reasons of that many lost jobs are remembered; the oldest go first."""
ENDED_KEPT = 64
"""Ends of that many processes are remembered: the orchestrator may be away when one ends."""


def on_registered(turn: NodeTurn, event: ev.MemberRegistered) -> None:
    member = Member(
        id=event.member,
        pid=event.pid,
        start_time=event.start_time,
        bytes=event.bytes,
        need=event.need,
        parked=event.parked,
        part=event.part,
        divisible=event.divisible,
        whole=event.whole,
        unkept=event.unkept,
        common=event.common,
    )
    where = "in host memory" if event.parked else "in part" if event.part else "on the device"
    what = f"with {mib(event.bytes)} {where}"
    context = find(turn.holdings, event.job)
    if context is None or _ends_with(turn, context, event):
        turn.put(_begun(event, member))
        turn.say(ReasonCode.REGISTERED, f"process {event.pid} of {event.job} comes {what}")
        return
    if type(context.place) is Lost:  # one process starts afresh, others still are what was lost
        context = replace(
            context, place=Live(whole=False, reason=f"part of it is lost: {context.place.reason}")
        )
    known = any(m.id == member.id for m in context.members)
    members = tuple(member if m.id == member.id else m for m in context.members)
    _change(turn, _without_common(context, members if known else (*members, member)))
    verb = "is back" if known else "joins"
    turn.say(ReasonCode.REGISTERED, f"process {event.pid} of {event.job} {verb} {what}")


def _begun(event: ev.MemberRegistered, member: Member) -> Context:
    return Context(
        job=event.job,
        incarnation=event.incarnation,
        members=(member,),
        place=Saved(bytes=member.bytes)
        if member.parked
        else Live(whole=not member.part, reason=IN_PART if member.part else ""),
        use=0 if member.parked else member.bytes,
    )


def _ends_with(turn: NodeTurn, context: Context, event: ev.MemberRegistered) -> bool:
    """Does this registration replace what we have? ``Rejected`` while another start of the job runs."""
    if context.incarnation == event.incarnation:
        return type(context.place) is Lost and all(m.id == event.member for m in context.members)
    if seen := [m for m in context.members if m.seen]:
        raise Rejected(
            fx.RefuseCode.JOB_RUNNING,
            f"process {event.pid} is of another start of {event.job}, which runs as {seen[0].pid}: "
            "wait for it to end, or give this run its own job name",
            pid=str(seen[0].pid),
        )
    if type(context.place) is not Lost:
        _end(turn, context, "a new incarnation took its place")
    return True


def settled(context: Context) -> Context:
    """Where the state is follows from where the processes say theirs is, unless it is being moved, or a move
    of it ended half-way."""
    place = context.place
    if type(place) is Live:
        if not place.sure:
            return context
    elif type(place) is not Saved and type(place) is not Partly:
        return context
    all_parked, some_away, some_here = True, False, False
    for member in context.members:
        all_parked = all_parked and member.parked
        if member.parked or member.part:
            some_away = True
        else:
            some_here = True
    if all_parked:
        residual = place.residual if type(place) is Saved else 0
        return replace(context, place=Saved(bytes=context.bytes, residual=residual), use=0)
    if type(place) is Partly and not some_here:
        return context
    if some_away:
        return replace(context, place=Live(whole=False, reason=IN_PART))
    return context if type(place) is Live else replace(context, place=Live(), use=context.bytes)


def _change(turn: NodeTurn, context: Context) -> None:
    """Store a context with other members. What waited for one that is back, or gone, now goes out."""
    before = asked(turn.holdings)
    if type(context.place) is Returning and not before:
        take_back(turn, context)  # not asked for yet, and the room it needs may be another now
        return
    turn.put(settled(context))
    if not before:
        turn.effects.extend(asked(turn.holdings))


def on_resized(turn: NodeTurn, event: ev.MemberResized) -> None:
    context = find(turn.holdings, event.job)
    if context is not None:
        members = tuple(
            replace(m, bytes=event.bytes, need=event.need or m.need, unkept=event.unkept, common=event.common)
            if m.id == event.member
            else m
            for m in context.members
        )
        turn.put(_without_common(context, members))


def _without_common(context: Context, members: tuple[Member, ...]) -> Context:
    """With other members. What they have in common with others from now on, they had of their own before."""
    changed = replace(context, members=members)
    before, now = (sum(size for m in c.members for _, size in m.common) for c in (context, changed))
    if now <= before:
        return changed
    more = now - before
    return replace(changed, peak=max(0, context.peak - more), use=max(0, context.use - more))


def on_gone(turn: NodeTurn, event: ev.MemberGone) -> None:
    context = find(turn.holdings, event.job)
    gone = None if context is None else next((m for m in context.members if m.id == event.member), None)
    if context is None or gone is None:
        return
    rest = tuple(m for m in context.members if m.id != event.member)
    why = event.reason or "it exited"
    _note_ends(turn, context, (gone,))
    turn.say(ReasonCode.NODE_CHANGED, f"process {gone.pid} of {event.job} is gone ({why})")
    if rest:
        _change(turn, replace(context, members=rest))
    else:
        _end(turn, context, f"its processes are gone ({why})")


def _note_ends(turn: NodeTurn, context: Context, members: tuple[Member, ...]) -> None:
    ends = tuple(
        EndedProcess(job=context.job, incarnation=context.incarnation, pid=m.pid, start_time=m.start_time)
        for m in members
    )
    turn.set(ended=(*turn.holdings.ended, *ends)[-ENDED_KEPT:])


def _end(turn: NodeTurn, context: Context, reason: str) -> None:
    """The last process is gone, and the device is free. Only a loss that was our doing stays on record."""
    place = context.place
    match place:
        case Lost():
            turn.put(replace(context, members=(), use=0))
            return
        case Leaving():
            _left(turn, context.job)
            if place.effort is Effort.KILLING or not place.of:
                lose(turn, context, place.reason, members=False)
                return
        case Saved() | Partly() | Returning() | Live(whole=False):
            turn.say(ReasonCode.LOST, f"the state of {context.job} is lost: {reason}")
        case Live():
            pass
    turn.remove(context.job)
    turn.effects.append(fx.FreeBuffers(job=context.job, members=tuple(m.id for m in context.members)))


def _left(turn: NodeTurn, job: JobId) -> None:
    """Its way out has ended with its processes."""
    if (op := turn.holdings.running) is not None:
        turn.set(running=evicted(op, job, 0))


def on_killed(turn: NodeTurn, event: ev.JobKilled) -> None:
    """Its processes are gone, by our hand (a kill, or the end for taking more than the device has)."""
    context = find(turn.holdings, event.job)
    if context is None:
        context = Context(job=event.job, incarnation=event.incarnation, members=(), place=Live())
    elif event.incarnation and event.incarnation != context.incarnation:
        return  # news of an older start
    if type(context.place) is Lost and not context.members:
        return
    if type(context.place) is Leaving:
        _left(turn, context.job)
    _note_ends(turn, context, context.members)
    lose(turn, context, event.reason, members=False)


def on_forgotten(turn: NodeTurn, job: JobId) -> None:
    context = find(turn.holdings, job)
    if context is None:
        return
    if context.members:
        pids = ", ".join(str(m.pid) for m in context.members)
        turn.say(ReasonCode.REFUSED, f"{job} is kept: its processes still run ({pids})")
    else:
        turn.remove(job)
        turn.say(ReasonCode.FORGOTTEN, f"{job} is forgotten")


def forget_old_losses(turn: NodeTurn) -> None:
    """Called when there are more than ``LOST_KEPT`` contexts."""
    bare = [c.job for c in turn.holdings.contexts if type(c.place) is Lost and not c.members]
    for job in bare[: max(0, len(bare) - LOST_KEPT)]:
        turn.remove(job)
