"""The letters of the exploration: what can happen in a state, and what it costs of the run's troubles.

A small world on purpose: one group, jobs of one client and one process a node, each taking more than half of
a device, so that every hand-over moves state. Each run may have so much trouble as ``Budget`` says.
"""

from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from coslice.core import events as ev
from coslice.core.context import NodeRules
from coslice.core.effects import RunRestore, RunSnapshot
from coslice.core.group import GroupRules, Held
from coslice.core.group_state import active, drain_of, frozen_lease
from coslice.core.holdings import Effort, Leaving, in_transit
from coslice.core.ids import GroupId, JobId, NodeId
from coslice.sim import wire
from coslice.sim.canon import Key, Known, key_of, named_key_of
from coslice.sim.client import Client
from coslice.sim.device import MIB
from coslice.sim.joint import Setup, World
from coslice.sim.node import Node, Served
from coslice.sim.story import Silence

GROUP = GroupId("g")
SIZE, CAPACITY = 60 * MIB, 100 * MIB
FAR = 1e9
DIES, DOUBLED = "and dies over it", "and its word is doubled"
_OUT = ("fails", "half", "silent", "never")
_IN = ("fails", "half", "lost", "silent")
TRIVIAL = (wire.Welcome, wire.Yielded, wire.ShouldYield, wire.Refused, wire.Rejected)


KINDS = ("crashes", "failures", "losses", "doubles", "cancels", "deaths", "delays", "overruns", "drains")


class Budget(Struct, frozen=True):
    """How much trouble is left for a run: of each kind, and all together.

    Two in one run must be of the kinds named in ``pairs``; any other is the only one of its run.
    """

    together: int = 2
    pairs: tuple[str, ...] = KINDS
    crashes: int = 1
    failures: int = 1
    losses: int = 1
    doubles: int = 1
    cancels: int = 1
    deaths: int = 1
    delays: int = 1
    overruns: int = 1
    drains: int = 1

    def spend(self, kind: str) -> "Budget":
        rest = self.together - 1 if kind in self.pairs else 0
        return replace(self, together=rest, **{kind: getattr(self, kind) - 1})

    def has(self, kind: str) -> bool:
        if self.together <= 0 or getattr(self, kind) <= 0:
            return False
        spent = any(getattr(self, k) != getattr(FULL, k) for k in self.pairs)
        return not spent or kind in self.pairs

    def numbers(self) -> tuple[int, ...]:
        return (self.together, *(getattr(self, kind) for kind in KINDS)) if self.together else (0,)


FULL = Budget()


class Move(Struct, frozen=True):
    letter: str
    who: str = ""
    index: int = 0
    how: str = ""
    trouble: str = ""
    """Of which kind, if it is trouble: it is paid for, and no part of the way to an answer."""

    @property
    def name(self) -> str:
        return " ".join(text for text in (self.letter, self.who, self.how) if text)


def setup(nodes: int, jobs: int, *, whole: bool = False, need: int = 0) -> Setup:
    names = tuple(JobId(f"j{i}") for i in range(jobs))
    return Setup(
        groups=(GROUP,),
        nodes=tuple(NodeId(f"n{i}") for i in range(nodes)),
        jobs=names,
        whole=frozenset(names if whole else ()),
        need=need,
        rules=GroupRules(
            node_loss=FAR,
            op_timeout=FAR,
            max_hold=FAR,
            quantum=FAR,
            session_grace=100.0,
            confirm_timeout=50.0,
        ),
        node_rules=NodeRules(retries=0, stuck_grace=10.0, stuck_pause=5.0),
        capacity=CAPACITY,
        instant=True,
    )


