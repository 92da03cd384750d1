"""Changing hands: when a command to the nodes is needed, what it is called, and what their reports mean.

Called by ``core.group`` with a ``Turn``. What has to leave a node is the agent's decision; this module only
says which job shall be there, under which epoch, and waits until every node has said that it is.
"""

from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core import lease
from coslice.core.effects import ReasonCode, RefuseCode
from coslice.core.grant_reason import why_after_swap, why_without_command
from coslice.core.group_state import (
    LIVE,
    LOST,
    ON_DEVICE,
    PARKED,
    Empty,
    Fault,
    Group,
    Held,
    Hung,
    JobRecord,
    NodeView,
    Resident,
    Swapping,
    context_of,
    drain_of,
    has_live_ask,
    held_by,
    held_up,
    is_on_device,
    on_device,
    record_of,
    view_of,
    waiting,
)
from coslice.core.ids import Epoch, Incarnation, JobId, NodeId, op_id
from coslice.core.policy.base import Choice, Waiter
from coslice.core.prose import names, size
from coslice.core.turn import Turn

_BEGUN, _READY = ReasonCode.SWAP_BEGUN, ReasonCode.NODE_READY


def needs_command(group: Group, view: NodeView, job: JobId, *, last: JobId | None) -> bool:
    """Must the node's agent be asked before ``job`` may run there?

    Not if it is connected, has answered all we asked, nobody else held the lock last, and it says that the
    job is loaded or that the device is empty. (The word of an agent may be older than what the last holder
    did to the device: it may have grown so that the two fit no more. And older than what a command under way
    is doing to it.)

    A drained node is not asked, unless ``job`` holds it already: no other uses anything there. But who is
    frozen must not compute on there.
    """
    if group.drained and drain_of(group, view.node) is not None and held_by(group, view.node) != job:
        return view.attached and freezes(group, view, job)
    if not view.attached or view.outstanding or (last is not None and last != job):
        return True
    if group.frozen and freezes(group, view, job):
        return True
    context = context_of(view, job)
    if context is not None and context.state is not LOST:
        return context.state is not LIVE
    return bool([c for c in view.facts.contexts if c.state in ON_DEVICE])


def _to_freeze(group: Group, job: JobId) -> tuple[JobId, ...]:
    """Whoever is in the middle of a phase, and would go on computing beside ``job``."""
    return tuple([held.job for held in group.frozen if held.job != job]) if group.frozen else ()


def freezes(group: Group, view: NodeView, job: JobId) -> bool:
    """Is somebody on the device there who must stand still before ``job`` runs?"""
    others = _to_freeze(group, job)
    return any(c.job in others and c.state in ON_DEVICE for c in view.facts.contexts)


def begin(turn: Turn, choice: Choice, last: JobId | None) -> None:
    """The lock is free, of ``last``, and ``choice`` is next: a lease at once if nothing must move, else a
    swap."""
    waiter, group = choice.waiter, turn.group
    epoch, queue = Epoch(group.epoch + 1), group.waiters
    first = queue[0] is waiter  # a job has one place
    waiters = queue[1:] if first else tuple([w for w in queue if w.job != waiter.job])
    told, rest = [], []
    for view in group.views:
        if needs_command(group, view, waiter.job, last=last):
            told.append(view.node)
        else:
            rest.append(view.node)
    pending = tuple(told)
    if not pending:
        turn.group = replace(group, epoch=epoch, waiters=waiters)
        reason = why_without_command(turn.group, waiter.job, last)
        turn.say(reason.code, f"{reason.text} ({choice.reason})")
        lease.hold(turn, waiter, epoch=epoch, reason=reason)
        return
    swap = Swapping(
        incoming=waiter.job,
        waiter=waiter,
        epoch=epoch,
        since=turn.at,
        pending=pending,
        done=tuple(rest),
        outgoing=last if last != waiter.job else None,
        need=waiter.need,
    )
    turn.group = replace(group, epoch=epoch, waiters=waiters, occupancy=swap)
    over = f", after {swap.outgoing}" if swap.outgoing else ""
    turn.say(
        _BEGUN,
        f"{waiter.job} is next{over} ({choice.reason}): to be resident on {names(pending)}, epoch {epoch}",
    )
    _command(turn, swap, pending)


def rebegin(turn: Turn, swap: Swapping, why: str) -> None:
    """The same swap under a new epoch, asked of every node that is not known to be right already."""
    epoch = Epoch(turn.group.epoch + 1)
    pending = tuple(
        v.node
        for v in turn.group.views
        if v.node in swap.pending or needs_command(turn.group, v, swap.incoming, last=swap.outgoing)
    )
    done = tuple(n for n in turn.group.nodes if n not in pending)
    swap = replace(swap, epoch=epoch, pending=pending, done=done)
    turn.set(epoch=epoch, occupancy=swap)
    turn.say(ReasonCode.RETRY, f"swap to {swap.incoming} begins again under epoch {epoch}: {why}")
    _command(turn, swap, pending)


