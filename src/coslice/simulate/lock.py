"""One group's lock on the virtual clock: the real core, its deadlines, and who hears its effects."""

from typing import TYPE_CHECKING, assert_never

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core import group as core
from coslice.core.brief import brief
from coslice.core.group_state import Swapping
from coslice.core.ids import GroupId, NodeId
from coslice.core.invariants import check_group_step
from coslice.core.outcome import Rejected
from coslice.core.policy import policy_named
from coslice.simulate.node import Node
from coslice.simulate.spec import Pool

if TYPE_CHECKING:
    from coslice.simulate.engine import Engine


class Lock:
    __slots__ = (
        "_due",
        "_stirred",
        "_swap_begun",
        "busy_s",
        "engine",
        "name",
        "nodes",
        "policy",
        "pool",
        "state",
        "swap_s",
    )

    def __init__(self, engine: "Engine", pool: Pool, policy: str, rules: core.GroupRules) -> None:
        self.engine, self.pool, self.name = engine, pool, pool.name
        self.policy = policy_named(pool.policy or policy)
        names = [NodeId(f"{pool.name}-{i}" if pool.nodes > 1 else pool.name) for i in range(pool.nodes)]
        self.state = core.new_group(GroupId(pool.name), nodes=names, rules=rules)
        self.nodes = {name: Node(engine, self, name, pool) for name in names}
        self._due: float | None = None
        self._stirred = False
        self._swap_begun: float | None = None
        self.busy_s = self.swap_s = 0.0

    def post(self, event: ev.GroupEvent) -> None:
        """Hear it now; what is posted meanwhile is heard after it, in the order of its coming."""
        engine = self.engine
        if engine.draining:
            engine.inbox.append((self, event))
            return
        inbox, engine.draining = engine.inbox, True
        try:
            self.take(event)
            while inbox:
                lock, what = inbox.popleft()
                lock.take(what)
        finally:
            engine.draining = False

    def waits_for(self, node: NodeId) -> bool:
        now = self.state.occupancy
        return type(now) is Swapping and node in now.pending

    def take(self, event: ev.GroupEvent) -> None:
        """Step, keep the new state, carry out what follows; in that order, as the driver does."""
        before, engine = self.state, self.engine
        try:
            taken = core.step(before, event, self.policy)
        except Rejected:
            engine.rejected += 1
            return
        engine.core_steps += 1
        self.state = after = taken.state
        if engine.judge:
            check_group_step(before, event, taken)
        if engine.journal is not None:
            engine.journal.record(self.name, engine.now, event, taken, brief(after))
        if before.occupancy is not after.occupancy:
            swapping = type(after.occupancy) is Swapping
            if swapping or self._swap_begun is not None:
                self._count_swap(swapping)
        for effect in taken.effects:
            if type(effect) is fx.Grant:
                engine.granted(self, effect)
            elif type(effect) is fx.MakeResident:
                node = self.nodes[effect.node]
                if node.attached:
                    node.command(effect)
            elif type(effect) is fx.Refuse:
                engine.refused(effect)
            elif type(effect) is fx.LoseLease:
                engine.lost(self, effect)
            elif type(effect) is fx.AskYield or type(effect) is fx.ForgetJob:
                pass
            else:
                assert_never(effect)
        if not self._stirred:
            self._stirred = True
            engine.stirred.append(self)
        if engine.gate is not None:
            engine.gate.heard(self, event, taken)

    def _count_swap(self, swapping: bool) -> None:
        now, begun, warm = self.engine.now, self._swap_begun, self.engine.scenario.warmup
        if begun is not None and now > warm:
            self.swap_s += now - (begun if begun > warm else warm)
        self._swap_begun = now if swapping else None

    def close(self) -> None:
        """The end of the simulation: what is under way counts so far."""
        self._count_swap(False)

    def arm(self) -> None:
        self._stirred = False
        due = core.next_deadline(self.state)
        if due is not None and (self._due is None or due < self._due):
            self._due = due
            self.engine.later(due, self._wake, due)

    def _wake(self, planned: float) -> None:
        if planned != self._due:
            return  # an earlier one was planned after it
        self._due = None
        due = core.next_deadline(self.state)
        if due is None:
            return
        if due <= self.engine.now:
            self.post(ev.DeadlinePassed(at=self.engine.now))
        else:
            self._due = due
            self.engine.later(due, self._wake, due)
