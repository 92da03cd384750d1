"""Nodes out for maintenance: what an operator's drain means for the lock. Called by ``core.group``.

A drained node stays of its group, and keeps what it holds. No lease begins that would use it: who has state
or a process there keeps its place and is passed over, who has not is served by the other nodes. Its holder is
asked to give way, and finishes. Its agent may come and go: nobody waits for it, and nothing of it is given
up.
"""

from msgspec.structs import replace

from coslice.core import events as ev
from coslice.core import lease, swap
from coslice.core.effects import ReasonCode
from coslice.core.events import ContextState
from coslice.core.group_state import (
    UNASKED,
    Drained,
    Group,
    Held,
    NodeView,
    Swapping,
    active,
    drain_of,
    held_by,
    is_lost,
    view_of,
)
from coslice.core.ids import Epoch, NodeId
from coslice.core.prose import names
from coslice.core.turn import Turn


def drain(turn: Turn, event: ev.NodeDrained) -> None:
    """Said again it changes nothing."""
    group, node = turn.group, event.node
    if drain_of(group, node) is not None:
        turn.say(ReasonCode.REPEATED, f"{node} is drained already")
        return
    on = group.occupancy
    epoch = on.epoch if type(on) is Held else Epoch(0)
    drained = Drained(node=node, by=event.by, reason=event.reason, epoch=epoch)
    turn.set(drained=tuple(sorted((*group.drained, drained), key=lambda d: d.node)))
    turn.say(ReasonCode.DRAINED, f"{said(drained)}: no lease begins there until it serves again")
    view = view_of(group, node)
    if view is not None and type(on) is Swapping and not swap.freezes(turn.group, view, on.incoming):
        set_aside(turn, node)


def undrain(turn: Turn, event: ev.NodeUndrained) -> None:
    """It is as a node that comes to the group now; one that is away has ``node_loss`` seconds to come."""
    group, node = turn.group, event.node
    if drain_of(group, node) is None:
        turn.say(ReasonCode.REPEATED, f"{node} is not drained")
        return
    turn.set(drained=tuple(d for d in group.drained if d.node != node))
    turn.say(ReasonCode.UNDRAINED, f"{node} serves again, {event.by} says")
    view, on = view_of(group, node), group.occupancy
    if view is None:
        return
    if not view.attached:
        view = replace(view, detached_at=turn.at)
        turn.put_view(view)
    if type(on) is Swapping and node in on.done:
        turn.set(occupancy=replace(on, done=tuple(n for n in on.done if n != node)))
    swap.follow(turn, view, attached=True)


def ask(turn: Turn) -> None:
    """A holder that uses a drained node hears of it as soon as somebody of it can."""
    held = turn.group.occupancy
    if type(held) is not Held or held.asked:
        return
    drained = [d for d in turn.group.drained if held_by(turn.group, d.node)]
    if drained and any(not is_lost(turn.group, h.session) for h in active(held)):
        lease.ask(turn, held, names(said(d) for d in drained))


def set_aside(turn: Turn, node: NodeId) -> None:
    """The swap that is on does not wait for the node any more; what its agent is at, it may finish."""
    on = turn.group.occupancy
    if type(on) is Swapping and node in on.pending:
        pending = tuple(n for n in on.pending if n != node)
        turn.set(occupancy=replace(on, pending=pending, done=(*on.done, node)))
        swap.finish_if_done(turn)


def waited_out(group: Group, view: NodeView) -> bool:
    """A drained node that is away is no loss, unless a swap waits for it."""
    on = group.occupancy
    waits = type(on) is Swapping and view.node in on.pending
    return not waits and drain_of(group, view.node) is not None


def moving(group: Group, node: NodeId) -> bool:
    """Is its agent at work, or may somebody who holds no lease any more still compute there?

    Of what it was asked before its stream was up only its facts can tell: it may have been over long ago, or
    asked by somebody else, and nobody asks a drained node again.
    """
    view = view_of(group, node)
    if view is None or not view.attached:
        return False
    frozen = [held.job for held in group.frozen]
    return bool(view.outstanding and view.asked_at != UNASKED) or any(
        c.state in (ContextState.LEAVING, ContextState.RETURNING)
        or (c.job in frozen and c.state is ContextState.LIVE)
        for c in view.facts.contexts
    )


def said(drained: Drained) -> str:
    why = f" ({drained.reason})" if drained.reason else ""
    return f"node {drained.node} is drained by {drained.by}{why}"
