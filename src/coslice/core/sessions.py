"""Clients that vanish and come back. Called by ``core.group``.

A session is known from its first acquire. Its loss starts a grace: its waiters keep their places and are passed
over, its lease goes on. Only the end of the grace, or a goodbye, ends them.
"""

from msgspec.structs import replace

from coslice.core import lease
from coslice.core.effects import ReasonCode
from coslice.core.group_state import Held, HolderState, LostSession, is_lost
from coslice.core.ids import SessionId
from coslice.core.turn import Turn


def lost(turn: Turn, session: SessionId) -> None:
    job = _job_of(turn, session)
    if job is None or is_lost(turn.group, session):
        return
    deadline = turn.at + turn.group.rules.session_grace
    turn.set(lost=(*turn.group.lost, LostSession(session=session, deadline=deadline)))
    _set_confirmation(turn, session, None)
    turn.say(
        ReasonCode.SESSION_LOST,
        f"the connection of {job} (session {session}) is lost; it has {turn.group.rules.session_grace:g} s to return",
    )


def resumed(turn: Turn, session: SessionId) -> None:
    """Back within its grace. Coming after the end of the grace it finds nothing to resume, which is no error."""
    if is_lost(turn.group, session):
        heard_from(turn, session)
        turn.say(ReasonCode.SESSION_RESUMED, f"{_job_of(turn, session)} (session {session}) is back")


def heard_from(turn: Turn, session: SessionId) -> None:
    """It is alive, whatever we believed; the clock of its unconfirmed grants starts now."""
    if is_lost(turn.group, session):
        turn.set(lost=tuple(s for s in turn.group.lost if s.session != session))
        _set_confirmation(turn, session, turn.at + turn.group.rules.confirm_timeout)


def ended(turn: Turn, session: SessionId, why: str, *, tell: bool) -> None:
    """Its waiters and leases end now. ``tell``: say so on the session, should it turn up again."""
    job = _job_of(turn, session)
    if job is None:
        return
    for record in turn.group.jobs:
        if session in record.sessions:
            turn.put_record(
                replace(
                    record,
                    sessions=tuple(s for s in record.sessions if s != session),
                    yields=tuple(y for y in record.yields if y.session != session),
                )
            )
    turn.set(lost=tuple(s for s in turn.group.lost if s.session != session))
    asks = turn.take_asks(session=session)
    waiting = f", {len(asks)} request(s) of it are removed" if asks else ""
    turn.say(ReasonCode.SESSION_EXPIRED, f"session {session} of {job} is over: {why}{waiting}")
    held = turn.group.occupancy
    if not isinstance(held, Held):
        return
    if any(h.session == session and h.state is HolderState.ACTIVE for h in held.holders):
        if tell:
            turn.take_back(held, why, session=session)
        else:
            gone = (
                replace(h, state=HolderState.GONE, confirm_by=None)
                if h.session == session and h.state is HolderState.ACTIVE
                else h
                for h in held.holders
            )
            turn.set(occupancy=replace(held, holders=tuple(gone)))
    if held.job == job:
        lease.settle(turn)


def _job_of(turn: Turn, session: SessionId) -> str | None:
    return next((r.job for r in turn.group.jobs if session in r.sessions), None)


def _set_confirmation(turn: Turn, session: SessionId, confirm_by: float | None) -> None:
    held = turn.group.occupancy
    if not isinstance(held, Held):
        return
    holders = tuple(
        replace(h, confirm_by=confirm_by)
        if h.session == session and h.state is HolderState.ACTIVE and not (h.confirmed or h.more)
        else h
        for h in held.holders
    )
    turn.set(occupancy=replace(held, holders=holders))
