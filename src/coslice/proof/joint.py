"""One world: the orchestrator's locks, the agents' holdings and everybody's processes, joined over streams.

Locks and holdings are the real machines; nothing here decides for them. Each method is one thing that can
happen; after it the invariants that need the whole are checked, and a broken one raises ``Violation``. The
world is deterministic: whoever drives it (``chaos``, ``explore``) makes every choice.
"""

from collections.abc import Iterator

from msgspec import Struct

from coslice.core import effects as fx
from coslice.core.context import NodeRules
from coslice.core.group import GroupRules, Held, new_group
from coslice.core.group_state import drain_of
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, NodeId, RequestId, SessionId
from coslice.core.policy import policy_named
from coslice.proof import wire
from coslice.proof.client import Client
from coslice.proof.device import CLIENTS, Process, Violation
from coslice.proof.node import Node
from coslice.proof.served import Served
from coslice.proof.shell import EPSILON, Shell, lease_of
from coslice.proof.story import Story
from coslice.proof.wire import Stream


class Setup(Struct, frozen=True, kw_only=True):
    groups: tuple[GroupId, ...]
    nodes: tuple[NodeId, ...]
    jobs: tuple[JobId, ...]
    rules: GroupRules
    node_rules: NodeRules
    policy: str = "fifo"
    capacity: int
    divisible: frozenset[JobId] = frozenset()
    """Jobs that can move a part of their state and leave the rest."""
    whole: frozenset[JobId] = frozenset()
    """Jobs whose processes can be frozen in the middle of a phase."""
    need: int = 0
    """What clients declare, where their story says nothing else."""
    instant: bool = False
    """What a client says is heard as it is said; only the way back takes time."""


