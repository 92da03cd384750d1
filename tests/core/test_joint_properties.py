"""The lock and two nodes' holdings, both real, joined over a wire that loses, doubles and reorders.

Either side is killed and started again from its store at any moment, streams are cut, clients cancel and
vanish, processes die, and every move can fail. After each step the invariants of both machines hold, and so
does what only the whole can show: nobody is granted whose state is not on every device, devices are never
over their budget, a holder's state stays where it is. Once nothing fails any more everybody is served.
"""

from dataclasses import dataclass, field
from functools import partial

import msgspec
from core.node_world import BUDGET, FAULTS, MIB, NodeWorld
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core import group as lock
from coslice.core.context import NodeRules, facts
from coslice.core.group import Group, GroupRules, Held, Rejected, Swapping
from coslice.core.group_state import active, occupant
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, NodeId, RequestId, SessionId
from coslice.core.invariants import check_group_step
from coslice.core.policy import policy_named

NODES = ("n0", "n1")
JOBS = tuple(JobId(j) for j in ("a", "b", "c"))
SIZES = st.integers(1, 60).map(lambda n: n * MIB)
pick = st.integers(0, 10_000)
seldom = st.sampled_from([True, False, False])

FromNode = ev.NodeReported | ev.OpSucceeded | ev.OpFailed


@dataclass
class Client:
    """The one client of a job, and what it believes."""

    job: JobId
    start: int = 1
    connected: bool = True
    count: int = 0
    asking: RequestId | None = None
    holding: tuple[RequestId, Epoch] | None = None

    @property
    def session(self) -> SessionId:
        return SessionId(f"{self.job}.{self.start}")

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(f"{self.job}-{self.start}")


@dataclass
class Wire:
    """One agent's stream, and what is on it in either direction."""

    up: bool = False
    down: list[fx.MakeResident] = field(default_factory=list)
    back: list[FromNode] = field(default_factory=list)
    torn: bool = False
    """Something was lost, so the stream is about to break (as a stream does that cannot deliver)."""

    def cut(self) -> None:
        self.up, self.torn = False, False
        self.down.clear()
        self.back.clear()


