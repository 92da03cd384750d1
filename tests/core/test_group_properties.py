"""Random histories against the real lock, with nodes and clients that know the truth as the judges.

Clients come and go, cancel, lose their connections and run as several processes; nodes fail, hang and vanish;
the orchestrator is restarted at any moment. After every step the invariants hold, and in the end everybody
who still waits is served.
"""

import pytest
from core.group_world import Client, Node, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coslice.core import events as ev
from coslice.core.group import Held, Rejected, next_deadline
from coslice.core.ids import Epoch, JobId
from coslice.core.invariants import check_group
from coslice.core.policy import policy_named
from coslice.core.story import why_waiting

JOBS = ("a", "b", "c")
pick = st.integers(0, 10_000)


class GroupMachine(RuleBasedStateMachine):
    @initialize(
        nodes=st.integers(1, 3),
        policy=st.sampled_from(["fifo", "fewest_swaps"]),
        up=st.sampled_from([True, True, False]),
    )
    def start(self, nodes: int, policy: str, up: bool) -> None:
        self.world = World(*(f"n{i}" for i in range(nodes)), policy=policy_named(policy))
        self.starts = dict.fromkeys(JOBS, 1)
        if up:
            for name in self.world.nodes:
                self.world.attach(name)

    def clients(self, *, connected: bool = True) -> list[Client]:
        return [c for c in self.world.clients.values() if c.connected is connected]

    def a_client(self, index: int, **which: bool) -> Client | None:
        chosen = self.clients()
        for name, wanted in which.items():
            chosen = [c for c in chosen if (getattr(c, name) is not None) is wanted]
        return chosen[index % len(chosen)] if chosen else None

    def a_node(self, index: int, **which: bool) -> Node | None:
        chosen = [
            n for n in self.world.nodes.values() if all(bool(getattr(n, k)) is v for k, v in which.items())
        ]
        return chosen[index % len(chosen)] if chosen else None

    # ── clients ──

    @rule(
        job=st.sampled_from(JOBS),
        process=st.integers(0, 1),
        more=st.sampled_from([False, False, False, True]),
    )
    def acquire(self, job: str, process: int, more: bool) -> None:
        """Job c runs as two processes that must both yield; a and b have one or two as they come."""
        start = self.starts[job]
        client = self.world.client(
            f"{job}.{start}.{process}", job=job, incarnation=f"{job}-{start}", world=2 if job == "c" else 0
        )
        if not client.connected or client.holding or client.asking:
            return
        self.world.ask(client, more=more)
        if more and client.holding:
            self.world.apply(ev.AcquireCompleted(at=self.world.now, request=client.holding[0]))

    @rule(index=pick)
    def acquire_again(self, index: int) -> None:
        """The client lost the answer and repeats the call: it keeps its place."""
        client = self.a_client(index, asking=True)
        if client is not None:
            before = self.world.open_requests()
            assert client.asking in before, "5: a connected client waits for nothing"
            self.world.ask(client)
            assert self.world.open_requests() == before

    @rule(index=pick, use=st.sampled_from([True, True, False]))
    def confirm(self, index: int, use: bool) -> None:
        """The facts of a use are on their way to the orchestrator for as long as the node does not speak."""
        client = self.a_client(index, holding=True)
        if client is not None:
            self.world.confirm(client)
            if use:
                self.world.use_device(client)

    @rule(index=pick)
    def yield_(self, index: int) -> None:
        client = self.a_client(index, holding=True)
        if client is not None:
            self.world.yield_(client)

    @rule(index=pick)
    def yield_again(self, index: int) -> None:
        """The reply was lost: the repeat succeeds and nothing happens."""
        client = self.a_client(index, last_yield=True)
        if client is not None and client.last_yield is not None and not client.holding:
            before = self.world.group
            event = ev.LeaseYielded(
                at=self.world.now, job=client.job, session=client.session, epoch=client.last_yield
            )
            known = any(client.session in r.sessions for r in before.jobs)
            if known:
                self.world.apply(event)
            else:  # its session ended meanwhile
                with pytest.raises(Rejected):
                    self.world.apply(event)
            assert self.world.group == before

    @rule(job=st.sampled_from(JOBS), epoch=st.integers(-1, 12))
    def yield_of_a_stranger(self, job: str, epoch: int) -> None:
        before = self.world.group
        event = ev.LeaseYielded(at=self.world.now, job=JobId(job), session="stranger", epoch=Epoch(epoch))
        with pytest.raises(Rejected) as refusal:
            self.world.apply(event)
        assert refusal.value.code in ("stale_lease", "not_held")
        assert self.world.group == before

    @rule(index=pick)
    def reconnect(self, index: int) -> None:
        chosen = self.clients(connected=False)
        if chosen:
            self.world.reconnect(chosen[index % len(chosen)])

    # ── nodes ──

    @rule(index=pick)
    def node_works(self, index: int) -> None:
        node = self.a_node(index, ops=True)
        if node is not None:
            node.work("none")

    @rule(index=pick)
    def node_speaks(self, index: int) -> None:
        node = self.a_node(index, mail=True)
        if node is not None:
            self.world.deliver(node)

    @rule(index=pick)
    def node_attaches(self, index: int) -> None:
        node = self.a_node(index, up=False)
        if node is not None:
            self.world.attach(node.name)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0, 61.0, 301.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(index=pick, kind=st.sampled_from(["abandon", "abandon", "drop", "drop", "exit", "exit", "forget"]))
    def client_trouble(self, index: int, kind: str) -> None:
        """A call is cancelled, a connection lost, a job ends or is forgotten by an operator."""
        job = JOBS[index % len(JOBS)]
        if kind == "exit":
            self.job_exits(job)
        elif kind == "forget":
            self.world.apply(ev.JobForgotten(at=self.world.now, job=JobId(job)))
            assert all(w.job != job for w in self.world.group.waiters)
        elif kind == "drop":
            if client := self.a_client(index):
                self.world.drop(client)
        elif client := self.a_client(index, asking=True) or self.a_client(index, holding=True):
            self.world.abandon(client)

    def job_exits(self, job: str) -> None:
        """All its processes end; the next start is a new incarnation."""
        self.starts[job] += 1
        for client in list(self.world.clients.values()):
            if client.job == job:
                self.world.close(client)
        for node in self.world.nodes.values():
            if node.contexts.pop(JobId(job), None) is not None:
                node.stuck = None if node.stuck == job else node.stuck
                node.push()

    @rule(index=pick, kind=st.sampled_from(["incoming", "evictee", "stuck", "detach", "detach", "change"]))
    def node_trouble(self, index: int, kind: str) -> None:
        if kind == "detach":
            if node := self.a_node(index, up=True):
                self.world.detach(node.name)
        elif kind == "change":
            self.nodes_change(index)
        elif node := self.a_node(index, ops=True):
            node.work(kind)

    def nodes_change(self, index: int) -> None:
        names = sorted(self.world.nodes)
        fewer = (
            tuple(n for i, n in enumerate(names) if i != index % len(names)) if index % 3 else tuple(names)
        )
        self.world.apply(ev.NodesChanged(at=self.world.now, nodes=fewer))
        for name in names:
            if name not in fewer:
                self.world.nodes[name].up, self.world.nodes[name].mail = False, []

    @precondition(lambda self: self.world.group.epoch > 0)
    @rule()
    def orchestrator_restarts(self) -> None:
        self.world.restart()

    @invariant()
    def holds(self) -> None:
        group = self.world.group
        check_group(group)
        for job in JOBS:
            assert why_waiting(group, JobId(job), self.world.now)
        for client in self.clients():
            if client.asking:
                assert client.asking in self.world.open_requests(), "5 and 8: waits, but nobody knows"

    def teardown(self) -> None:
        """Liveness: with healthy nodes and clients that yield, everybody is served, or told why not."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for client in self.clients(connected=False):
            world.reconnect(client)
        for node in world.nodes.values():
            node.stuck = None
            if not node.up:
                world.attach(node.name)
        for _ in range(200):
            world.settle()
            holders = [c for c in self.clients() if c.holding]
            if holders:
                world.yield_(holders[0])
            elif any(c.asking for c in self.clients()):
                due = next_deadline(world.group)
                assert due is not None, f"somebody waits for nothing: {world.group}"
                world.wait(max(0.0, due - world.now))
            else:
                break
        assert not [c.asking for c in self.clients() if c.asking], f"never answered: {world.group}"
        assert not isinstance(world.group.occupancy, Held) or world.group.occupancy.world


TestGroup = GroupMachine.TestCase
TestGroup.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