class Explored:
    """A world, and what its run may still do."""

    __slots__ = ("answered", "budget", "echo", "left", "stubborn", "world")

    def __init__(self, world: World, left: tuple[int, ...], budget: Budget) -> None:
        self.world, self.left, self.budget = world, left, budget
        self.stubborn: tuple[tuple[NodeId, JobId], ...] = ()
        """Who cannot be moved out of which node, however often it is tried."""
        self.echo: NodeId | None = None
        """Whose last word is on its way a second time (the first message of its stream)."""
        self.answered = False
        """The last move answered somebody who waited."""

    @classmethod
    def begin(
        cls, *, nodes: int, jobs: int, acquires: int, budget: Budget, whole: bool = False, need: int = 0
    ) -> "Explored":
        """``whole``: the jobs' processes can be frozen in the middle of a phase. ``need``: bytes that each
        takes, and declares, on a device; 0: ``SIZE``, undeclared."""
        world = World(setup(nodes, jobs, whole=whole, need=need), Silence())
        for node in world.nodes.values():
            world.attach(node)
        for job in world.setup.jobs:
            world.start(job)
        state = cls(world, (acquires,) * jobs, budget)
        for client in world.clients.values():
            world.dial(client)
        state._settle()
        return state

    def key(self, *, merge: bool = True) -> Key:
        known = Known(
            left=dict(zip(self.world.setup.jobs, self.left, strict=True)),
            stubborn=self.stubborn,
            echo=self.echo,
            budget=self.budget.numbers(),
        )
        return key_of(self.world, known) if merge else named_key_of(self.world, known)

    def waits(self) -> bool:
        """Does somebody who is still there wait for an answer?"""
        return any(client.ask is not None for client in self.world.clients.values())

    def after(self, move: Move) -> "Explored":
        budget = self.budget.spend(move.trouble) if move.trouble else self.budget
        new = Explored(self.world.copy(), self.left, budget)
        new.stubborn, new.echo = self.stubborn, self.echo
        asks = {s: c.ask for s, c in self.world.clients.items() if c.ask is not None}
        _DO[move.letter](new, move)
        new._settle()
        for session, client in new.world.clients.items():
            if session in asks and client.ask != asks[session]:
                new.answered = True
        return new

    # ── what follows by itself ──

    def _settle(self) -> None:
        """Agents' words and messages that only confirm arrive; a client whose job is at fault goes home."""
        world = self.world
        for node in world.nodes.values():
            if self.echo == node.name and not node.stream.back:
                self.echo = None
            kept = 1 if self.echo == node.name else 0
            while len(node.stream.back) > kept:
                world.hear_node(node, kept)
        for client in list(world.clients.values()):
            while client.stream.down and isinstance(client.stream.down[0], TRIVIAL):
                world.tell_client(client)
            if client.refused is not None:
                self._ends(client)

    def _ends(self, client: Client) -> None:
        self.world.goodbye(client)
        self._bury(client.job)

    def _bury(self, job: JobId) -> None:
        self.left = tuple(0 if j == job else n for n, j in zip(self.left, self.world.setup.jobs, strict=True))
        self.stubborn = tuple(s for s in self.stubborn if s[1] != job)
        for node in self.world.nodes.values():
            served = node.served[GROUP]
            for process in served.device.of(job):
                served.bury(process.pid)

    # ── helps ──

    def client(self, job: str) -> Client:
        return next(c for c in self.world.clients.values() if c.job == job)

    def node(self, name: str) -> tuple[Node, Served]:
        node = self.world.nodes[NodeId(name)]
        return node, node.served[GROUP]

    def expire(self, job: str) -> None:
        """The grace of a lost session ends now."""
        shell, world = self.world.shell, self.world
        group = shell.locks[GROUP]
        session = next(s.session for s in group.lost if s.session.startswith(f"{job}."))
        lost = tuple(replace(s, deadline=0.0) if s.session == session else s for s in group.lost)
        shell.locks[GROUP] = replace(group, lost=lost)
        person = shell.people.get(session)
        if person is not None and not person.connected:
            person.forget_at = 0.0
        self._due(world)

    def unconfirmed(self) -> None:
        """The time to confirm a grant is over."""
        group = self.world.shell.locks[GROUP]
        held = group.occupancy
        assert isinstance(held, Held)
        late = tuple(replace(h, confirm_by=0.0) if h.confirm_by is not None else h for h in held.holders)
        self.world.shell.locks[GROUP] = replace(group, occupancy=replace(held, holders=late))
        self._due(self.world)

    def overrun(self) -> None:
        """The holder has had the lock for as long as it may while others wait."""
        group = self.world.shell.locks[GROUP]
        held = group.occupancy
        assert isinstance(held, Held)
        self.world.shell.locks[GROUP] = replace(group, occupancy=replace(held, contended_s=2 * FAR))
        self._due(self.world)

    def settled(self) -> None:
        """Nobody is waited for any longer after a restart."""
        shell = self.world.shell
        shell.locks[GROUP] = replace(shell.locks[GROUP], settle_by=0.0)
        self._due(self.world)

    @staticmethod
    def _due(world: World) -> None:
        world.shell.due[GROUP] = 0.0
        world.shell.pass_time()
        world.flush()


# ── which moves there are ──


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


# ── what each does ──


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
    state._bury(JobId(move.who))


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
    state._bury(job)
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
