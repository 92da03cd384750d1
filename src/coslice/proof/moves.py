"""The letters that can come next in a state of the exploration."""

from collections.abc import Iterator

from coslice.core.effects import RunRestore, RunSnapshot
from coslice.core.group import Held
from coslice.core.group_state import active, drain_of, frozen_lease
from coslice.core.holdings import Effort, Leaving, in_transit
from coslice.core.ids import JobId, NodeId
from coslice.proof.explored import GROUP, Budget, Explored, Move
from coslice.proof.node import Node
from coslice.proof.served import Served

DIES, DOUBLED = "and dies over it", "and its word is doubled"
_OUT = ("fails", "half", "silent", "never")
_IN = ("fails", "half", "lost", "silent")


def moves(state: Explored) -> Iterator[Move]:
    yield from _of_clients(state)
    for node in state.world.nodes.values():
        yield from _of_node(state, node)
    if state.budget.has("crashes"):
        yield Move("orchestrator killed", trouble="crashes")
    yield from _of_time(state)


def _of_clients(state: Explored) -> Iterator[Move]:
    budget = state.budget
    for job, left in zip(state.world.setup.jobs, state.left, strict=True):
        client = next((c for c in state.world.clients.values() if c.job == job), None)
        if client is None:
            continue
        there = client.stream.live
        if not there:
            yield Move("client returns", job)
        elif client.ask is None and not client.inside and left > 0 and not client.givings:
            yield Move("acquire", job)
        if client.stream.down:
            yield Move("client hears", job)
        if client.inside:
            yield Move("yield", job)
            if there and budget.has("losses"):
                yield Move("yield, answer lost", job, trouble="losses")
        if client.ask is not None and budget.has("cancels"):
            yield Move("cancel", job, trouble="cancels")
        if there and client.ask is not None and budget.has("doubles"):
            yield Move("acquire twice", job, trouble="doubles")
        if there and budget.has("losses") and (client.inside or client.ask is not None):
            yield Move("client stream breaks", job, trouble="losses")
        if budget.has("deaths"):
            yield Move("job dies", job, trouble="deaths")
    for session in state.world.unnoticed():
        yield Move("client missed", session.split(".")[0])


def _of_node(state: Explored, node: Node) -> Iterator[Move]:
    budget, served, stream = state.budget, node.served[GROUP], node.stream
    if not stream.live:
        yield Move("agent returns", node.name)
    if node.name in state.world.unnoticed_nodes():
        yield Move("agent missed", node.name)
    if state.echo == node.name:
        yield Move("doubled word heard", node.name)
    if drain_of(state.world.shell.locks[GROUP], node.name) is not None:
        yield Move("node serves again", node.name)
    elif budget.has("drains"):
        yield Move("node drained", node.name, trouble="drains")
    yield from _own(state, node, served)
    if stream.live and budget.has("losses") and (stream.down or served.holdings.running):
        yield Move("agent stream breaks", node.name, trouble="losses")
    if budget.has("crashes"):
        yield Move("agent killed", node.name, trouble="crashes")


def _own(state: Explored, node: Node, served: Served) -> Iterator[Move]:
    """The steps of the agent itself."""
    budget, name = state.budget, node.name
    if node.stream.down:
        yield Move("command heard", name)
        yield from _variants(budget, "command heard", name)
        if budget.has("doubles"):
            yield Move("command twice", name, trouble="doubles")
    if served.asked is not None:
        yield from _move_ends(state, name, served.asked)
    elif _time_may_pass(served):
        yield Move("agent's time passes", name)
    if served.kills:
        yield Move("processes killed", name)
    for index in range(len(served.news)):
        yield Move("agent learns", name, index)
    for index in range(len(served.unseen())):
        yield Move("process returns", name, index)


def _move_ends(state: Explored, name: NodeId, asked: RunSnapshot | RunRestore) -> Iterator[Move]:
    out = isinstance(asked, RunSnapshot)
    if out and (name, asked.job) in state.stubborn:
        yield Move("move ends", name, how="fails")
        return
    yield Move("move ends", name)
    yield from _variants(state.budget, "move ends", name)
    if state.budget.has("failures"):
        for how in _OUT if out else _IN:
            yield Move("move fails", name, how=how, trouble="failures")


def _variants(budget: Budget, letter: str, name: NodeId) -> Iterator[Move]:
    """The agent dies over a step before it can say so, or what it says arrives once more, later."""
    if budget.has("crashes"):
        yield Move(letter, name, how=DIES, trouble="crashes")
    if budget.has("doubles"):
        yield Move(letter, name, how=DOUBLED, trouble="doubles")


def _time_may_pass(served: Served) -> bool:
    """A pause may end, or a move go on too long; a kill, and a process that is to return, take no time."""
    if served.due is None or served.kills or served.unseen():
        return False
    moving = in_transit(served.holdings)
    kills = moving is not None and isinstance(moving.place, Leaving) and moving.place.effort is Effort.KILLING
    return not (kills and served.news)


def _of_time(state: Explored) -> Iterator[Move]:
    group = state.world.shell.locks[GROUP]
    for lost in group.lost:
        job = lost.session.split(".")[0]
        if frozen_lease(group, JobId(job)) is not None:
            continue  # its silence is not counted
        if lost.session not in state.world.clients:
            yield Move("grace ends", job)
        elif state.budget.has("delays"):
            yield Move("grace ends", job, trouble="delays")
    if group.settle_by is not None:
        yield Move("settling ends")
    held = group.occupancy
    if isinstance(held, Held) and held.contended_since is not None and state.budget.has("overruns"):
        yield Move("holder overruns", trouble="overruns")
    if isinstance(held, Held) and any(h.confirm_by is not None for h in active(held)):
        mine = [h.session for h in active(held) if h.confirm_by is not None]
        if any(s not in state.world.clients for s in mine):
            yield Move("not confirmed")
        elif state.budget.has("delays"):
            yield Move("not confirmed", trouble="delays")
