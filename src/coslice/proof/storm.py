"""Everything that can happen in a world, each as one draw: work that goes on, and trouble.

A seed draws which kinds of trouble it has and how much of each (a run with every kind at once would get
nowhere), the sizes of everything, and then one thing after the other. All choices come from one generator,
so a seed replays exactly.
"""

from collections.abc import Callable
from random import Random

from coslice.core.context import NodeRules
from coslice.core.group import GroupRules
from coslice.core.ids import GroupId, JobId, NodeId
from coslice.core.policy import NAMES
from coslice.proof.device import MIB
from coslice.proof.joint import Setup
from coslice.proof.story import Story
from coslice.proof.trouble import Trouble

CAPACITY = 100 * MIB
Draw = Callable[[], bool]
NODE_LOSS = 60.0


def setup_for(rng: Random) -> Setup:
    """What kind of cluster the seed has."""
    freezing = rng.random() < 0.3
    groups = 2 if rng.random() < 0.25 else 1
    nodes = rng.choice((1, 1, 2, 2, 3))
    jobs = rng.choice((2, 3, 3, 4))
    return Setup(
        groups=tuple(GroupId(f"g{i}") for i in range(groups)),
        nodes=tuple(NodeId(f"n{i}") for i in range(nodes)),
        jobs=tuple(JobId("abcd"[i]) for i in range(jobs)),
        rules=GroupRules(
            quantum=20.0,
            max_hold=rng.choice((10.0, 60.0)) if freezing else rng.choice((60.0, 200.0)),
            on_overrun=rng.choice(("evict", "evict", "warn")),
            node_loss=NODE_LOSS,
            op_timeout=900.0 if freezing else rng.choice((60.0, 900.0)),
            stuck_retry=15.0,
            max_attempts=rng.choice((2, 3)),
        ),
        node_rules=NodeRules(
            retries=rng.choice((0, 1, 1, 2)),
            on_stuck=rng.choice(("kill", "kill", "wait")),
            stuck_grace=rng.choice((0.0, 12.0)),
            snapshot_timeout=20.0,
            restore_timeout=20.0,
            room_wait=rng.choice((1.0, 5.0)),
        ),
        policy=rng.choice(("fifo", *NAMES)),
        capacity=CAPACITY,
        divisible=frozenset(JobId(name) for name in "abcd" if rng.random() < 0.5),
        whole=frozenset(JobId(name) for name in "abcd" if freezing and rng.random() < 0.7),
    )


class Storm(Trouble):
    """Draws one thing after the other, as its seed has it."""

    def __init__(self, seed: int, story: Story) -> None:
        super().__init__(seed, story, setup_for)
        self._plan()
        for job in self.world.setup.jobs:
            self._start(job)

    def _plan(self) -> None:
        work: tuple[tuple[int, Draw], ...] = (
            (14, self.client_acts),
            (10, self.client_heard),
            (10, self.client_told),
            (10, self.node_heard),
            (8, self.node_told),
            (9, self.move_ends),
            (4, self.agent_learns),
            (5, self.comes_back),
            (3, self.loss_noticed),
            (2, self.time_jumps),
            (2, self.job_starts),
        )
        trouble: tuple[tuple[int, Draw], ...] = (
            (3, self.call_cancelled),
            (2, self.client_stream_breaks),
            (2, self.agent_stream_breaks),
            (1, self.orchestrator_crashes),
            (1, self.agent_crashes),
            (1, self.client_dies),
            (1, self.job_dies),
            (1, self.process_dies),
            (2, self.message_doubled),
            (2, self.message_overtaken),
            (1, self.message_vanishes),
            (4, self.move_fails),
            (1, self.move_ends_late),
            (1, self.agent_hangs),
            (1, self.client_stops),
            (1, self.loop_stalls),
            (1, self.nodes_change),
            (3, self.node_drained),
            (1, self.job_forgotten),
            (1, self.job_evicted),
            (2, self.stranger_yields),
            (1, self.out_of_memory),
            (2, self.newcomer_registers),
            (1, self.hangs_up),
        )
        self._work = [draw for weight, draw in work for _ in range(weight)]
        chosen = [t for t in trouble if self.rng.random() < 0.4] or [self.rng.choice(trouble)]
        self._trouble = [draw for weight, draw in chosen for _ in range(weight)]
        self._much = self.rng.choice((0.03, 0.08, 0.16))

    def step(self) -> None:
        """One thing happens, a moment after the last."""
        world, rng = self.world, self.rng
        world.advance(rng.random() * 0.2)
        if rng.random() < self._much and rng.choice(self._trouble)():
            return
        for _ in range(12):
            if rng.choice(self._work)():
                return
        self.time_jumps()
