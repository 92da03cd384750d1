"""A node could not make the next job resident: whose fault is that, and what follows for each job.

Called by ``core.group``. The group goes on in every case; only the job at fault is refused.
"""

from msgspec.structs import replace

from coslice.core import events as ev
from coslice.core.effects import ReasonCode, RefuseCode
from coslice.core.group_state import ON_DEVICE, Fault, Group, Held, Stuck, Swapping, context_of, view_of
from coslice.core.ids import op_id
from coslice.core.swap import fault_job, is_pending, requeue, rest_on
from coslice.core.turn import Turn


def failed(turn: Turn, event: ev.OpFailed) -> None:
    """Find out whose fault it is. The group goes on in every case."""
    swap = turn.group.occupancy
    if type(swap) is Held and event.op == op_id(turn.group.id, swap.epoch, event.node):
        if event.culprit == swap.job:
            fault_job(turn, event.culprit, Fault(code=RefuseCode.JOB_FAULTED, reason=event.reason))
        return
    if type(swap) is not Swapping or not is_pending(turn.group, swap, event.node, event.op):
        turn.say(ReasonCode.STALE, f"{event.node} reports {event.op} failed, which nobody waits for any more")
        return
    if event.culprit == swap.incoming:
        fault_job(turn, event.culprit, Fault(code=RefuseCode.JOB_FAULTED, reason=event.reason))
        rest_on(turn, prefer=swap.outgoing)
    elif not event.culprit or (event.stuck and _still_there(turn.group, event)):
        _blocked(turn, swap, event)
    else:
        _evictee_failed(turn, swap, event)


def _blocked(turn: Turn, swap: Swapping, event: ev.OpFailed) -> None:
    stuck = Stuck(
        node=event.node,
        job=event.culprit,
        pid=event.pid,
        reason=event.reason,
        retry_at=turn.at + turn.group.rules.stuck_retry,
    )
    others = tuple(s for s in turn.group.stuck if (s.node, s.job) != (stuck.node, stuck.job))
    turn.set(stuck=(*others, stuck))
    who = event.culprit or "a process of no job we know"
    turn.say(
        ReasonCode.BLOCKED,
        f"{swap.incoming} is BLOCKED_BY({who}, pid {event.pid}) on {event.node}: {event.reason}",
    )
    rest_on(turn, prefer=event.culprit or swap.outgoing)
    if swap.waiter is not None:
        requeue(turn, swap.waiter)


def _evictee_failed(turn: Turn, swap: Swapping, event: ev.OpFailed) -> None:
    fault_job(turn, event.culprit, Fault(code=RefuseCode.JOB_FAULTED, reason=event.reason))
    rest_on(turn, prefer=swap.outgoing)
    waiter = swap.waiter
    if waiter is None:
        return
    waiter = replace(waiter, attempts=waiter.attempts + 1)
    requeue(turn, waiter)
    if waiter.attempts < turn.group.rules.max_attempts:
        turn.say(ReasonCode.RETRY, f"{waiter.job} is not at fault: its swap is tried again")
        return
    turn.refuse(
        waiter.job,
        RefuseCode.FAILED,
        f"{waiter.attempts} swaps failed by the fault of other jobs, last {event.culprit} on {event.node}: "
        f"{event.reason}; acquire again once that is solved",
    )


def _still_there(group: Group, event: ev.OpFailed) -> bool:
    """Without facts the report itself is believed."""
    view = view_of(group, event.node)
    if event.facts is None or view is None:
        return True
    context = context_of(view, event.culprit)
    return context is not None and context.state in ON_DEVICE
