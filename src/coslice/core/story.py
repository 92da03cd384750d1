"""What the state of a group means, in prose. Called by status pages and ``coslice explain``.

Reads the state; decides nothing. A recorded decision carries its own text (``Reason.text``); what this module
adds is the answer to "why does this job wait *now*, and until when?".
"""

from typing import assert_never

from coslice.core.draining import said
from coslice.core.events import ContextState
from coslice.core.group_state import (
    ON_DEVICE,
    Empty,
    Group,
    Held,
    Resident,
    Swapping,
    active,
    blockers,
    context_of,
    drain_of,
    frozen_lease,
    given_up_at,
    held_by,
    held_up,
    missing,
    record_of,
    view_of,
)
from coslice.core.ids import JobId
from coslice.core.policy.base import Waiter
from coslice.core.prose import names, size


def why_waiting(group: Group, job: JobId, now: float) -> list[str]:
    """Lines that say why ``job`` has no lease at ``now`` (driver's clock), or that it has one.

    The nearest cause comes first. Every line names the jobs, nodes and figures that it is about.
    """
    record = record_of(group, job)
    if record is not None and record.fault is not None:
        return [f"{job} is refused ({record.fault.code}): {record.fault.reason}."]
    if not group.views:
        return [f"No node serves group {group.id}: start an agent that offers it."]
    held = group.occupancy
    if isinstance(held, Held) and held.job == job and not any(w.job == job for w in group.waiters):
        return [_holding(group, held, now)]
    if isinstance(held, Swapping) and held.incoming == job and held.waiter is not None:
        return [*_swapping(group, held, now), *_missing_nodes(group, now)]
    place = next((i for i, w in enumerate(group.waiters) if w.job == job), None)
    if place is None:
        return [f"{job} does not wait for {group.id}.", *describe(group, now)]
    waiter = group.waiters[place]
    lines = [_place(group, waiter, place, now)]
    if (frozen := frozen_lease(group, job)) is not None:
        lines.append(
            f"It is frozen in the middle of a phase ({frozen.phase or 'unnamed'}): it held the lock for "
            f"{group.rules.max_hold:g} s while others waited. It goes on in its turn."
        )
    if (until := given_up_at(group, (a.session for a in waiter.asks))) is not None:
        lines.append(
            f"Its connection is lost: passed over, and removed in {_left(until, now)} unless it returns."
        )
    elif group.settle_by is not None and not isinstance(held, Held | Swapping):
        ahead = [w.job for w in missing(group)]
        lines.append(
            f"The orchestrator restarted; {names(ahead)} may be about to return and keep the turn for "
            f"{_left(group.settle_by, now)}."
        )
    for stuck in blockers(group, job):
        who = stuck.job or "a process of no job we know"
        lines.append(
            f"BLOCKED_BY({who}, pid {stuck.pid}) on {stuck.node}: {stuck.reason}. "
            f"Tried again in {_left(stuck.retry_at, now)}."
        )
    if drained := held_up(group, job):
        lines.append(
            f"It waits for {names(d.node for d in drained)}, out for maintenance: it keeps its place until "
            + " and ".join(f"`coslice drain {d.node} --undo`" for d in drained)
            + "."
        )
    return [*lines, *describe(group, now)]


def describe(group: Group, now: float) -> list[str]:
    """The state of the group itself: what is on its accelerators, and who is missing."""
    match group.occupancy:
        case Empty():
            lines = ["The lock is free and nobody's state is known to be on the accelerators."]
        case Resident(job=job):
            lines = [
                f"The lock is free; the state of {job} was there last and stays while nobody needs the room."
            ]
        case Held() as held:
            lines = [_holding(group, held, now)]
        case Swapping() as swap:
            lines = _swapping(group, swap, now)
        case _:
            assert_never(group.occupancy)
    if group.reserved is not None:
        kept = group.reserved
        lines.append(f"It is kept for {kept.job} for {_left(kept.until, now)} at most: {kept.reason}.")
    return [*lines, *_drained_nodes(group), *_missing_nodes(group, now)]


def where(group: Group, job: JobId) -> list[str]:
    """Where the job's state is, node by node."""
    lines = []
    for view in group.views:
        context = context_of(view, job)
        if context is not None:
            why = f": {context.reason}" if context.reason else ""
            lines.append(f"{job} on {view.node}: {context.state}, {size(context.bytes)}{why}")
    return lines or [f"No agent of {group.id} holds state of {job}."]


def _holding(group: Group, held: Held, now: float) -> str:
    here = active(held)
    unconfirmed = sum(1 for h in here if not h.confirmed)
    parts = [f"{held.job} holds the lock for {now - held.since:.1f} s under epoch {held.epoch}"]
    if held.world:
        yielded = len({h.session for h in held.holders if h not in here})
        parts.append(f"{yielded} of its {held.world} processes have yielded")
    elif len(here) > 1:
        parts.append(f"{len(here)} of its processes have not yielded")
    if unconfirmed:
        parts.append(f"{unconfirmed} grant(s) not confirmed yet")
    if held.asked:
        parts.append("asked to give way")
    if (until := given_up_at(group, (h.session for h in here))) is not None:
        parts.append(
            f"its connection is lost, and the lease expires in {_left(until, now)} unless it returns"
        )
    return "; ".join(parts) + "."


def _swapping(group: Group, swap: Swapping, now: float) -> list[str]:
    place = f" in the place of {swap.outgoing}" if swap.outgoing else ""
    whose = "" if swap.waiter is not None else " (its callers left)"
    line = (
        f"{swap.incoming}{whose} is being made resident{place}, for {now - swap.since:.1f} s now; "
        f"epoch {swap.epoch}, waiting for {names(swap.pending)}"
    )
    details = []
    for node in swap.pending:
        view = view_of(group, node)
        moving = [c for c in view.facts.contexts if c.state in ON_DEVICE] if view is not None else []
        details += [
            f"{c.job} is {c.state} with {size(c.bytes)} on {node}{f': {c.reason}' if c.reason else ''}."
            for c in moving
            if c.state is not ContextState.LIVE
        ]
    return [f"{line}.", *details]


def _missing_nodes(group: Group, now: float) -> list[str]:
    loss = group.rules.node_loss
    return [
        f"The agent of {v.node} is not connected; it leaves the group in {_left(v.detached_at + loss, now)}."
        for v in group.views
        if not v.attached and drain_of(group, v.node) is None
    ]


def _drained_nodes(group: Group) -> list[str]:
    lines = []
    for drained in group.drained:
        if (view := view_of(group, drained.node)) is not None:
            holder = held_by(group, drained.node)
            what = f"{holder} finishes its turn there" if holder is not None else "no lease begins there"
            away = "" if view.attached else "; its agent is not connected"
            text = said(drained)
            lines.append(f"{text[0].upper()}{text[1:]}: {what}{away}.")
    return lines


def _place(group: Group, waiter: Waiter, place: int, now: float) -> str:
    ahead = names(w.job for w in group.waiters[:place])
    behind = f", behind {ahead}" if place else ", at the head of the queue"
    return f"{waiter.job} has waited for {group.id} for {now - waiter.since:.1f} s{behind}."


def _left(deadline: float, now: float) -> str:
    return f"{max(0.0, deadline - now):.1f} s"
