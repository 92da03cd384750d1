"""What an operator may do to a group: forget a job that is over, take what one has away, delete the group.

Called by ``core.group``. Each says plainly who is affected; ``Rejected`` names what to do instead.
"""

from coslice.core import effects as fx
from coslice.core import lease, sessions
from coslice.core.effects import ReasonCode, RefuseCode
from coslice.core.events import OPERATOR, ContextState
from coslice.core.group_state import (
    Empty,
    Group,
    Held,
    frozen_lease,
    is_lost,
    lease_with,
    record_of,
    waiting,
)
from coslice.core.ids import JobId
from coslice.core.outcome import Rejected
from coslice.core.prose import names
from coslice.core.turn import Turn


def forget(turn: Turn, job: JobId) -> None:
    """Only a job that is over; whoever of it is lost for now is not expected any more."""
    group = turn.group
    record = record_of(group, job)
    known = record.sessions if record is not None else ()
    here = [s for s in known if not is_lost(group, s)]
    if here or lease_with(group, job) is not None:
        why = f"runs, with {len(here)} connected process(es)" if here else f"holds group {group.id}"
        raise Rejected(
            RefuseCode.JOB_RUNNING.value,
            f"{job} {why}: stop it first, or take its lease away with `coslice evict {job}`",
            group=group.id,
            job=job,
        )
    why = f"{job} is over, an operator says"
    for session in known:
        sessions.ended(turn, session, why, tell=True)
    turn.set(
        jobs=tuple(r for r in turn.group.jobs if r.job != job),
        stuck=tuple(s for s in turn.group.stuck if s.job != job),
    )
    turn.say(ReasonCode.FORGOTTEN, why)
    for view in turn.group.views:
        if view.attached:
            turn.effects.append(fx.ForgetJob(node=view.node, job=job))


def evict(turn: Turn, job: JobId, because: str, by: str) -> None:
    """By an operator, who may interrupt a turn; by admission only what has not begun."""
    held, group = turn.group.occupancy, turn.group
    why = f"{by} took it away{f': {because}' if because else ''}"
    holds = by == OPERATOR and type(held) is Held and held.job == job
    begun = by != OPERATOR and frozen_lease(group, job) is not None  # and goes on when its turn comes
    if not holds and (begun or all(w.job != job for w in waiting(group))):
        raise Rejected(
            RefuseCode.NOT_HELD.value,
            f"{job} neither holds group {group.id} nor waits for it: there is nothing to take away",
            group=group.id,
            job=job,
        )
    turn.say(ReasonCode.EVICTED, f"{job} gives way: {why}")
    if by == OPERATOR:
        turn.refuse(job, RefuseCode.FAILED, f"its place for group {group.id}: {why}; it may ask again")
    else:
        turn.refuse(job, RefuseCode.NOT_ADMITTED, because or why)
    if holds and type(held) is Held:
        lease.revoke(turn, held, why)


def delete(turn: Turn, because: str, *, idle: bool = False) -> None:
    """Nobody waits for it or holds it any more, and it has no node: whoever asks is told so. ``idle``: only
    if that is nobody."""
    if idle and (inside := _inside(turn.group)):
        raise Rejected(
            RefuseCode.FAILED.value, f"group {turn.group.id} is in use: {inside}", group=turn.group.id
        )
    held, name = turn.group.occupancy, turn.group.id
    why = f"group {name} was deleted{f': {because}' if because else ''}"
    turn.say(ReasonCode.DELETED, why)
    for waiter in waiting(turn.group):
        turn.refuse(waiter.job, RefuseCode.GROUP_GONE, f"{why}; ask for another group")
    if type(held) is Held:
        lease.revoke(turn, held, why)
    turn.set(
        views=(),
        occupancy=Empty(),
        jobs=(),
        lost=(),
        stuck=(),
        hung=(),
        drained=(),
        reserved=None,
        settle_by=None,
        deleted=True,
    )


def _inside(group: Group) -> str:
    """Who would miss it, in prose."""
    on, queue = group.occupancy, waiting(group)
    lost = {s.session for s in group.lost}
    here = [r.job for r in group.jobs if any(s not in lost for s in r.sessions)]
    states = {c.job for v in group.views for c in v.facts.contexts if c.state is not ContextState.LOST}
    said = [f"{on.job} holds it"] if isinstance(on, Held) else []
    said += (
        [f"{names(w.job for w in queue)} waits" if len(queue) == 1 else f"{names(w.job for w in queue)} wait"]
        if queue
        else []
    )
    said += [f"{names(here)} connected"] if here and not said else []
    said += [f"state of {names(sorted(states))} is there"] if states and not said else []
    return "; ".join(said)


__all__ = ["delete", "evict", "forget"]
