"""What time alone decides: when to wake up next, and what is due then.

Called by the driver (``next_deadline``) and ``core.group``.

Deadlines act only in ``DeadlinePassed``: whatever else was queued before it (a client coming back in the very
last moment) is heard first.
"""

from msgspec.structs import replace

from coslice.core import draining, lease, membership, sessions
from coslice.core.effects import ReasonCode
from coslice.core.group_state import (
    ACTIVE,
    Group,
    Held,
    Swapping,
    active,
    contended,
    drain_of,
    has_live_ask,
    missing,
    overdue_at,
)
from coslice.core.ids import SessionId
from coslice.core.prose import names
from coslice.core.turn import Turn


def next_deadline(group: Group) -> float | None:
    """When ``DeadlinePassed`` is due if nothing else happens first, in seconds on the driver's clock."""
    due: list[float] = []
    for session in group.lost:
        if not _excused(group, session.session):
            due.append(session.deadline)
    if group.settle_by is not None:
        due.append(group.settle_by)
    held, swapping = group.occupancy, type(group.occupancy) is Swapping
    for view in group.views:
        if not view.attached:
            if not draining.waited_out(group, view):
                due.append(view.detached_at + group.rules.node_loss)
        elif swapping and (overdue := overdue_at(group, view)) is not None:
            due.append(overdue)
    if group.reserved is not None:
        due.append(group.reserved.until)
    if group.stuck and group.waiters:
        due += [stuck.retry_at for stuck in group.stuck]
    if type(held) is Held:
        for holder in held.holders:
            if holder.confirm_by is not None and holder.state is ACTIVE:
                due.append(holder.confirm_by)
        if held.contended_since is not None and (overrun := _overrun_at(group, held)) is not None:
            due.append(overrun)
        if group.waiters and not held.asked and (ask := _ask_at(group, held)) is not None:
            due.append(ask)
    if len(due) < 2:
        return due[0] if due else None
    return min(due)


def passed(turn: Turn) -> None:
    """Do everything that is due at ``turn.at``."""
    now = turn.at
    for session in turn.group.lost:
        if session.deadline <= now and not _excused(turn.group, session.session):
            grace = turn.group.rules.session_grace
            sessions.ended(turn, session.session, f"its connection was lost for {grace:g} s", tell=True)
    if turn.group.settle_by is not None and turn.group.settle_by <= now:
        away = names(w.job for w in missing(turn.group))
        turn.set(settle_by=None)
        turn.say(ReasonCode.SESSION_LOST, f"{away} did not come back after the restart: passed over for now")
    for view in turn.group.views:
        if not view.attached and view.detached_at + turn.group.rules.node_loss <= now:
            if drain_of(turn.group, view.node) is not None:
                draining.set_aside(turn, view.node)
            else:
                membership.left(turn, view.node, f"its agent was away for {turn.group.rules.node_loss:g} s")
        elif (overdue := overdue_at(turn.group, view)) is not None and overdue <= now:
            membership.hung(turn, view)
    due = [s for s in turn.group.stuck if s.retry_at <= now]
    if due and turn.group.waiters:
        turn.set(stuck=tuple(s for s in turn.group.stuck if s.retry_at > now))
        for stuck in due:
            turn.say(
                ReasonCode.RETRY,
                f"eviction of {stuck.job or f'pid {stuck.pid}'} from {stuck.node} is due again",
            )
    _unconfirmed(turn)
    _overrun(turn)
    _ask(turn)


def _unconfirmed(turn: Turn) -> None:
    held = turn.group.occupancy
    if type(held) is not Held:
        return
    late = [h for h in active(held) if h.confirm_by is not None and h.confirm_by <= turn.at]
    if not late:
        return
    for session in dict.fromkeys(h.session for h in late):
        current = turn.group.occupancy
        if type(current) is Held:
            why = f"the grant was not confirmed within {turn.group.rules.confirm_timeout:g} s"
            turn.say(ReasonCode.UNCONFIRMED, f"{held.job} (session {session}): {why}")
            lease.settle(turn, turn.take_back(current, why, session=session))


def _overrun(turn: Turn) -> None:
    held, rules = turn.group.occupancy, turn.group.rules
    due = _overrun_at(turn.group, held) if type(held) is Held else None
    if type(held) is not Held or due is None or due > turn.at:
        return
    if turn.group.drained and not contended(turn.group):
        return  # frozen, it would compute on: nobody could take its place
    why = f"{held.job} held the lock for {rules.max_hold:g} s while others waited"
    turn.say(ReasonCode.OVERRAN, f"{why} ({rules.on_overrun})")
    if rules.on_overrun == "warn":
        turn.set(occupancy=replace(held, overran=True))
        return
    if lease.can_freeze(turn.group, held):
        lease.freeze(turn, held, why)
    else:
        lease.revoke(turn, held, why)


def _excused(group: Group, session: SessionId) -> bool:
    """Is it silent because it is frozen? Whether its process lives, an agent says."""
    return any(h.session == session for held in group.frozen for h in active(held))


def _ask(turn: Turn) -> None:
    held = turn.group.occupancy
    due = _ask_at(turn.group, held) if type(held) is Held else None
    if type(held) is not Held or due is None or due > turn.at:
        return
    waiting = [w for w in turn.group.waiters if has_live_ask(turn.group, w)]
    longest = turn.at - min(w.since for w in waiting)
    lease.ask(turn, held, f"{len(waiting)} wait, {longest:.1f} s at most")


def _overrun_at(group: Group, held: Held) -> float | None:
    if held.contended_since is None or held.overran:
        return None
    rest = group.rules.max_hold - held.contended_s
    return held.contended_since + rest if rest > 0 else held.contended_since


def _ask_at(group: Group, held: Held) -> float | None:
    if held.asked or not group.waiters:
        return None
    live = [w for w in group.waiters if has_live_ask(group, w)] if group.lost else group.waiters
    if not live:
        return None
    first = live[0].since
    for waiter in live:
        if waiter.since < first:
            first = waiter.since
    return (held.since if held.since > first else first) + group.rules.quantum
