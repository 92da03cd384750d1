"""Random histories of one node: processes come, join, grow and die, the backend fails in every way, commands
come late, twice or never, the agent is killed. What the holdings say must agree with the device's truth.
"""

from core.node_world import FAULTS, MIB, NodeWorld
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from coslice.core import events as ev
from coslice.core.context import NodeRules, facts
from coslice.core.events import ContextState
from coslice.core.ids import Epoch, Incarnation, JobId, OpId

JOBS = tuple(JobId(j) for j in ("a", "b", "c"))
SIZES = st.integers(0, 60).map(lambda n: n * MIB)
pick = st.integers(0, 10_000)


class NodeMachine(RuleBasedStateMachine):
    rules_of_node = NodeRules(retries=1, stuck_grace=10.0)

    def __init__(self) -> None:
        super().__init__()
        self.node = NodeWorld("n", self.rules_of_node)
        self.epoch = 0
        self.commands: list[ev.MakeResidentCommanded] = []

    # ── processes ──

    @rule(job=st.sampled_from(JOBS), size=SIZES, parked=st.booleans())
    def begins(self, job: JobId, size: int, parked: bool) -> None:
        node, mine = self.node, self.node.device.of(job)
        if not parked and (node.holdings.running is not None or size > node.room()):
            return  # a real device would refuse, and nobody allocates during a swap
        if len(mine) > 1 or any(p.parked != parked for p in mine):
            return
        start = mine[0].incarnation if mine else Incarnation(f"i{node.pids}")
        node.begin(job, size, parked=parked, start=start)

    @precondition(lambda self: self.node.device.alive)
    @rule(index=pick)
    def reconnects(self, index: int) -> None:
        alive = list(self.node.device.alive.values())
        self.node.reconnect(alive[index % len(alive)])

    @precondition(lambda self: self.node.device.alive)
    @rule(index=pick)
    def dies(self, index: int) -> None:
        alive = list(self.node.device.alive)
        self.node.bury(alive[index % len(alive)])

    @precondition(lambda self: self.node.holdings.running is None)
    @rule(job=st.sampled_from(JOBS), size=SIZES)
    def grows(self, job: JobId, size: int) -> None:
        said = (c.state for c in facts(self.node.holdings).contexts if c.job == job)
        if ContextState.LIVE in said:  # only who may hold the lock computes
            self.node.grow(job, size)

    @precondition(lambda self: self.node.news)
    @rule(index=pick)
    def news_arrives(self, index: int) -> None:
        self.node.learn(index % len(self.node.news))

    @precondition(lambda self: self.node.kills)
    @rule()
    def kill_takes_effect(self) -> None:
        self.node.finish_kill()

    # ── commands ──

    @rule(job=st.sampled_from(JOBS), need=SIZES)
    def command(self, job: JobId, need: int) -> None:
        self.epoch += 1
        op = OpId(f"g/{self.epoch}/n")
        event = ev.MakeResidentCommanded(
            at=self.node.tick(), op=op, epoch=Epoch(self.epoch), job=job, need=need
        )
        self.commands.append(event)
        self.node.hear(event)

    @precondition(lambda self: self.commands)
    @rule(index=pick)
    def command_again(self, index: int) -> None:
        """The wire repeats an old command, or the newest."""
        old = self.commands[index % len(self.commands)]
        self.node.hear(replace(old, at=self.node.tick()))

    @rule(job=st.sampled_from(JOBS))
    def forget(self, job: JobId) -> None:
        self.node.hear(ev.JobForgotten(at=self.node.tick(), job=job))

    # ── the backend, time, and the agent's own death ──

    @precondition(lambda self: self.node.asked)
    @rule(how=st.sampled_from(("ok", "ok", *FAULTS)), left=st.integers(0, 3))
    def backend(self, how: str, left: int) -> None:
        self.node.backend(how, left=left)

    @precondition(lambda self: self.node.answers)
    @rule(index=pick)
    def answer_again(self, index: int) -> None:
        old = self.node.answers[index % len(self.node.answers)]
        before = self.node.holdings
        self.node.hear(replace(old, at=self.node.tick()))
        assert self.node.holdings == before, "an answer counts once"

    @rule()
    def deadline(self) -> None:
        self.node.wake()

    @rule()
    def agent_restarts(self) -> None:
        self.node.restart()

    @invariant()
    def all_is_well(self) -> None:
        self.node.check()

    def teardown(self) -> None:
        """Once nothing fails any more, the last command is answered and nothing is left hanging."""
        for _ in range(200):
            if not self.node.settle_one():
                break
        assert self.node.holdings.running is None, "the operation never ended"
        if self.commands:
            assert self.commands[-1].op in self.node.reports


class WaitingNodeMachine(NodeMachine):
    """The same with ``on_stuck: wait``: nobody is killed."""

    rules_of_node = NodeRules(retries=1, on_stuck="wait", room_wait=1.0)

    @invariant()
    def nobody_is_killed(self) -> None:
        assert not self.node.kills


SETTINGS = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)
TestNode = NodeMachine.TestCase
TestNode.settings = SETTINGS
TestWaitingNode = WaitingNodeMachine.TestCase
TestWaitingNode.settings = SETTINGS
