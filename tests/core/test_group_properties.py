"""Random histories against the real lock, with nodes and clients that know the truth as the judges.

Clients come and go, cancel, lose their connections and run as several processes; nodes fail, hang and vanish;
the orchestrator is restarted at any moment. After every step the invariants hold, and in the end everybody
who still waits is served.

Each rule draws numbers that pick among the things that can happen *now*, so that no draw is wasted and the
histories get deep.
"""

import random
from collections.abc import Callable
from functools import partial

import pytest
from core.group_world import Client, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group import Held, Rejected, next_deadline
from coslice.core.group_state import drain_of
from coslice.core.ids import Epoch, JobId
from coslice.core.invariants import check_group
from coslice.core.policy import policy_named
from coslice.core.story import why_waiting

JOBS = ("a", "b", "c")
PROCESSES = (0, 1)
picks = st.lists(st.integers(0, 1 << 16), min_size=1, max_size=15)
Action = Callable[[], object]


class GroupMachine(RuleBasedStateMachine):
    @initialize(nodes=st.integers(1, 3), policy=st.sampled_from(["fifo", "fewest_swaps"]), up=st.booleans())
    def start(self, nodes: int, policy: str, up: bool) -> None:
        self.world = World(*(f"n{i}" for i in range(nodes)), policy=policy_named(policy))
        self.starts = dict.fromkeys(JOBS, 1)
        for name in self.world.nodes if up else ():
            self.world.attach(name)

    @rule(numbers=picks)
    def life_goes_on(self, numbers: list[int]) -> None:
        for number in numbers:
            able = self.progress()
            able[number % len(able)]()
            self.holds()

    @rule(numbers=picks)
    def life_goes_on_with_trouble(self, numbers: list[int]) -> None:
        for number in numbers:
            able = self.trouble() if number % 3 == 0 else self.progress()
            able[number // 3 % len(able)]()
            self.holds()

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0, 61.0, 301.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule()
    def the_orchestrator_restarts(self) -> None:
        self.world.restart()

    # ── what can happen now ──

    def progress(self) -> list[Action]:
        world, able = self.world, list[Action]()
        for job in JOBS:
            for process in PROCESSES:
                name = f"{job}.{self.starts[job]}.{process}"
                client = next((c for c in world.clients.values() if c.session == name), None)
                if client is None or (client.connected and not client.asking and not client.holding):
                    able += [partial(self.acquire, job, process, False)]
        for client in self.clients():
            if client.holding:
                able += (
                    [partial(world.yield_, client)]
                    if client.confirmed
                    else [partial(self.confirm, client)] * 3
                )
        able += [partial(world.reconnect, c) for c in self.clients(connected=False)]
        for node in world.nodes.values():
            able += [partial(node.work, "none")] * 2 if node.ops else []
            able += [partial(world.deliver, node)] * 2 if node.mail else []
            able += [] if node.up else [partial(world.attach, node.name)] * 2
        return able or [lambda: world.wait(1.0)]

    def trouble(self) -> list[Action]:
        world, able = self.world, list[Action]()
        able += [partial(self.job_exits, job) for job in JOBS]
        able += [partial(self.forget, JOBS[0]), partial(self.a_stranger_yields, world.group.epoch)]
        able += [partial(self.a_stranger_yields, Epoch(world.group.epoch - 1)), self.nodes_change]
        able += [partial(self.acquire, job, 0, True) for job in JOBS]
        for client in self.clients():
            able += [partial(world.drop, client)]
            able += [partial(self.acquire_again, client)] if client.asking else []
            able += [partial(world.abandon, client)] if client.asking or client.holding else []
            able += [partial(world.yield_, client)] if client.holding else []
            able += [partial(self.yield_again, client)] if client.last_yield else []
        for node in world.nodes.values():
            able += [partial(self.maintain, node.name)]
            able += [partial(node.work, fault) for fault in ("incoming", "evictee", "stuck") if node.ops]
            able += [partial(world.detach, node.name)] if node.up else []
        return able

    def clients(self, *, connected: bool = True) -> list[Client]:
        return [c for c in self.world.clients.values() if c.connected is connected]

    # ── clients ──

    def acquire(self, job: str, process: int, more: bool) -> None:
        """Job c runs as two processes that must both yield; those of a and b come as they like."""
        start = self.starts[job]
        client = self.world.client(
            f"{job}.{start}.{process}", job=job, incarnation=f"{job}-{start}", world=2 if job == "c" else 0
        )
        if not client.connected or client.holding or client.asking:
            return
        self.world.ask(client, more=more)
        if more and client.holding:
            self.world.apply(ev.AcquireCompleted(at=self.world.now, request=client.holding[0]))

    def acquire_again(self, client: Client) -> None:
        """The client lost the answer and repeats the call: it keeps its place."""
        before = self.world.open_requests()
        self.world.ask(client)
        assert self.world.open_requests() == before

    def confirm(self, client: Client) -> None:
        """The facts of its use are on their way to the orchestrator until the node speaks."""
        self.world.confirm(client)
        if client.count % 4:
            self.world.use_device(client)

    def yield_again(self, client: Client) -> None:
        """The reply was lost: the repeat succeeds and nothing happens."""
        before = self.world.group
        if client.last_yield is None or client.holding:
            return
        event = ev.LeaseYielded(
            at=self.world.now, job=client.job, session=client.session, epoch=client.last_yield
        )
        self.world.apply(event)
        assert self.world.group == before

    def a_stranger_yields(self, epoch: Epoch) -> None:
        before = self.world.group
        for job in JOBS:
            event = ev.LeaseYielded(at=self.world.now, job=JobId(job), session="stranger", epoch=epoch)
            with pytest.raises(Rejected) as refusal:
                self.world.apply(event)
            assert refusal.value.code in ("stale_lease", "not_held")
        assert self.world.group == before

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

    def forget(self, job: str) -> None:
        try:
            self.world.apply(ev.JobForgotten(at=self.world.now, job=JobId(job)))
        except Rejected:
            return
        assert all(w.job != job for w in self.world.group.waiters)

    def evict(self, job: str) -> None:
        try:
            self.world.apply(ev.JobEvicted(at=self.world.now, job=JobId(job)))
        except Rejected:
            return
        held = self.world.group.occupancy
        assert not (isinstance(held, Held) and held.job == job)
        assert all(w.job != job for w in self.world.group.waiters)

    def maintain(self, name: str) -> None:
        """A node is drained, or serves again. Nobody who waits loses the place over it."""
        out = drain_of(self.world.group, name) is not None
        before = self.world.open_requests()
        taken = (self.world.undrain if out else self.world.drain)(name)
        assert not any(isinstance(e, fx.Refuse | fx.LoseLease) for e in taken.effects)
        held = self.world.group.occupancy
        granted = {h.request for h in held.holders} if isinstance(held, Held) else set()
        assert set(before) - granted == set(self.world.open_requests())

    def nodes_change(self) -> None:
        """The last node is taken out of the group; it may attach again."""
        nodes = self.world.group.nodes[:-1]
        self.world.apply(ev.NodesChanged(at=self.world.now, nodes=nodes))
        for name, node in self.world.nodes.items():
            if name not in nodes:
                node.up, node.mail = False, []

    # ── what must be true ──

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
            if drain_of(world.group, node.name) is not None:
                world.undrain(node.name)
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
    max_examples=200,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestGroup.pytestmark = [pytest.mark.timeout(240)]  # shrinking a failure takes its time


@pytest.mark.parametrize("seed", range(40))
def test_long_random_walks(seed: int) -> None:
    """The same machine with plain dice: histories longer than Hypothesis likes to draw."""
    for part in range(10):
        dice = random.Random(1000 * seed + part)
        machine = GroupMachine()
        policy = dice.choice(["fifo", "fewest_swaps"])
        machine.start(nodes=dice.randint(1, 3), policy=policy, up=dice.random() < 0.7)
        rate = dice.choice([0.0, 0.1, 0.3])
        for _ in range(dice.randint(5, dice.choice([15, 40, 120]))):
            fate = dice.random()
            if fate < 0.02:
                machine.the_orchestrator_restarts()
            elif fate < 0.06:
                machine.time_passes(dice.choice([0.5, 4.0, 11.0, 61.0, 301.0]))
            else:
                dice.choice(machine.trouble() if dice.random() < rate else machine.progress())()
            machine.holds()
        machine.teardown()
