"""Clients that vanish and come back. Called by ``core.group``.

A session is known from its first acquire. Its loss starts a grace: its waiters keep their places and are
passed over, its lease goes on. Only the end of the grace, a goodbye, or the word of an agent that saw the
process end, ends them.
"""

from msgspec.structs import replace

from coslice.core import events as ev
from coslice.core import lease
from coslice.core.effects import ReasonCode
from coslice.core.group_state import (
    Group,
    Held,
    HolderState,
    JobRecord,
    LostSession,
    SessionProcess,
    is_lost,
    lease_with,
)
from coslice.core.ids import SessionId
from coslice.core.turn import Turn


def lost(turn: Turn, session: SessionId) -> None:
    record = _record_of(turn, session)
    if record is None or is_lost(turn.group, session):
        return
    grace = turn.group.rules.session_grace
    deadline = turn.at + grace
    turn.set(lost=(*turn.group.lost, LostSession(session=session, deadline=deadline)))
    _set_confirmation(turn, session, None)
    turn.say(
        ReasonCode.SESSION_LOST,
        f"the connection of {record.job} (session {session}) is lost; it has {grace:g} s to return",
    )
    bury(turn)


def resumed(turn: Turn, session: SessionId) -> None:
    """Back within its grace. After the end of the grace there is nothing to resume, which is no error."""
    record = _record_of(turn, session)
    if record is not None and is_lost(turn.group, session):
        heard_from(turn, session)
        turn.say(ReasonCode.SESSION_RESUMED, f"{record.job} (session {session}) is back")
        lease.ask_again(turn, session)


def heard_from(turn: Turn, session: SessionId) -> None:
    """It is alive, whatever we believed; the clock of its unconfirmed grants starts now."""
    if is_lost(turn.group, session):
        turn.set(lost=tuple(s for s in turn.group.lost if s.session != session))
        _set_confirmation(turn, session, turn.at + turn.group.rules.confirm_timeout)


def ended(turn: Turn, session: SessionId, why: str, *, tell: bool) -> None:
    """Its waiters and leases end now. ``tell``: say so on the session, should it turn up again; not if it
    said so itself."""
    record = _record_of(turn, session)
    if record is None:
        return
    job = record.job
    turn.put_record(
        replace(
            record,
            sessions=tuple(s for s in record.sessions if s != session),
            processes=tuple(p for p in record.processes if p.session != session),
            yields=tuple(y for y in record.yields if y.session != session),
        )
    )
    turn.set(lost=tuple(s for s in turn.group.lost if s.session != session))
    asks = turn.take_asks(session=session)
    waiting = f", {len(asks)} request(s) of it are removed" if asks else ""
    code = ReasonCode.SESSION_EXPIRED if tell else ReasonCode.SESSION_ENDED  # as it should
    turn.say(code, f"session {session} of {job} is over: {why}{waiting}")
    if (held := lease_with(turn.group, job)) is not None:
        lease.settle(turn, turn.take_back(held, why, session=session, tell=tell))


def bury(turn: Turn) -> None:
    """Who is lost and known to be dead is not waited for."""
    for lost in turn.group.lost:
        if (process := known_dead(turn.group, lost.session)) is not None:
            ended(turn, lost.session, f"its process {process.pid} ended on {process.node}", tell=True)


def known_dead(group: Group, session: SessionId) -> SessionProcess | None:
    """The session's process, if the agent of its node says that it saw the end of it.

    Nobody alive is taken for dead: the agent names the very process (start of the job, pid, start time), and
    it must be the agent of the node that the session named, for pids of two nodes may be equal.
    """
    record = next((r for r in group.jobs if session in r.sessions), None)
    process = next((p for p in record.processes if p.session == session), None) if record else None
    if record is None or process is None:
        return None
    end = ev.EndedProcess(
        job=record.job, incarnation=record.incarnation, pid=process.pid, start_time=process.start_time
    )
    names = (process.node, process.node.partition(".")[0])
    seen = any(v.node in names and end in v.facts.ended for v in group.views)
    return process if seen else None


def _record_of(turn: Turn, session: SessionId) -> JobRecord | None:
    """A session speaks for one job: the client says which in its hello."""
    for record in turn.group.jobs:
        if session in record.sessions:
            return record
    return None


def _set_confirmation(turn: Turn, session: SessionId, confirm_by: float | None) -> None:
    held = turn.group.occupancy
    if type(held) is not Held:
        return
    holders = tuple(
        replace(h, confirm_by=confirm_by)
        if h.session == session and h.state is HolderState.ACTIVE and not (h.confirmed or h.more)
        else h
        for h in held.holders
    )
    turn.set(occupancy=replace(held, holders=holders))
