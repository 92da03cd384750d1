"""The nodes of a group and what their agents say. Called by ``core.group``.

An agent's facts are its own; this is only the copy for deciding. They are taken unread but for four things: a
faulted job that registered afresh is welcome again, an evictee that left blocks nobody any more, the resident
job may be gone, and a swap that is on may need one more command.
"""

from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core import lease, sessions, swap
from coslice.core.effects import ReasonCode, RefuseCode
from coslice.core.events import ContextFact, ContextState, NodeFacts
from coslice.core.group_state import (
    LIVE,
    ON_DEVICE,
    PARKED,
    UNASKED,
    Fault,
    Held,
    JobRecord,
    NodeView,
    Resident,
    Stuck,
    Swapping,
    context_of,
    is_on_device,
    record_of,
    view_of,
)
from coslice.core.ids import Epoch, JobId, NodeId, op_id
from coslice.core.prose import names
from coslice.core.turn import Turn


def attached(turn: Turn, event: ev.NodeAttached) -> None:
    """An agent dialled in. Its word replaces all that we believed of its node.

    One that was given up as hung is asked the same again: its answer may have been lost with the old stream.
    """
    hung = next((h for h in turn.group.hung if h.node == event.node), None)
    if hung is not None:
        turn.say(ReasonCode.RETRY, f"{event.node} is back, and is asked again for {hung.op}, which it owes")
        turn.effects.append(
            fx.MakeResident(
                op=hung.op,
                node=hung.node,
                job=hung.job,
                epoch=hung.epoch,
                need=hung.need,
                freeze=hung.freeze,
            )
        )
        return
    old, newest = view_of(turn.group, event.node), turn.group.epoch
    view = old or NodeView(node=event.node)
    view = replace(view, facts=event.facts, attached=True, asked_at=UNASKED)
    new = old is None
    if event.epoch > (newest if old is not None else 0):
        view = replace(
            view, outstanding=event.epoch
        )  # it may still be at work for somebody we do not remember
    turn.say(
        ReasonCode.NODE_ATTACHED, f"{event.node} {'joins' if new else 'is back'} with epoch {event.epoch}"
    )
    if event.epoch > newest:
        turn.set(epoch=event.epoch)
    _put(turn, view)
    _in_reach(turn, event.node)
    on = turn.group.occupancy
    if type(on) is Swapping and event.epoch > on.epoch:
        swap.rebegin(turn, on, f"{event.node} has seen epoch {event.epoch} already")
    elif type(on) is Held and event.epoch > on.epoch:
        # It would refuse a command of this lease. One that was in the group, and saw a later lease than the
        # group ever had, knows that this one ended: the store is from before (a backup).
        was_in = old is not None and old.facts != NodeFacts()  # not only said to come
        if was_in and event.epoch > newest:
            lease.revoke(turn, on, f"{event.node} has seen epoch {event.epoch}: the store is older than that")
    else:
        swap.follow(turn, view, attached=True)


def _in_reach(turn: Turn, node: NodeId) -> None:
    """Who was at fault only because this node was out of reach is welcome again."""
    for record in turn.group.jobs:
        if record.fault is not None and record.fault.node == node:
            turn.put_record(replace(record, fault=None))


def hung(turn: Turn, view: NodeView) -> None:
    """It is connected and does not finish: nobody waits for it any more, until it answers."""
    command = swap.hang(turn, view.node)
    if command is not None:
        turn.set(hung=(*turn.group.hung, command))
        took = turn.group.rules.op_timeout
        left(turn, view.node, f"it did not finish {command.op} within {took:g} s, though it is connected")


def answered(turn: Turn, event: ev.OpSucceeded | ev.OpFailed) -> bool:
    """A hung node that answers after all belongs to the group again. True: that was all that it meant.

    The lease that followed without the node goes on without it; the next swap finds it as it is then.
    """
    owed = next((h for h in turn.group.hung if (h.node, h.op) == (event.node, event.op)), None)
    if owed is None:
        return False
    turn.set(hung=tuple(h for h in turn.group.hung if h.node != event.node))
    facts, on = event.facts if event.facts is not None else NodeFacts(), turn.group.occupancy
    if type(on) is Swapping and on.epoch == owed.epoch:  # it is still what the others are at
        view = NodeView(node=owed.node, facts=facts, attached=True, outstanding=owed.epoch, asked_at=turn.at)
        _put(turn, view)
        turn.set(occupancy=replace(on, pending=(*on.pending, owed.node)))
        return False
    if type(on) is Held and on.epoch == owed.epoch:
        unsure = owed.epoch if event.facts is None else Epoch(0)
        _put(turn, NodeView(node=owed.node, facts=facts, attached=True, outstanding=unsure))
        _in_reach(turn, owed.node)
        turn.say(
            ReasonCode.STALE, f"{owed.node} answers for {owed.op} too late, and belongs to the group again"
        )
        return True
    attached(turn, ev.NodeAttached(at=turn.at, node=owed.node, epoch=owed.epoch, facts=facts))
    return False


def detached(turn: Turn, node: NodeId) -> None:
    view = view_of(turn.group, node)
    if view is None or not view.attached:
        return
    turn.put_view(replace(view, attached=False, detached_at=turn.at))
    loss = turn.group.rules.node_loss
    turn.say(
        ReasonCode.NODE_CHANGED, f"the agent of {node} is not connected; it leaves the group in {loss:g} s"
    )