class Joint:
    def __init__(self, *, policy: str, node_rules: NodeRules) -> None:
        self.now = 0.0
        self.policy = policy_named(policy)
        rules = GroupRules(max_hold=200.0, quantum=20.0, stuck_retry=15.0, node_loss=1e6)
        self.group: Group = lock.new_group(GroupId("g"), nodes=[NodeId(n) for n in NODES], rules=rules)
        self.clients = {job: Client(job) for job in JOBS}
        self.wires = {NodeId(n): Wire() for n in NODES}
        self.nodes: dict[NodeId, NodeWorld] = {}
        for name in self.wires:
            self.nodes[name] = NodeWorld(name, node_rules, said=partial(self.said, name))
        self.gone: set[RequestId] = set()

    # ── the lock's side ──

    def apply(self, event: ev.GroupEvent) -> None:
        before = self.group
        taken = lock.step(before, event, self.policy)
        check_group_step(before, event, taken)
        self.group = taken.state
        for effect in taken.effects:
            self.carry_out(effect)

    def carry_out(self, effect: fx.GroupEffect) -> None:
        match effect:
            case fx.MakeResident():
                if self.wires[effect.node].up:
                    self.wires[effect.node].down.append(effect)
            case fx.Grant():
                client = self.clients[effect.job]
                if client.connected and client.session == effect.session and client.asking == effect.request:
                    self.judge(effect)
                    client.asking, client.holding = None, (effect.request, effect.epoch)
            case fx.Refuse():
                client = self.clients_by_session().get(effect.session)
                if client is not None and client.asking == effect.request:
                    client.asking = None
            case fx.LoseLease():
                client = self.clients_by_session().get(effect.session)
                if client is not None and client.holding and client.holding[1] == effect.epoch:
                    client.holding = None
            case fx.AskYield():
                pass

    def clients_by_session(self) -> dict[SessionId, Client]:
        return {c.session: c for c in self.clients.values() if c.connected}

    def judge(self, grant: fx.Grant) -> None:
        assert grant.request not in self.gone, "5: granted after the caller left"
        for other in self.clients.values():
            if other.connected and other.holding:
                assert other.job == grant.job, f"1: {other.job} holds what {grant.job} is granted"
        for node in self.nodes.values():
            parked = [p.pid for p in node.device.of(grant.job) if p.parked]
            assert not parked, f"2: {grant.job} is granted, but {parked} are parked on {node.name}"
            if node.device.of(grant.job):
                most = node.device.total(but=grant.job) + node.device.need(grant.job)
                assert most <= BUDGET, f"3: {grant.job} may grow to {most} on {node.name}"

    def holder(self) -> Client | None:
        """Who really holds the lease and knows it."""
        held = self.group.occupancy
        if not isinstance(held, Held):
            return None
        client = self.clients[held.job]
        shares = {h.request for h in active(held)}
        known = client.connected and client.holding is not None
        return client if known and client.holding[0] in shares else None

    # ── clients ──

    def ask(self, client: Client) -> None:
        if client.asking is None:
            client.count += 1
            client.asking = RequestId(f"{client.session}/{client.count}")
        self.apply(
            ev.AcquireRequested(
                at=self.now,
                job=client.job,
                incarnation=client.incarnation,
                session=client.session,
                request=client.asking,
            )
        )

    def yield_(self, client: Client) -> None:
        assert client.holding is not None
        epoch, client.holding = client.holding[1], None
        try:
            self.apply(ev.LeaseYielded(at=self.now, job=client.job, session=client.session, epoch=epoch))
        except Rejected:
            assert self.holder() is not client, "only a lease that is over may not be yielded"

    def drop(self, client: Client) -> None:
        client.connected = False
        self.apply(ev.SessionLost(at=self.now, session=client.session))

    def reconnect(self, client: Client) -> None:
        """As the client library does: hello, learn what is still held, ask again for what is open."""
        client.connected = True
        self.apply(ev.SessionResumed(at=self.now, session=client.session))
        if client.holding is not None and self.holder() is not client:
            client.holding = None
        if client.asking is not None:
            self.ask(client)

    # ── the wire ──

    def said(self, node: NodeId, effect: fx.NodeEffect) -> None:
        """What an agent tells the orchestrator; each report carries what it holds."""
        wire, world = self.wires[node], self.nodes.get(node)
        if not wire.up or world is None:
            return
        now = facts(world.holdings)
        match effect:
            case fx.PushFacts():
                wire.back.append(ev.NodeReported(at=0.0, node=node, facts=now))
            case fx.ReportDone():
                wire.back.append(
                    ev.OpSucceeded(
                        at=0.0,
                        op=effect.op,
                        node=node,
                        restored=effect.restored,
                        bytes_in=effect.bytes_in,
                        bytes_out=effect.bytes_out,
                        seconds=effect.seconds,
                        reason=effect.reason,
                        facts=now,
                    )
                )
            case fx.ReportFailed():
                wire.back.append(
                    ev.OpFailed(
                        at=0.0,
                        op=effect.op,
                        node=node,
                        culprit=effect.culprit,
                        reason=effect.reason,
                        stuck=effect.stuck,
                        pid=effect.pid,
                        facts=now,
                    )
                )
            case _:
                pass

    def attach(self, node: NodeId) -> None:
        self.wires[node].cut()
        self.wires[node].up = True
        held = self.nodes[node].holdings
        self.apply(ev.NodeAttached(at=self.now, node=node, epoch=held.epoch, facts=facts(held)))

    def detach(self, node: NodeId) -> None:
        self.wires[node].cut()
        self.apply(ev.NodeDetached(at=self.now, node=node))

    def deliver_down(self, node: NodeId, index: int = 0, *, keep: bool = False) -> None:
        wire, world = self.wires[node], self.nodes[node]
        sent = wire.down[index] if keep else wire.down.pop(index)
        world.hear(
            ev.MakeResidentCommanded(
                at=world.tick(), op=sent.op, epoch=sent.epoch, job=sent.job, need=sent.need
            )
        )

    def deliver_back(self, node: NodeId, index: int = 0, *, keep: bool = False) -> None:
        wire = self.wires[node]
        self.apply(replace(wire.back[index] if keep else wire.back.pop(index), at=self.now))

    # ── deaths, and time ──

    def restart_orchestrator(self) -> None:
        stored = msgspec.json.decode(msgspec.json.encode(self.group), type=Group)
        assert stored == self.group
        self.now = 0.0
        self.group = lock.restarted(stored, self.now)
        for client in self.clients.values():
            client.connected = False
        for wire in self.wires.values():
            wire.cut()
        for effect in lock.resume(self.group):
            self.carry_out(effect)

    def restart_agent(self, node: NodeId) -> None:
        if self.wires[node].up:
            self.detach(node)
        self.nodes[node].restart()

    def wake(self) -> None:
        due = lock.next_deadline(self.group)
        if due is not None:
            self.now = max(self.now, due)
            self.apply(ev.DeadlinePassed(at=self.now))

    # ── what must be true of the whole ──

    def check(self) -> None:
        for node in self.nodes.values():
            node.check()
        holder = self.holder()
        if holder is not None:
            for node in self.nodes.values():
                parked = [p.pid for p in node.device.of(holder.job) if p.parked]
                assert not parked, f"2: {holder.job} holds the lock while {parked} are parked on {node.name}"

    def work_one(self) -> bool:
        """One thing that wires and nodes do by themselves when nothing fails; False if all is quiet."""
        for name, wire in self.wires.items():
            if not wire.up or wire.torn:
                self.attach(name)
            elif wire.down:
                self.deliver_down(name)
            elif wire.back:
                self.deliver_back(name)
            elif not self.nodes[name].settle_one():
                continue
            return True
        return False

    def settle_one(self) -> bool:
        """The same with clients, who take what they get and yield it at once."""
        if self.work_one():
            return True
        for client in self.clients.values():
            if not client.connected:
                self.reconnect(client)
                return True
            if client.holding is not None:
                self.apply(ev.GrantConfirmed(at=self.now, request=client.holding[0]))
                self.yield_(client)
                return True
        return False


