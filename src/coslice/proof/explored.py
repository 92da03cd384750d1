"""A world under exploration, and how much trouble its run may still have.

A small world on purpose: one group, jobs of one client and one process a node, each taking more than half of
a device, so that every hand-over moves state. Each run may have so much trouble as ``Budget`` says.
"""

from msgspec import Struct
from msgspec.structs import replace

from coslice.core.context import NodeRules
from coslice.core.group import GroupRules, Held
from coslice.core.ids import GroupId, JobId, NodeId
from coslice.proof import wire
from coslice.proof.canon import Key, Known, key_of, named_key_of
from coslice.proof.client import Client
from coslice.proof.device import MIB
from coslice.proof.joint import Setup, World
from coslice.proof.node import Node
from coslice.proof.served import Served
from coslice.proof.story import Silence

GROUP = GroupId("g")
SIZE, CAPACITY = 60 * MIB, 100 * MIB
FAR = 1e9
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
        state.settle()
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

    def spent(self, move: Move) -> "Explored":
        """A copy that has paid for the move, before it happens."""
        budget = self.budget.spend(move.trouble) if move.trouble else self.budget
        new = Explored(self.world.copy(), self.left, budget)
        new.stubborn, new.echo = self.stubborn, self.echo
        return new

    # ── what follows by itself ──

    def settle(self) -> None:
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
        self.bury(client.job)

    def bury(self, job: JobId) -> None:
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