def hang(turn: Turn, node: NodeId) -> Hung | None:
    """The command that a node of the running swap does not answer."""
    swap = turn.group.occupancy
    if type(swap) is not Swapping:
        return None
    told = _make_resident(turn.group, swap, node)
    return Hung(op=told.op, node=node, job=told.job, epoch=told.epoch, need=told.need, freeze=told.freeze)


def commands(group: Group) -> tuple[fx.MakeResident, ...]:
    """What the nodes of a running swap were told. Harmless to repeat: each operation has a derived name."""
    swap = group.occupancy
    return tuple(_make_resident(group, swap, n) for n in swap.pending) if type(swap) is Swapping else ()


def succeeded(turn: Turn, event: ev.OpSucceeded) -> None:
    swap = turn.group.occupancy
    if type(swap) is not Swapping or not is_pending(turn.group, swap, event.node, event.op):
        turn.say(ReasonCode.STALE, f"{event.node} reports {event.op} done, which nobody waits for any more")
        return
    if _is_parked(turn.group, event.node, swap.incoming):
        # An old report, said again after a restart: the operation's name is used up, so it takes a new one.
        rebegin(turn, swap, f"{event.node} had it loaded, and says that it is not any more")
        return
    group, node, moved_in, moved_out = turn.group, event.node, event.bytes_in, event.bytes_out
    swap = replace(
        swap,
        pending=() if len(swap.pending) == 1 else tuple([n for n in swap.pending if n != node]),
        done=(*swap.done, node),
        restored=swap.restored or event.restored,
        bytes_in=swap.bytes_in + moved_in,
        bytes_out=swap.bytes_out + moved_out,
        notes=(*swap.notes, f"{node}: {event.reason}") if event.reason else swap.notes,
    )
    turn.group = replace(group, occupancy=swap, bytes_moved=group.bytes_moved + moved_in + moved_out)
    turn.say(
        _READY,
        f"{swap.incoming} is resident on {node}: "
        f"{size(moved_out)} out, {size(moved_in)} in, {event.seconds:.3f} s"
        f"{f' ({event.reason})' if event.reason else ''}",
    )
    if not swap.pending:
        finish_if_done(turn)


def _is_parked(group: Group, node: NodeId, job: JobId) -> bool:
    view = view_of(group, node)
    context = context_of(view, job) if view is not None else None
    return context is not None and context.state in PARKED


def finish_if_done(turn: Turn) -> None:
    """Every node has reported: the lease goes to whoever of the incoming job is still there."""
    swap = turn.group.occupancy
    if type(swap) is Swapping and not swap.pending:
        fault_lost(turn)
        swap = turn.group.occupancy
    if type(swap) is not Swapping or swap.pending:
        return
    group, waiter = turn.group, swap.waiter
    moved = swap.restored or swap.bytes_in or swap.bytes_out
    swaps = group.swaps + 1 if moved else group.swaps
    turn.group = group = replace(group, occupancy=Resident(job=swap.incoming), swaps=swaps)
    if waiter is None:
        turn.say(
            ReasonCode.ABANDONED, f"{swap.incoming} is resident, but its callers left: the lock stays free"
        )
        return
    if not group.views:
        requeue(turn, waiter)  # to be refused: the last node is gone
        return
    if group.drained and (drained := held_up(group, swap.incoming)):
        requeue(turn, waiter)
        nodes = names(d.node for d in drained) + (" is" if len(drained) == 1 else " are")
        turn.say(ReasonCode.DRAINED, f"{swap.incoming} keeps its place at the head: {nodes} drained")
        return
    if group.lost and not has_live_ask(group, waiter):
        requeue(turn, waiter)
        turn.say(
            ReasonCode.SESSION_LOST, f"{swap.incoming} is resident but not connected: passed over for now"
        )
        return
    reason = why_after_swap(group, swap)
    turn.reasons.append(reason)
    lease.hold(
        turn,
        waiter,
        epoch=swap.epoch,
        reason=reason,
        restored=swap.restored,
        bytes_in=swap.bytes_in,
        bytes_out=swap.bytes_out,
    )