class JointMachine(RuleBasedStateMachine):
    node_rules = NodeRules(retries=1, stuck_grace=10.0)

    @initialize(policy=st.sampled_from(["fifo", "fewest_swaps"]))
    def start(self, policy: str) -> None:
        self.all = Joint(policy=policy, node_rules=self.node_rules)
        for name in self.all.nodes:
            self.all.attach(name)

    def node(self, index: int) -> NodeWorld:
        return self.all.nodes[NodeId(NODES[index % len(NODES)])]

    # ── clients ──

    @rule(job=st.sampled_from(JOBS))
    def acquire(self, job: JobId) -> None:
        client = self.all.clients[job]
        if client.connected and client.holding is None:  # a second time: the answer was lost, it asks again
            self.all.ask(client)

    @rule(job=st.sampled_from(JOBS), confirm=st.booleans())
    def yields(self, job: JobId, confirm: bool) -> None:
        client = self.all.clients[job]
        if client.connected and client.holding is not None:
            if confirm:
                self.all.apply(ev.GrantConfirmed(at=self.all.now, request=client.holding[0]))
            else:
                self.all.yield_(client)

    @rule(job=st.sampled_from(JOBS))
    def abandons(self, job: JobId) -> None:
        client = self.all.clients[job]
        if client.connected and client.asking is not None:
            request, client.asking = client.asking, None
            self.all.gone.add(request)
            self.all.apply(ev.AcquireAbandoned(at=self.all.now, request=request))

    @rule(job=st.sampled_from(JOBS))
    def flaps(self, job: JobId) -> None:
        client = self.all.clients[job]
        if client.connected:
            self.all.drop(client)
        else:
            self.all.reconnect(client)

    @rule(job=st.sampled_from(JOBS), really=seldom)
    def starts_anew(self, job: JobId, really: bool) -> None:
        """Every process of the job ends, and it is started again under the same name."""
        if not really:
            return
        client = self.all.clients[job]
        for node in self.all.nodes.values():
            for process in node.device.of(job):
                node.bury(process.pid)
        if client.connected:
            client.asking = client.holding = None
            self.all.apply(ev.SessionClosed(at=self.all.now, session=client.session))
        self.all.clients[job] = Client(job, start=client.start + 1)

    @rule(job=st.sampled_from(JOBS), sizes=st.tuples(SIZES, SIZES), work=st.integers(0, 30))
    def takes_a_turn(self, job: JobId, sizes: tuple[int, int], work: int) -> None:
        """A job comes as far as it gets in a stretch in which nothing fails, and computes."""
        client = self.all.clients[job]
        if not client.connected:
            self.all.reconnect(client)
        if client.holding is None:
            self.all.ask(client)
        for _ in range(work):
            self.all.work_one()
        if self.all.holder() is client:
            for node, size in zip(self.all.nodes.values(), sizes, strict=True):
                if not node.device.of(job) and size <= node.room():
                    node.begin(job, size, parked=False, start=client.incarnation)
            if work % 2:
                self.all.yield_(client)

    # ── processes ──

    @rule(index=pick, job=st.sampled_from(JOBS), size=SIZES)
    def process_begins(self, index: int, job: JobId, size: int) -> None:
        """Under the lease, or beside it as far as the agent has room; otherwise with its state parked."""
        node, client = self.node(index), self.all.clients[job]
        live = node.fits(job, size) or (self.all.holder() is client and size <= node.room())
        if node.device.of(job) or (not live and occupant(self.all.group) == job):
            return
        parked = not live
        node.begin(job, size, parked=parked, start=client.incarnation)

    @rule(index=pick, size=SIZES)
    def holder_grows(self, index: int, size: int) -> None:
        node, holder = self.node(index), self.all.holder()
        if holder is not None and node.device.of(holder.job):
            node.grow(holder.job, size)

    @rule(index=pick, really=seldom)
    def process_dies(self, index: int, really: bool) -> None:
        node = self.node(index)
        if (alive := list(node.device.alive)) and really:
            node.bury(alive[index % len(alive)])

    @rule(index=pick)
    def process_reconnects(self, index: int) -> None:
        node = self.node(index)
        if alive := list(node.device.alive.values()):
            node.reconnect(alive[index % len(alive)])

    @rule(index=pick)
    def agent_learns(self, index: int) -> None:
        node = self.node(index)
        if node.kills:
            node.finish_kill()
        elif node.news:
            node.learn(index % len(node.news))

    @precondition(lambda self: any(n.asked for n in self.all.nodes.values()))
    @rule(index=pick, how=st.sampled_from(("ok", "ok", "ok", *FAULTS)), left=st.integers(0, 2))
    def backend(self, index: int, how: str, left: int) -> None:
        busy = [n for n in self.all.nodes.values() if n.asked]
        busy[index % len(busy)].backend(how, left=left)

    # ── the wire ──

    @rule(index=pick, keep=st.sampled_from([False, False, True]))
    def command_arrives(self, index: int, keep: bool) -> None:
        name = self.node(index).name
        if down := self.all.wires[name].down:
            self.all.deliver_down(name, index // 2 % len(down), keep=keep)

    @rule(index=pick, keep=st.sampled_from([False, False, True]))
    def report_arrives(self, index: int, keep: bool) -> None:
        name = self.node(index).name
        if back := self.all.wires[name].back:
            self.all.deliver_back(name, index // 2 % len(back), keep=keep)

    @rule(index=pick, down=st.booleans())
    def message_is_lost(self, index: int, down: bool) -> None:
        wire = self.all.wires[self.node(index).name]
        if way := wire.down if down else wire.back:
            way.pop(index // 2 % len(way))
            wire.torn = True

    @rule(index=pick)
    def stream_changes(self, index: int) -> None:
        name = self.node(index).name
        if self.all.wires[name].up:
            self.all.detach(name)
        else:
            self.all.attach(name)

    # ── deaths and time ──

    @rule()
    def orchestrator_dies(self) -> None:
        self.all.restart_orchestrator()

    @rule(index=pick)
    def agent_dies(self, index: int) -> None:
        self.all.restart_agent(self.node(index).name)

    @rule()
    def time_passes(self) -> None:
        due = lock.next_deadline(self.all.group)
        if (
            due is not None and due < self.all.now + 1000.0
        ):  # a node that is away long leaves: not the subject here
            self.all.wake()

    @rule(index=pick)
    def time_passes_on_a_node(self, index: int) -> None:
        self.node(index).wake()

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "all"):
            self.all.check()

    def teardown(self) -> None:
        """Once nothing fails any more everybody who waits is answered, within a bounded number of steps."""
        if not hasattr(self, "all"):
            return
        for _ in range(1500):
            self.all.check()
            if not self.all.settle_one():
                if not any(c.asking for c in self.all.clients.values()):
                    break
                assert lock.next_deadline(self.all.group) is not None, "8: they wait for nothing at all"
                self.all.wake()
        waiting = [c.job for c in self.all.clients.values() if c.asking]
        assert not waiting, f"8: never answered: {waiting}"
        assert not isinstance(self.all.group.occupancy, Swapping)


class WaitingJointMachine(JointMachine):
    node_rules = NodeRules(retries=1, on_stuck="wait", room_wait=1.0)


SETTINGS = settings(max_examples=120, stateful_step_count=50, deadline=None, derandomize=True)
TestJoint = JointMachine.TestCase
TestJoint.settings = SETTINGS
TestWaitingJoint = WaitingJointMachine.TestCase
TestWaitingJoint.settings = SETTINGS