class World:
    __slots__ = (
        "clients",
        "fuse",
        "gone",
        "leased",
        "nodes",
        "now",
        "pids",
        "setup",
        "shell",
        "starts",
        "story",
    )

    def __init__(self, setup: Setup, story: Story) -> None:
        self.setup, self.story, self.now = setup, story, 0.0
        locks = {g: new_group(g, nodes=setup.nodes, rules=setup.rules) for g in setup.groups}
        policies = {g: policy_named(setup.policy) for g in setup.groups}
        self.shell = Shell(locks, policies, story)
        self.nodes = {
            n: Node(
                n,
                {
                    g: Served(g, n, setup.node_rules, setup.capacity, story, setup.divisible, setup.whole)
                    for g in setup.groups
                },
            )
            for n in setup.nodes
        }
        self.clients: dict[SessionId, Client] = {}
        self.starts = dict.fromkeys(setup.jobs, 0)
        """How often each job was started."""
        self.pids = CLIENTS
        """Of clients: above those of all other processes."""
        self.gone: set[RequestId] = set()
        """Requests that the orchestrator heard to be given up: never to be granted again."""
        self.leased: dict[GroupId, tuple[Epoch, tuple[NodeId, ...]]] = {}
        """The nodes that the present lease is for; one that joins later may be made right under it."""
        self.fuse = -1
        """The orchestrator dies when it has carried out so many effects more; -1: not soon."""

    def copy(self) -> "World":
        new = World.__new__(World)
        new.setup, new.story, new.now, new.fuse = self.setup, self.story, self.now, self.fuse
        new.shell = self.shell.copy()
        new.nodes = {name: node.copy() for name, node in self.nodes.items()}
        new.clients = {session: client.copy() for session, client in self.clients.items()}
        new.pids = self.pids
        new.starts, new.gone, new.leased = self.starts.copy(), self.gone.copy(), self.leased.copy()
        return new

    # ── jobs ──

    def incarnation(self, job: JobId) -> Incarnation:
        return Incarnation(f"{job}-{self.starts[job]}")

    def start(self, job: JobId, *, processes: int = 1) -> None:
        """The job is started (again): new client processes, which have dialled nobody yet."""
        self.starts[job] += 1
        for i in range(processes):
            session = SessionId(f"{job}.{self.starts[job]}.{i}")
            home = self.setup.nodes[i % len(self.setup.nodes)]
            self.pids += 1
            self.clients[session] = Client(job, self.incarnation(job), session, home, self.pids, Stream())

    def of_job(self, job: JobId) -> list[Client]:
        return [c for c in self.clients.values() if c.job == job]

    def inside(self, group: GroupId, job: JobId) -> bool:
        """Does code of the job run on this group's accelerators, such that its state cannot leave?"""
        return job not in self.setup.whole and any(
            c.job == job and group in c.using for c in self.clients.values()
        )

    def is_current(self, client: Client, group: GroupId) -> bool:
        """Is the client's lease the one that counts?"""
        epoch = client.holds[group][1] if group in client.holds else None
        return epoch is not None and lease_of(self.shell.locks[group], client.session) == epoch

    # ── clients ──

    def client_says(self, client: Client, messages: list[wire.ClientMessage]) -> None:
        for message in messages:
            client.stream.send(message)
        if self.setup.instant:
            while client.stream.live and client.stream.back:
                self.hear_client(client)

    def dial(self, client: Client) -> None:
        self.client_says(client, client.dial())

    def hear_client(self, client: Client) -> None:
        """The oldest message of a client arrives."""
        message = client.stream.back.pop(0)
        if isinstance(message, wire.Hello):
            client.stream.greeted = True
            if not self.shell.greet(client):
                client.stream.down.append(wire.Rejected())
                client.stream.back.clear()
        elif client.stream.greeted and not isinstance(message, wire.Said):
            if isinstance(message, wire.Abandon):
                self.gone.add(message.request)
            self.shell.hear(client.session, message)
        self.flush()

    def tell_client(self, client: Client) -> None:
        """The oldest answer arrives. A grant is computed upon at once."""
        message = client.stream.down.pop(0)
        assert not isinstance(message, wire.Command)
        self.client_says(client, client.receive(message))
        if isinstance(message, wire.Granted) and client.using:
            self._enter(client)
        self.check()

    def _enter(self, client: Client) -> None:
        """The gate of the process: state that is moved out stops the section, with an error."""
        for group in client.using:
            there = list(self._served(group))
            client.on += tuple((group, node.name) for node, _ in there)
            parked = [node.name for node, s in there if s.device.has_parked(client.job)]
            if parked and self.is_current(client, group):
                raise Violation(f"2: {client.job} was granted {group} while parked on {parked}")
            if parked:
                self.client_says(client, client.leave())
                return
        self.compute(client)

    def compute(self, client: Client) -> None:
        """What is frozen stands still. (That it holds no lease meanwhile is checked of every state.)"""
        stands = client.job in self.setup.whole
        for group, name in client.on:
            self.nodes[name].served[group].device.compute(client.job, name, stands=stands)

    def leave(self, client: Client) -> None:
        self.client_says(client, client.leave())

    def die(self, client: Client) -> None:
        """The process is gone. The orchestrator learns of it from the stream, the silence, or its agent."""
        client.stream.cut()
        del self.clients[client.session]
        for served in self.nodes[client.home].served.values():
            if client.pid in served.device.alive:
                served.bury(client.pid)

    def process_ends(self, node: Node, served: Served, pid: int) -> None:
        """One that has state on a node; if it is a client's own, that client is gone as well."""
        client = next((c for c in self.clients.values() if c.pid == pid), None)
        if client is not None:
            self.die(client)
        else:
            served.bury(pid)

    def process_returns(self, node: Node, served: Served, process: Process) -> None:
        """It dials an agent that was restarted. One whose state is lost has nothing to offer, and ends."""
        if process.lost:
            self.process_ends(node, served, process.pid)
        else:
            served.register(process)

    def begin(self, client: Client, node: Node, group: GroupId, size: int, *, parked: bool = False) -> None:
        """A process of the client's job comes up on a node: its own there if it is at home."""
        served = node.served[group]
        own = client.pid if client.home == node.name and client.pid not in served.device.alive else 0
        served.begin(client.job, size, parked=parked, start=client.incarnation, own=own)
        self.after_node(node, group)

    def goodbye(self, client: Client) -> None:
        self.client_says(client, [*client.leave(), wire.Goodbye()])
        if self.setup.instant:
            self.die(client)

    def unnoticed(self) -> list[SessionId]:
        """Sessions that the orchestrator counts as connected although their stream is gone."""
        found = []
        for session, person in self.shell.people.items():
            if person.connected:
                client = self.clients.get(session)
                if client is None or not client.stream.greeted:
                    found.append(session)
        return found

    def notice_client(self, session: SessionId) -> None:
        self.shell.lost(session, self.setup.rules.session_grace)
        self.flush()

    # ── agents ──

    def attach(self, node: Node) -> None:
        node.dial()
        if self.setup.instant:
            self.hear_node(node)

    def hear_node(self, node: Node, index: int = 0, *, keep: bool = False) -> None:
        """A message of an agent arrives; ``keep``: and will arrive once more."""
        stream = node.stream
        message = stream.back[index] if keep else stream.back.pop(index)
        if isinstance(message, wire.Hello):
            stream.greeted = True
            self.shell.attach(node.name, message)
        elif isinstance(message, wire.Said):
            self.shell.report(message)
        self.flush()

    def tell_node(self, node: Node, index: int = 0, *, keep: bool = False) -> None:
        down = node.stream.down
        message = down[index] if keep else down.pop(index)
        assert isinstance(message, wire.Command)
        node.take(message)
        self.after_node(node, message.group)

    def unnoticed_nodes(self) -> list[NodeId]:
        return [n for n in self.shell.attached if not self.nodes[n].stream.greeted]

    def notice_node(self, name: NodeId) -> None:
        self.shell.detach(name)
        self.flush()

    def after_node(self, node: Node, group: GroupId) -> None:
        """Something happened to one of its groups: what it says goes out, and what is true is checked."""
        node.publish()
        node.served[group].check()
        self.check()

    def finish_kill(self, node: Node, group: GroupId) -> None:
        """Processes die by the agent's hand, and with them the clients that they are."""
        served = node.served[group]
        job = served.kills.pop(0)
        if served.killed(job, "killed by the agent"):
            for client in self.of_job(job):
                if client.home == node.name:
                    self.die(client)
        self.after_node(node, group)

    # ── deaths, and time ──

    def crash_orchestrator(self) -> None:
        self.fuse = -1
        for client in self.clients.values():
            client.stream.cut()
        for node in self.nodes.values():
            node.stream.cut()
        self.shell.restart(self.now)
        self.shell.out.clear()
        self.check()

    def advance(self, seconds: float) -> None:
        """Time passes; whatever is due by then happens first, in its order."""
        until = self.now + seconds
        while (due := self.next_due()) <= until:
            self.set_time(max(self.now, due))
            self.pass_time()
        self.set_time(until)

    def next_due(self) -> float:
        due = self.shell.next_due()
        first = float("inf") if due is None else due + self.shell.born
        for node in self.nodes.values():
            if node.alive and not node.hung:
                for served in node.served.values():
                    if served.due is not None:
                        first = min(first, served.due + node.born)
        return first

    def set_time(self, now: float) -> None:
        self.now = now
        self.shell.at = now - self.shell.born
        for node in self.nodes.values():
            at = now - node.born
            for served in node.served.values():
                served.at = at

    def pass_time(self) -> None:
        self.shell.pass_time()
        self.flush()
        for node in self.nodes.values():
            if node.alive and not node.hung:
                for group, served in node.served.items():
                    if served.due is not None and served.due <= served.at + EPSILON:
                        served.at = max(served.at, served.due)
                        served.wake()
                        self.after_node(node, group)

    # ── what is said, and what must be true ──

    def flush(self) -> None:
        """Carry out what the orchestrator decided, unless it dies over it."""
        for group, grant in self.shell.grants:
            self._judge(group, grant)
        self.shell.grants.clear()
        out, self.shell.out = self.shell.out, []
        for peer, message in out:
            if self.fuse == 0:
                self.crash_orchestrator()
                return
            if self.fuse > 0:
                self.fuse -= 1
            if (node := self.nodes.get(NodeId(peer))) is not None:
                node.stream.answer(message)
            elif (client := self.clients.get(SessionId(peer))) is not None:
                client.stream.answer(message)
        self.check()

    def _judge(self, group: GroupId, grant: fx.Grant) -> None:
        """At the moment of every grant: the job's state is loaded, and has room, wherever it is."""
        if grant.request in self.gone:
            raise Violation(f"5: {grant.request} is granted after its caller left")
        for node, served in self._served(group):
            device, mine = served.device, served.device.of(grant.job)
            if any(p.parked or p.away for p in mine):
                raise Violation(f"2: {grant.job} is granted {group}, but parked on {node.name}")
            for lease in self.shell.locks[group].frozen:
                if any(not p.parked for p in device.of(lease.job)):
                    raise Violation(
                        f"1: {lease.job} is frozen, and computes on {node.name} beside {grant.job}"
                    )
            if mine and device.total(but=grant.job) + device.need(grant.job) > device.capacity:
                raise Violation(f"3: {grant.job} is granted {group}, and may outgrow {node.name}")

    def check(self) -> None:
        """What only the whole can show, of the present moment."""
        for group, state in self.shell.locks.items():
            held = state.occupancy
            if isinstance(held, Held):
                for node, served in self._served(group):
                    if served.device.has_parked(held.job):
                        raise Violation(f"2: {held.job} holds {group} while parked on {node.name}")
        for client in self.clients.values():
            for group in client.using:
                if group in client.holds and not self.is_current(client, group):
                    self._check_fenced(client, group)

    def _check_fenced(self, client: Client, group: GroupId) -> None:
        """It computes under a lease that is over: it must be out of reach, or about to be told."""
        stream, epoch = client.stream, client.holds[group][1]
        if not (stream.live and stream.greeted):
            return
        for message in stream.down:
            if isinstance(message, wire.LeaseLost) and (message.group, message.epoch) == (group, epoch):
                return
            if isinstance(message, wire.Welcome) and (group, epoch) not in message.held:
                return
            if isinstance(message, wire.Rejected):
                return
        raise Violation(f"1: {client.session} computes on {group} under {epoch}, which is over, untold")

    def _served(self, group: GroupId) -> Iterator[tuple[Node, Served]]:
        """The nodes that a holder of the group uses."""
        state = self.shell.locks[group]
        held, names = state.occupancy, state.nodes
        if isinstance(held, Held):
            epoch, before = self.leased.get(group, (0, ()))
            if epoch != held.epoch and state.drained:
                names = tuple(n for n in names if drain_of(state, n) is None)
            names = tuple(n for n in before if n in names) if epoch == held.epoch else names
            self.leased[group] = (held.epoch, names)
        for name in names:
            if (node := self.nodes.get(name)) is not None:
                yield node, node.served[group]