def fault_lost(turn: Turn) -> None:
    """Whoever waits, and whose living processes wait for a state that is lost, is refused.

    The report of the loss may have come too late to be anybody's answer, or not at all; the facts say it too.
    Loaded again, such a job would start afresh as far as its agent knows, and go on without its state. One
    whose processes have ended is another matter: it does start afresh.
    """
    group = turn.group
    if not group.waiters and type(group.occupancy) is not Swapping:
        return
    lost = []
    for view in group.views:
        for context in view.facts.contexts:
            if context.state is LOST and context.pids:
                lost.append((view.node, context))
    if not lost:
        return
    for waiter in waiting(group):
        for node, context in lost:
            if (context.job, context.incarnation) == (waiter.job, waiter.incarnation):
                reason = f"its state on {node} is lost: {context.reason or 'no reason given'}"
                fault_job(turn, waiter.job, Fault(code=RefuseCode.JOB_FAULTED, reason=reason))
                break


def fault_job(turn: Turn, job: JobId, fault: Fault) -> None:
    """The job's own trouble: its requests are refused, its lease ends. Nobody else is affected."""
    record = record_of(turn.group, job) or JobRecord(job=job, incarnation=_incarnation_seen(turn.group, job))
    turn.put_record(replace(record, fault=fault))
    turn.say(ReasonCode.JOB_FAULTED, f"{job} is refused until it registers again: {fault.reason}")
    turn.refuse(job, fault.code, fault.reason)
    held = turn.group.occupancy
    if type(held) is Held and held.job == job:
        lease.revoke(turn, held, fault.reason)


def requeue(turn: Turn, waiter: Waiter) -> None:
    """Back to the head of the queue, where it was."""
    turn.set(waiters=(waiter, *turn.group.waiters))


def follow(turn: Turn, view: NodeView, *, attached: bool) -> None:
    """A node's facts changed: does the swap or the lease that is on need a command to it?

    ``attached``: its agent just connected, so whatever was sent before may not have arrived. A node that
    comes back in the middle of a lease is made right under that lease; the holder is not stopped meanwhile.
    """
    swap, node = turn.group.occupancy, view.node
    if type(swap) is Held:
        if attached and needs_command(turn.group, view, swap.job, last=swap.job):
            _command(turn, swap, (node,))
        return
    if type(swap) is not Swapping:
        return
    if node in swap.pending:
        if attached:
            _command(turn, swap, (node,))
        return
    context = context_of(view, swap.incoming)
    parked = context is not None and context.state in PARKED and drain_of(turn.group, node) is None
    asked = node not in swap.done and needs_command(turn.group, view, swap.incoming, last=swap.outgoing)
    if parked or asked:
        nodes = tuple(n for n in turn.group.nodes if n in swap.pending or n == node)
        swap = replace(swap, pending=nodes, done=tuple(n for n in swap.done if n != node))
        turn.set(occupancy=swap)
        _command(turn, swap, (node,))
    elif node not in swap.done:
        turn.set(occupancy=replace(swap, done=(*swap.done, node)))


def review_rest(turn: Turn, *, was_there: bool) -> None:
    """With the lock free, say whose state is on the accelerators as far as the agents' facts tell.

    ``was_there``: the resident job's state had been seen on a device before the facts changed.
    """
    rest = turn.group.occupancy
    if type(rest) is Empty or (
        type(rest) is Resident and was_there and not is_on_device(turn.group, rest.job)
    ):
        rest_on(turn, prefer=None)


def rest_on(turn: Turn, *, prefer: JobId | None) -> None:
    there = [c.job for _, c in on_device(turn.group)]
    parked = prefer is not None and any(c.job == prefer for v in turn.group.views for c in v.facts.contexts)
    job = prefer if prefer in there or not (there or parked) else next(iter(there), None)
    turn.set(occupancy=Empty() if job is None else Resident(job=job))


def _incarnation_seen(group: Group, job: JobId) -> Incarnation:
    found = (c.incarnation for v in group.views for c in v.facts.contexts if c.job == job)
    return next(found, Incarnation(""))


def is_pending(group: Group, swap: Swapping, node: NodeId, op: str) -> bool:
    return node in swap.pending and op == op_id(group.id, swap.epoch, node)


def _command(turn: Turn, now: Swapping | Held, nodes: tuple[NodeId, ...]) -> None:
    """Tell those of ``nodes`` that are connected; the others are told when they attach."""
    group = turn.group
    for view in group.views:
        if view.attached and view.node in nodes:
            turn.put_view(replace(view, outstanding=now.epoch, asked_at=turn.at))
            turn.effects.append(_make_resident(group, now, view.node))


def _make_resident(group: Group, now: Swapping | Held, node: NodeId) -> fx.MakeResident:
    if type(now) is Swapping:
        job, need = now.incoming, now.need
    else:
        record = record_of(group, now.job)
        job, need = now.job, record.need if record is not None else 0
    return fx.MakeResident(
        op=op_id(group.id, now.epoch, node),
        node=node,
        job=job,
        epoch=now.epoch,
        need=need,
        freeze=_to_freeze(group, job),
    )
