"""One node of one group: the real holdings (core.context), and a device whose moves take the cost's time.

What has to leave, what stays beside and what is retried is the core's decision. The node keeps the agent's
habits: facts travel with the report of an operation, and on their own when no operation runs.
"""

from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from coslice.core import context as core
from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.holdings import Holdings, NodeRules
from coslice.core.ids import GroupId, Incarnation, JobId, MemberId, NodeId
from coslice.core.node_facts import facts
from coslice.core.outcome import Rejected
from coslice.simulate.spec import Pool

if TYPE_CHECKING:
    from coslice.simulate.engine import Engine
    from coslice.simulate.lock import Lock


class Node:
    __slots__ = ("_due", "_left", "attached", "engine", "lock", "name", "state")

    def __init__(self, engine: "Engine", lock: "Lock", name: NodeId, pool: Pool) -> None:
        self.engine, self.lock, self.name = engine, lock, name
        self.attached = False
        self.state = Holdings(
            group=GroupId(pool.name),
            node=name,
            device_budget=pool.device,
            host_budget=pool.host,
            rules=NodeRules(),
        )
        self._left: tuple[str, float] = ("", 0.0)
        """The operation whose way out took how long: the way in may overlap with it."""
        self._due: float | None = None

    def attach(self) -> None:
        self.attached = True
        self.lock.post(
            ev.NodeAttached(
                at=self.engine.now, node=self.name, epoch=self.state.epoch, facts=facts(self.state)
            )
        )

    def detach(self) -> None:
        self.attached = False
        self.lock.post(ev.NodeDetached(at=self.engine.now, node=self.name))

    def command(self, effect: fx.MakeResident) -> None:
        self.hear(
            ev.MakeResidentCommanded(
                at=self.engine.now, op=effect.op, epoch=effect.epoch, job=effect.job, need=effect.need
            )
        )

    def register(self, job: JobId, incarnation: Incarnation, size: int, need: int) -> None:
        """The job has built its state under its first grant."""
        now = self.engine.now
        member = MemberId(f"{job}/{incarnation}/1/1")
        self.hear(
            ev.MemberRegistered(
                at=now,
                job=job,
                incarnation=incarnation,
                member=member,
                pid=1,
                start_time=1,
                bytes=size,
                need=need,
            )
        )
        self.hear(ev.UsageMeasured(at=now, job=job, bytes=size))

    def gone(self, job: JobId, incarnation: Incarnation) -> None:
        self.hear(ev.MemberGone(at=self.engine.now, job=job, member=MemberId(f"{job}/{incarnation}/1/1")))

    def hear(self, event: ev.NodeEvent) -> None:
        try:
            taken = core.step(self.state, event)
        except Rejected:
            return
        self.engine.node_steps += 1
        self.state = taken.state
        for effect in taken.effects:
            self._perform(effect)
        if self.state.running is not None:
            self._arm()

    def _arm(self) -> None:
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
            self.hear(ev.DeadlinePassed(at=self.engine.now))
        else:
            self._due = due
            self.engine.later(due, self._wake, due)

    def _perform(self, effect: fx.NodeEffect) -> None:
        if type(effect) is fx.PushFacts:
            if self.attached and self.state.running is None and not self._reports_now():
                self.lock.post(ev.NodeReported(at=self.engine.now, node=self.name, facts=facts(self.state)))
        elif type(effect) is fx.RunSnapshot or type(effect) is fx.RunRestore:
            self._move(effect)
        elif type(effect) is fx.ReportDone:
            self._report(
                ev.OpSucceeded(
                    at=self.engine.now,
                    op=effect.op,
                    node=self.name,
                    restored=effect.restored,
                    bytes_in=effect.bytes_in,
                    bytes_out=effect.bytes_out,
                    seconds=effect.seconds,
                    reason=effect.reason,
                    facts=facts(self.state),
                )
            )
        elif type(effect) is fx.ReportFailed:
            self._report(
                ev.OpFailed(
                    at=self.engine.now,
                    op=effect.op,
                    node=self.name,
                    culprit=effect.culprit,
                    reason=effect.reason,
                    stuck=effect.stuck,
                    pid=effect.pid,
                    facts=facts(self.state),
                )
            )
        elif type(effect) is fx.KillJob:
            self.engine.kill(effect.job)
            self.hear(ev.JobKilled(at=self.engine.now, job=effect.job, reason=effect.reason))
        elif type(effect) is fx.FreeBuffers:
            pass
        else:
            assert_never(effect)

    def _reports_now(self) -> bool:
        """A report of this very instant brings the facts with it."""
        return self.state.finished is not None and self.lock.waits_for(self.name)

    def _move(self, effect: fx.RunSnapshot | fx.RunRestore) -> None:
        context = core.find(self.state, effect.job)
        size = context.bytes if context is not None else 0
        cost = self.engine.cost
        if type(effect) is fx.RunSnapshot:
            seconds = cost.leaving(size)
            before = self._left[1] if self._left[0] == effect.op else 0.0
            self._left = (effect.op, before + seconds)
        else:
            seconds = cost.entering(size, after=self._left[1] if self._left[0] == effect.op else 0.0)
        self.engine.later(self.engine.now + seconds, self._moved, (effect, size, seconds))

    def _moved(self, move: tuple[fx.RunSnapshot | fx.RunRestore, int, float]) -> None:
        effect, size, seconds = move
        now, job, op, attempt = self.engine.now, effect.job, effect.op, effect.attempt
        failed = "simulated failure" if self.engine.fails() else ""
        event: ev.NodeEvent
        if type(effect) is fx.RunSnapshot:
            if failed:
                event = ev.SnapshotFailed(at=now, job=job, op=op, attempt=attempt, reason=failed)
            else:
                event = ev.SnapshotSucceeded(
                    at=now, job=job, op=op, attempt=attempt, bytes=size, residual=0, seconds=seconds
                )
        elif failed:
            event = ev.RestoreFailed(at=now, job=job, op=op, attempt=attempt, reason=failed)
        else:
            event = ev.RestoreSucceeded(at=now, job=job, op=op, attempt=attempt, bytes=size, seconds=seconds)
        self.hear(event)

    def _report(self, event: ev.OpSucceeded | ev.OpFailed) -> None:
        delay = self.engine.cost.handoff_s
        if delay:
            self.engine.later(self.engine.now + delay, self._deliver, event)
        else:
            self._deliver(event)

    def _deliver(self, event: ev.OpSucceeded | ev.OpFailed) -> None:
        if self.attached:
            now = self.engine.now
            self.lock.post(event if event.at == now else replace(event, at=now))
