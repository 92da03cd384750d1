"""The letters of the exploration: what each does to the world."""

from collections.abc import Callable

from coslice.core import events as ev
from coslice.core.ids import JobId, NodeId
from coslice.proof import wire
from coslice.proof.client import Client
from coslice.proof.explored import GROUP, SIZE, Explored, Move
from coslice.proof.moves import DIES, DOUBLED
from coslice.proof.node import Node
from coslice.proof.served import Served


def follow(state: Explored, move: Move) -> Explored:
    """The state once the move and all that follows by itself have happened; ``state`` stays as it is."""
    new = state.spent(move)
    asks = {s: c.ask for s, c in state.world.clients.items() if c.ask is not None}
    _DO[move.letter](new, move)
    new.settle()
    for session, client in new.world.clients.items():
        if session in asks and client.ask != asks[session]:
            new.answered = True
    return new


def _acquire(state: Explored, move: Move) -> None:
    client = state.client(move.who)
    jobs = state.world.setup.jobs
    state.left = tuple(n - (j == move.who) for n, j in zip(state.left, jobs, strict=True))
    state.world.client_says(client, client.acquire((GROUP,), state.world.setup.need))


def _acquire_twice(state: Explored, move: Move) -> None:
    client = state.client(move.who)
    assert client.ask is not None
    again = wire.Acquire(client.ask.request, client.ask.groups, client.ask.need)
    state.world.client_says(client, [again])


def _client_hears(state: Explored, move: Move) -> None:
    """A grant is used at once: where the job has no process yet, it starts one and fills it."""
    client, world = state.client(move.who), state.world
    size = world.setup.need or SIZE
    world.tell_client(client)
    for node in world.nodes.values():
        served = node.served[GROUP]
        current = client.inside and world.is_current(client, GROUP)
        if current and not served.device.of(client.job) and served.room() >= size:
            world.begin(client, node, GROUP, size)


def _yield(state: Explored, move: Move) -> None:
    state.world.leave(state.client(move.who))


def _yield_lost(state: Explored, move: Move) -> None:
    client = state.client(move.who)
    state.world.leave(client)
    client.stream.cut()


def _cancel(state: Explored, move: Move) -> None:
    client = state.client(move.who)
    state.world.client_says(client, client.cancel())


def _break_client(state: Explored, move: Move) -> None:
    state.client(move.who).stream.cut()


def _client_returns(state: Explored, move: Move) -> None:
    state.world.dial(state.client(move.who))


def _client_missed(state: Explored, move: Move) -> None:
    state.world.notice_client(next(s for s in state.world.unnoticed() if s.startswith(f"{move.who}.")))


def _job_dies(state: Explored, move: Move) -> None:
    _client_dies(state, state.client(move.who))
    state.bury(JobId(move.who))


def _client_dies(state: Explored, client: Client) -> None:
    """The system ends the streams of a process that dies, so that is noticed at once (if one was there)."""
    state.world.die(client)
    if client.session in state.world.unnoticed():
        state.world.notice_client(client.session)


def _agent_returns(state: Explored, move: Move) -> None:
    state.world.attach(state.node(move.who)[0])


def _agent_missed(state: Explored, move: Move) -> None:
    state.world.notice_node(NodeId(move.who))


def _doubled(state: Explored, move: Move) -> None:
    state.echo = None
    state.world.hear_node(state.node(move.who)[0])


def _command(state: Explored, move: Move) -> None:
    node, served = state.node(move.who)
    told = node.stream.down[0]
    assert isinstance(told, wire.Told)
    if move.letter == "command heard":
        del node.stream.down[0]
    node.take(told)
    _said(state, node, served, move)


def _said(state: Explored, node: Node, served: Served, move: Move) -> None:
    """A step of an agent is done and saved; now it says so, unless it dies first."""
    if move.how == DIES:
        served.check()
        _agent_killed(state, move)
        return
    before = len(node.stream.back)
    state.world.after_node(node, GROUP)
    if move.how == DOUBLED and len(node.stream.back) > before:
        node.stream.back.insert(0, node.stream.back[-1])
        state.echo = node.name