def reported(turn: Turn, node: NodeId, facts: NodeFacts) -> None:
    """Keep the facts if they are newer than the ones we have (within one attachment versions only grow)."""
    view = view_of(turn.group, node)
    if view is not None:
        if facts.version >= view.facts.version:
            view = replace(view, facts=facts)
            _put(turn, view)
        swap.follow(turn, view, attached=False)


def heard(turn: Turn, event: ev.OpSucceeded | ev.OpFailed) -> None:
    """An answer to a command: what it says of its node, whose facts stand again if that was told no other.

    A failure without facts leaves it open what is on the device, so that the next grant asks the agent. A
    success without facts says that the job is loaded; whoever else was is then taken for parked, which the
    next grant to it will ask about.
    """
    group, facts = turn.group, event.facts
    view = view_of(group, event.node)
    if view is None:
        return
    last = view.outstanding
    if last and event.op == op_id(group.id, last, event.node):
        last = Epoch(0)
    if facts is not None and facts.version >= view.facts.version:
        _put(turn, replace(view, facts=facts, outstanding=last))
    elif last != view.outstanding:
        if facts is None:
            on = group.occupancy
            if type(event) is ev.OpFailed or type(on) is not Swapping or on.epoch != view.outstanding:
                return
            contexts = tuple(_assumed(c, on.incoming) for c in view.facts.contexts)
            view = replace(view, facts=replace(view.facts, contexts=contexts))
        turn.put_view(replace(view, outstanding=last))


def _assumed(context: ContextFact, loaded: JobId) -> ContextFact:
    if context.job == loaded:
        return replace(context, state=LIVE, crowded=False)
    if context.state in ON_DEVICE:
        return replace(context, state=ContextState.SAVED, crowded=False)
    return context


def changed(turn: Turn, nodes: tuple[NodeId, ...]) -> None:
    """An operator or the topology says which nodes the group has."""
    for node in turn.group.nodes:
        if node not in nodes:
            left(turn, node, "it was taken out of the group")
    turn.set(hung=tuple(h for h in turn.group.hung if h.node in nodes))
    owing = {h.node for h in turn.group.hung}
    for node in sorted(set(nodes) - owing):
        if view_of(turn.group, node) is None:
            turn.say(ReasonCode.NODE_CHANGED, f"{node} belongs to the group now; waiting for its agent")
            view = NodeView(node=node, detached_at=turn.at)
            _put(turn, view)
            swap.follow(turn, view, attached=False)


def left(turn: Turn, node: NodeId, why: str) -> None:
    """The node is no longer of the group: what it holds is out of reach, and nobody waits for it."""
    view = view_of(turn.group, node)
    if view is None:
        return
    turn.set(
        views=tuple(v for v in turn.group.views if v.node != node),
        stuck=tuple(s for s in turn.group.stuck if s.node != node),
    )
    frozen = {held.job for held in turn.group.frozen}  # told to leave the device, so they may have by now
    lost = [c for c in view.facts.contexts if c.state in PARKED or c.job in frozen]
    text = f" State of {names(c.job for c in lost)} is out of reach." if lost else ""
    turn.say(ReasonCode.NODE_LOST, f"{node} leaves the group: {why}.{text}")
    for context in lost:
        if record_of(turn.group, context.job) is None:
            turn.put_record(JobRecord(job=context.job, incarnation=context.incarnation))
        text = (
            f"its state is on {node}, which left the group ({why}); bring {node} back or start the job again"
        )
        swap.fault_job(turn, context.job, Fault(code=RefuseCode.NODE_LOST, reason=text, node=node))
    on = turn.group.occupancy
    if type(on) is Swapping:
        pending = tuple(n for n in on.pending if n != node)
        turn.set(occupancy=replace(on, pending=pending, done=tuple(n for n in on.done if n != node)))
        swap.finish_if_done(turn)
    else:
        swap.review_rest(turn, was_there=any(c.state in ON_DEVICE for c in view.facts.contexts))


def _put(turn: Turn, view: NodeView) -> None:
    rest = turn.group.occupancy
    was_there = type(rest) is Resident and is_on_device(turn.group, rest.job)
    turn.put_view(view)
    for context in view.facts.contexts:
        record = record_of(turn.group, context.job) if context.state is LIVE else None
        if record is None or record.fault is None:
            continue
        if context.incarnation and context.incarnation != record.incarnation:
            incarnation = record.incarnation if record.sessions else context.incarnation
            turn.put_record(replace(record, fault=None, incarnation=incarnation))
            turn.say(
                ReasonCode.REGISTERED, f"{context.job} registered afresh on {view.node}: its fault is cleared"
            )
    if turn.group.stuck and any(s.node == view.node for s in turn.group.stuck):
        turn.set(stuck=tuple(s for s in turn.group.stuck if s.node != view.node or _holds(view, s)))
    swap.review_rest(turn, was_there=was_there)
    sessions.bury(turn)  # before anything is asked of the node for the sake of somebody dead


def _holds(view: NodeView, stuck: Stuck) -> bool:
    if not stuck.job:
        return True  # a stray process is in nobody's facts: only another try can tell
    context = context_of(view, stuck.job)
    return context is not None and context.state in ON_DEVICE
