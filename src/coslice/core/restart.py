"""Coming back: what the orchestrator does with a stored group before the first event, after a stall, and
after a save that took long.

Deadlines are times on a clock that stood still, or began anew, while nobody looked. So nobody is held to
them: every grace starts afresh, and every client and agent counts as lost until it is heard of.
"""

from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import swap
from coslice.core.group_state import (
    Empty,
    Group,
    Held,
    Holder,
    HolderState,
    JobRecord,
    LostSession,
    Occupancy,
    Resident,
    Swapping,
    missing,
)
from coslice.core.policy import policy_named
from coslice.core.policy.base import Waiter


def resume(group: Group) -> tuple[fx.GroupEffect, ...]:
    """Effects to repeat after a restart. Safe to repeat: operations are named by the state."""
    return swap.commands(group)


def restarted(group: Group, now: float) -> Group:
    """The group as the new process takes it over at ``now``; places and leases are kept."""
    grace = now + group.rules.session_grace
    known = dict.fromkeys(s for record in group.jobs for s in record.sessions)
    after = replace(
        group,
        views=tuple(replace(v, attached=False, detached_at=now) for v in group.views),
        lost=tuple(LostSession(session=s, deadline=grace) for s in known),
        stuck=tuple(replace(s, retry_at=now + group.rules.stuck_retry) for s in group.stuck),
        waiters=tuple(_not_later(w, now) for w in group.waiters),
        occupancy=_restarted(group.occupancy, now),
        frozen=tuple(replace(f, since=min(f.since, now)) for f in group.frozen),
        since=min(group.since, now),
        settle_by=None,
        reserved=None,
        policy=_known(group.policy),
        jobs=tuple(_with_past(r, now) for r in group.jobs),
    )
    return replace(after, settle_by=now + group.rules.resettle) if missing(after) else after


def stalled(group: Group, now: float) -> Group:
    """After the loop stood still for long: every deadline that runs gets its full time from ``now``. None
    comes earlier than it was: after a take-over some are longer than the rules say."""
    rules, held = group.rules, group.occupancy
    if type(held) is Held:
        again = (
            replace(h, confirm_by=now + rules.confirm_timeout) if h.confirm_by is not None else h
            for h in held.holders
        )
        contended = None if held.contended_since is None else now
        held = replace(held, holders=tuple(again), contended_since=contended)
    return replace(
        group,
        views=tuple(v if v.attached else replace(v, detached_at=now) for v in group.views),
        lost=tuple(replace(s, deadline=max(s.deadline, now + rules.session_grace)) for s in group.lost),
        stuck=tuple(replace(s, retry_at=now + rules.stuck_retry) for s in group.stuck),
        occupancy=held,
        settle_by=None if group.settle_by is None else now + rules.resettle,
    )


def told_late(before: Group, group: Group, now: float) -> Group:
    """After a save that took until ``now``: who was granted by what led from ``before`` to ``group`` heard of
    it only now, and has the full time to confirm it."""
    held, was = group.occupancy, before.occupancy
    if type(held) is not Held:
        return group
    known = {h.request: h.confirm_by for h in was.holders} if type(was) is Held else {}
    by = now + group.rules.confirm_timeout
    holders = tuple(
        replace(h, confirm_by=by) if h.confirm_by is not None and h.confirm_by != known.get(h.request) else h
        for h in held.holders
    )
    return group if holders == held.holders else replace(group, occupancy=replace(held, holders=holders))


def _restarted(occupancy: Occupancy, now: float) -> Occupancy:
    match occupancy:
        case Empty() | Resident():
            return occupancy
        case Swapping(waiter=waiter):
            waiter = None if waiter is None else _not_later(waiter, now)
            return replace(occupancy, waiter=waiter, since=min(occupancy.since, now))
        case Held():
            contended = None if occupancy.contended_since is None else now
            return replace(
                occupancy,
                since=min(occupancy.since, now),
                holders=tuple(_silent(h) for h in occupancy.holders),
                contended_since=contended,
                asked=False,
            )


def _silent(holder: Holder) -> Holder:
    return replace(holder, confirm_by=None) if holder.state is HolderState.ACTIVE else holder


def _known(policy: str) -> str:
    """One that this version does not know is as if it had not been set."""
    try:
        return policy_named(policy).name and policy
    except ValueError:
        return ""


def _with_past(record: JobRecord, now: float) -> JobRecord:
    """The new clock may be far behind the old one: nothing that was can be later than now."""
    past = record.past
    if past.last_end is None:
        return record
    return replace(record, past=replace(past, last_end=min(past.last_end, now), away_since=None))


def _not_later(waiter: Waiter, now: float) -> Waiter:
    asks = tuple(replace(a, since=min(a.since, now)) for a in waiter.asks)
    return replace(waiter, asks=asks, since=min(waiter.since, now))