def _break_agent(state: Explored, move: Move) -> None:
    state.node(move.who)[0].stream.cut()


def _move(state: Explored, move: Move) -> None:
    node, served = state.node(move.who)
    assert served.asked is not None
    how = "ok" if move.how in ("", DIES, DOUBLED) else move.how
    if how == "never":
        state.stubborn = (*state.stubborn, (node.name, served.asked.job))
        how = "fails"
    served.finish(how, inside=state.world.inside(GROUP, served.asked.job))
    _said(state, node, served, move)


def _time_passes(state: Explored, move: Move) -> None:
    node, served = state.node(move.who)
    assert served.due is not None
    served.at = max(served.at, served.due)
    served.wake()
    state.world.after_node(node, GROUP)


def _processes_killed(state: Explored, move: Move) -> None:
    """With one of its processes the whole job dies."""
    node, served = state.node(move.who)
    job = served.kills.pop(0)
    served.killed(job, "killed by the agent")
    client = next((c for c in state.world.clients.values() if c.job == job), None)
    if client is not None:
        _client_dies(state, client)
    state.bury(job)
    state.world.after_node(node, GROUP)


def _learns(state: Explored, move: Move) -> None:
    node, served = state.node(move.who)
    served.learn(move.index)
    state.world.after_node(node, GROUP)


def _process_returns(state: Explored, move: Move) -> None:
    node, served = state.node(move.who)
    state.world.process_returns(node, served, served.unseen()[move.index])
    state.world.after_node(node, GROUP)


def _agent_killed(state: Explored, move: Move) -> None:
    node, _ = state.node(move.who)
    node.crash()
    if node.name in state.world.unnoticed_nodes():
        state.world.notice_node(node.name)
    node.start(0.0)
    node.publish()


def _orchestrator_killed(state: Explored, move: Move) -> None:
    state.world.crash_orchestrator()


def _node_drained(state: Explored, move: Move) -> None:
    _operator(state, ev.NodeDrained(at=state.world.shell.at, node=NodeId(move.who)))


def _node_undrained(state: Explored, move: Move) -> None:
    _operator(state, ev.NodeUndrained(at=state.world.shell.at, node=NodeId(move.who)))


def _operator(state: Explored, event: ev.GroupEvent) -> None:
    state.world.shell.operator_says(GROUP, event)
    state.world.flush()


def _grace_ends(state: Explored, move: Move) -> None:
    state.expire(move.who)


def _not_confirmed(state: Explored, move: Move) -> None:
    state.unconfirmed()


def _overruns(state: Explored, move: Move) -> None:
    state.overrun()


def _settling_ends(state: Explored, move: Move) -> None:
    state.settled()


_DO: dict[str, Callable[[Explored, Move], None]] = {
    "acquire": _acquire,
    "acquire twice": _acquire_twice,
    "client hears": _client_hears,
    "yield": _yield,
    "yield, answer lost": _yield_lost,
    "cancel": _cancel,
    "client stream breaks": _break_client,
    "client returns": _client_returns,
    "client missed": _client_missed,
    "job dies": _job_dies,
    "agent returns": _agent_returns,
    "agent missed": _agent_missed,
    "doubled word heard": _doubled,
    "command heard": _command,
    "command twice": _command,
    "agent stream breaks": _break_agent,
    "move ends": _move,
    "move fails": _move,
    "agent's time passes": _time_passes,
    "processes killed": _processes_killed,
    "agent learns": _learns,
    "process returns": _process_returns,
    "agent killed": _agent_killed,
    "orchestrator killed": _orchestrator_killed,
    "node drained": _node_drained,
    "node serves again": _node_undrained,
    "grace ends": _grace_ends,
    "not confirmed": _not_confirmed,
    "holder overruns": _overruns,
    "settling ends": _settling_ends,
}
LETTERS = tuple(_DO)
