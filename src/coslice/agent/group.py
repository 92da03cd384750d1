"""One group as this node serves it: the core's decisions on one side, processes and memory on the other.

Owns the group's driver (over ``core.context``), carries its effects out through a backend, turns what
happens to processes into events, and enforces the device budget. Who leaves, who comes and what a failure
means is the core's business; how bytes move is the backend's.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, assert_never

from msgspec.structs import replace

from coslice.agent import convert
from coslice.agent.ahead import Ahead
from coslice.agent.backends.base import MoveError
from coslice.agent.backends.resolve import Backends
from coslice.agent.buffers import HostBuffers, NoHostMemory
from coslice.agent.common import CommonCopies
from coslice.agent.config import AgentConfig, GroupDevices
from coslice.agent.members import Member, Members
from coslice.agent.metrics import UNKNOWN, Meter
from coslice.agent.occupancy import NOTABLE
from coslice.agent.processes import kill
from coslice.agent.sampler import UsageSampler
from coslice.agent.tiers.disk import Damaged
from coslice.agent.watch import Watch
from coslice.core import context as core
from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.holdings import Context, Holdings, NodeRules, find, fits_beside, need_of, others
from coslice.core.ids import Epoch, Incarnation, JobId, MemberId, OpId
from coslice.core.node_facts import facts
from coslice.core.outcome import Rejected, Step
from coslice.errors import ConfigError
from coslice.observe import decisions
from coslice.observe.tracing import Tracing
from coslice.runtime.clock import Clock
from coslice.runtime.driver import Driver, Stopped
from coslice.store.codec import Codec
from coslice.store.slot import Slot
from coslice.wire.v1 import coslice_pb2 as pb

log = logging.getLogger(__name__)

CODEC = Codec(Holdings, kind="holdings")
KILL_SECONDS = 30.0
_MOVING = (ev.ContextState.LEAVING, ev.ContextState.RETURNING)


def holdings_for(
    config: AgentConfig, devices: GroupDevices, stored: Holdings | None, *, now: float, move_seconds: float
) -> Holdings:
    """What the group begins with: what was stored, under the budgets and rules of today.

    ``move_seconds``: within which every backend has ended a move, one way or the other.
    """
    rules = NodeRules(
        retries=config.retries,
        snapshot_timeout=move_seconds,
        restore_timeout=move_seconds,
        on_stuck=config.on_stuck,
        stuck_grace=config.stuck_grace,
    )
    fresh = stored or Holdings(group=devices.group, node=config.node)
    fresh = replace(
        fresh,
        device_budget=devices.device_budget,
        host_budget=config.host_budget + config.disk_budget,
        accelerator=devices.accelerator,
        rules=rules,
    )
    return fresh if stored is None else core.restarted(fresh, now)


class ServedGroup:
    def __init__(
        self,
        devices: GroupDevices,
        config: AgentConfig,
        *,
        holdings: Holdings,
        slot: Slot[Holdings],
        clock: Clock,
        members: Members,
        buffers: HostBuffers,
        common: CommonCopies,
        backend: Backends,
        publish: Callable[[pb.AgentMessage], None],
        meter: Meter | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.id = devices.group
        self._where = {"group": devices.group, "node": config.node}
        self._watch = Watch(devices.group, config.node, meter, tracing)
        self.devices = devices
        self._config, self._clock = config, clock
        self._members, self._buffers, self._backend, self._publish = members, buffers, backend, publish
        self._common = common
        self._in_common: dict[str, tuple[tuple[str, int], ...]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._admitting: dict[JobId, list[asyncio.Event]] = {}
        self._ahead: Ahead | None = None
        self._calling_off: asyncio.Task[None] | None = None
        self._killed: dict[JobId, str] = {}  # why, until the job's last process here is gone
        self._reason = ""
        self.sampler = UsageSampler(
            self.id,
            budget=devices.device_budget,
            interval=config.sample_interval,
            members=lambda: [member for member in members.of_group(self.id) if member.admitted],
            measured=self._measured,
            out_of_memory=self.kill,
            killable=self._killable,
            common=lambda: common.bytes(self.id),
        )
        self.driver: Driver[Holdings, ev.NodeEvent, fx.NodeEffect] = Driver(
            name=f"group {self.id}",
            state=holdings,
            step=core.step,
            next_deadline=core.next_deadline,
            deadline_passed=lambda at: ev.DeadlinePassed(at=at),
            clock=clock,
            save=slot.save,
            perform=self.perform,
            record=self._record,
        )
        self.driver.start_with(core.resume(holdings))

    # ── what is known ──────────────────────────────────────────────────────

    @property
    def epoch(self) -> Epoch:
        return self.driver.state.epoch

    def facts(self) -> ev.NodeFacts:
        """The core's word with today's measures: they are ours, not the core's."""
        said = facts(self.driver.state)
        return replace(
            said,
            contexts=tuple([self._why_it_stays(fact) for fact in said.contexts]),
            device_used=self.sampler.now(),
            host_budget=self._buffers.budget,
            host_used=self._buffers.used,
            host_held=self._buffers.held,
            disk_budget=self._buffers.disk.budget if self._buffers.disk is not None else 0,
            disk_used=self._buffers.disk.used if self._buffers.disk is not None else 0,
        )

    def _why_it_stays(self, fact: ev.ContextFact) -> ev.ContextFact:
        """With the process that it waits for, if that can be told: the core hears of it when time is up."""
        if fact.reason or fact.state not in _MOVING:
            return fact
        members = self._members.of_job(self.id, fact.job)
        gone = next((member for member in members if member.lost), None)
        if gone is None or not self._backend.asks(gone):
            return fact
        text = f"process {gone.pid} has closed its channel to the agent, or is to come back"
        return replace(fact, reason=text)

    def residency(self) -> pb.Residency:
        return convert.residency_to_pb(self.id, self.facts(), self._reason)

    def device_status(self) -> pb.DeviceStatus:
        return pb.DeviceStatus(
            group=self.id,
            accelerator=self.devices.accelerator,
            cpus=self.devices.cpus,
            budget_bytes=self.devices.device_budget,
            used_bytes=self.sampler.used,
            peak_bytes=self.sampler.peak,
        )

    def _killable(self) -> frozenset[JobId]:
        on = (ev.ContextState.LIVE, ev.ContextState.LEAVING, ev.ContextState.RETURNING)
        uninvited = frozenset(  # closed its channel, gave its memory back, and takes some without its turn
            member.job
            for member in self._members.of_group(self.id)
            if member.parked and member.closed and member.usage() - member.residual >= NOTABLE
        )
        return uninvited or frozenset(f.job for f in facts(self.driver.state).contexts if f.state in on)

    # ── events ─────────────────────────────────────────────────────────────

    def command(self, command: pb.MakeResident) -> None:
        """Of the orchestrator. Refused ones are answered too: nobody shall wait for them."""
        self._watch.commanded(command)
        if admissions := tuple(self._admitting.get(JobId(command.job), ())):
            self._spawn(f"command {command.op}", self._make_resident_after(admissions, command))
        else:
            self._make_resident(command)

    async def _make_resident_after(
        self, admissions: Sequence[asyncio.Event], command: pb.MakeResident
    ) -> None:
        """The job's state may be on its way out: granted now, it would run without it."""
        for admission in admissions:
            await admission.wait()
        self._make_resident(command)

    def _make_resident(self, command: pb.MakeResident) -> None:
        self.sampler.flush()
        event = ev.MakeResidentCommanded(
            at=self._clock.now(),
            op=OpId(command.op),
            epoch=Epoch(command.epoch),
            job=JobId(command.job),
            need=command.need_bytes,
            freeze=tuple(JobId(job) for job in command.freeze),
        )
        try:
            self.driver.put(event).add_done_callback(functools.partial(self._taken, command))
        except Stopped as stopped:
            self._not_taken(command, stopped)

    def _taken(self, command: pb.MakeResident, posted: "asyncio.Future[None]") -> None:
        error = None if posted.cancelled() else posted.exception()
        if isinstance(error, Rejected):
            self._watch.refused(command.op, str(error))
            failed = pb.OpFailed(
                op=command.op,
                group=self.id,
                epoch=command.epoch,
                culprit=command.job,
                reason=str(error),
                residency=self.residency(),
            )
            self._publish(pb.AgentMessage(failed=failed))
        elif error is not None:
            self._not_taken(command, error)

    def _not_taken(self, command: pb.MakeResident, error: BaseException) -> None:
        self._watch.refused(command.op, str(error))
        log.warning("command %s was not taken: %s", command.op, error)

    def forget(self, job: str) -> None:
        self.driver.tell(ev.JobForgotten(at=self._clock.now(), job=JobId(job)))

    @contextmanager
    def admitting(self, job: JobId) -> Iterator[None]:
        """While a process of the job registers; commands for the job wait for the end of it."""
        done = asyncio.Event()
        self._admitting.setdefault(job, []).append(done)
        try:
            yield
        finally:
            self._admitting[job].remove(done)
            if not self._admitting[job]:
                del self._admitting[job]
            done.set()

    def is_coming(self, job: JobId) -> bool:
        """Is room being made for the job already? Then its state need not leave to come back at once."""
        running = self.driver.state.running
        return running is not None and running.job == job

    def fits(self, member: Member) -> bool:
        """May this process's state stay on the device, beside whoever is there?

        Only among jobs that declared their needs: what a job has registered when it starts is less than what
        it will use, and then the job that holds the device would run out of memory.
        """
        holdings = self.driver.state
        beside = others(holdings, member.job)
        there = member.state_bytes or member.usage() - member.residual >= NOTABLE
        if not beside or not there:
            return True
        if not member.need or not all(declared(context) for context in beside):
            return False
        context = find(holdings, member.job)
        here = member.state_bytes + (0 if context is None else context.bytes)
        need = max(here, need_of(holdings, member.job, member.need))
        return fits_beside(holdings, member.job, need, beside)

    async def registered(self, member: Member) -> None:
        """Raises ``Rejected`` as the core does."""
        event = ev.MemberRegistered(
            at=self._clock.now(),
            job=member.job,
            incarnation=member.incarnation,
            member=member.id,
            pid=member.pid,
            start_time=member.started,
            bytes=member.state_bytes,
            need=member.need,
            parked=member.parked,
            part=not member.parked and member.away > 0,
            divisible=member.divisible,
            whole=self._backend.freezes(member),
            unkept=member.unkept,
            common=_common(member),
        )
        await self.driver.post(event)
        member.admitted = member.announced = True
        self.sampler.wake()
        self._prepare()

    def _prepare(self) -> None:
        """Host memory for jobs that will have to leave is made ready before they must, where it is plenty."""
        contexts = self.driver.state.contexts
        needs = [declared(context) for context in contexts]
        if len(contexts) < 2 or (all(needs) and sum(needs) <= self.devices.device_budget):
            return
        for member in self._members.of_group(self.id):
            if not member.sleeps and member.divisible and self._buffers.size(member.buffer) < member.kept:
                member.prepare(member.kept)

    def resized(self, member: Member) -> None:
        at = self._clock.now()
        event = ev.MemberResized(
            at=at,
            job=member.job,
            member=member.id,
            bytes=member.state_bytes,
            need=member.need,
            unkept=member.unkept,
            common=_common(member),
        )
        self.driver.tell(event)
        if self._in_common.get(member.buffer) != event.common:
            self._in_common[member.buffer] = event.common
            self.sampler.restart(member.job)
        if self._buffers.size(member.buffer):  # it has one, that is now too small
            self._prepare()

    def gone(self, job: JobId, member: MemberId, reason: str) -> None:
        reason = self._killed.get(job, reason)
        if not self._members.of_job(self.id, job):
            self._killed.pop(job, None)
        self._in_common.pop(f"{self.id}/{member}", None)
        self._trim_common()
        self.driver.tell(ev.MemberGone(at=self._clock.now(), job=job, member=member, reason=reason))

    def _measured(self, job: JobId, used: int) -> None:
        self.driver.tell(ev.UsageMeasured(at=self._clock.now(), job=job, bytes=used))

    # ── effects ────────────────────────────────────────────────────────────

    def perform(self, effect: fx.NodeEffect) -> None:
        match effect:
            case fx.RunSnapshot():
                self._spawn(f"snapshot {effect.op}", self._snapshot(effect))
            case fx.RunRestore():
                self._spawn(f"restore {effect.op}", self._restore(effect))
            case fx.KillJob():
                self.kill(effect.job, effect.reason)
            case fx.ReportDone():
                self._end_ahead()
                self._reported(effect)
                self._publish(convert.done_to_pb(self.id, effect, self.residency()))
            case fx.ReportFailed():
                self._end_ahead()
                self._reported(effect)
                self._publish(convert.failed_to_pb(self.id, effect, self.residency()))
            case fx.PushFacts():
                self._publish(pb.AgentMessage(residency=self.residency()))
            case fx.FreeBuffers():
                for member in effect.members:
                    self._buffers.free(f"{self.id}/{member}")
            case _:
                assert_never(effect)

    def _reported(self, report: fx.ReportDone | fx.ReportFailed) -> None:
        self._reason = report.reason
        self._watch.reported(report)
        self._trim_common()

    def _trim_common(self) -> None:
        """What nobody has on the device, and the job that comes does not want, leaves it."""
        running = self.driver.state.running
        coming = () if running is None else self._members.of_job(self.id, running.job)
        self._common.trim(self.id, lambda digest: any(digest in member.common for member in coming))

    def _backend_of(self, members: Sequence[Member]) -> str:
        """For people: which backend moves them."""
        if not isinstance(self._backend, Backends):
            return self._backend.capabilities().name
        try:
            return self._backend.name_for(members)
        except (ConfigError, MoveError):  # the move says so itself
            return UNKNOWN

    async def _snapshot(self, effect: fx.RunSnapshot) -> None:
        members = self._members.of_job(self.id, effect.job)
        name = f"{effect.op}/{effect.job}/{effect.attempt}"
        stage = self._watch.stage("snapshot", effect.op, effect.job, self._backend_of(members))
        try:
            ahead = await self._bring_ahead(effect)
            done = await self._backend.snapshot_part(members, op=name, least=effect.least, ahead=ahead)
        except Exception as error:
            stage.failed(error)
            self.driver.tell(
                ev.SnapshotFailed(
                    at=self._clock.now(),
                    job=effect.job,
                    op=effect.op,
                    attempt=effect.attempt,
                    reason=_text(error, name),
                    busy=isinstance(error, MoveError) and error.busy,
                    no_room=isinstance(error, MoveError) and error.no_room,
                )
            )
            return
        stage.snapshotted(done)
        self._trim_common()
        self.driver.tell(
            ev.SnapshotSucceeded(
                at=self._clock.now(),
                job=effect.job,
                op=effect.op,
                attempt=effect.attempt,
                bytes=done.bytes,
                residual=done.residual,
                partly=done.left > 0,
                seconds=done.seconds,
            )
        )

    async def _bring_ahead(self, effect: fx.RunSnapshot) -> Ahead | None:
        """The job that room is made for may come in while the other leaves."""
        await self._clear_of_ahead(but=effect.op)
        running = self.driver.state.running
        if running is None or running.op != effect.op:
            return None
        members = self._members.of_job(self.id, running.job)
        if any(self._buffers.spilled(member.buffer) for member in members):
            self.expect(running.job)
            return None
        if self._ahead is None:
            self._ahead = Ahead.for_job(
                running.job,
                members,
                op=effect.op,
                room=lambda: self.devices.device_budget - self.sampler.now(),
            )
        return self._ahead

    def expect(self, job: JobId) -> None:
        """The job's turn is near: what of its state is on disk is fetched, as far as memory allows."""
        for member in self._members.of_job(self.id, job):
            if self._buffers.spilled(member.buffer):
                self._spawn(f"fetch {member.buffer}", self._fetch(member.buffer))

    async def _fetch(self, name: str) -> None:
        try:
            await self._buffers.fetch(name)
        except (NoHostMemory, Damaged) as error:  # the restore says so, if it still is so
            log.info("not fetched ahead of its turn: %s", error)

    async def _clear_of_ahead(self, *, but: OpId) -> None:
        """Nothing of an operation that is over may be on its way."""
        if self._ahead is not None and self._ahead.op != but:
            ahead, self._ahead = self._ahead, None
            await ahead.call_off()
        if self._calling_off is not None:
            await asyncio.shield(self._calling_off)

    def _end_ahead(self) -> None:
        """The operation is over: what came without its restore goes."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            self._calling_off = asyncio.get_running_loop().create_task(ahead.call_off())

    async def _restore(self, effect: fx.RunRestore) -> None:
        for admission in tuple(self._admitting.get(effect.job, ())):
            await admission.wait()  # its state may be on its way out
        members = self._members.of_job(self.id, effect.job)
        name = f"{effect.op}/{effect.job}/{effect.attempt}"
        await self._clear_of_ahead(but=effect.op)
        if self._ahead is not None:
            self._ahead.end()
        stage = self._watch.stage("restore", effect.op, effect.job, self._backend_of(members))
        try:
            done = await self._backend.restore(members, op=name)
        except Exception as error:
            stage.failed(error)
            self.driver.tell(
                ev.RestoreFailed(
                    at=self._clock.now(),
                    job=effect.job,
                    op=effect.op,
                    attempt=effect.attempt,
                    reason=_text(error, name),
                    lost=isinstance(error, MoveError) and error.lost,
                )
            )
            return
        stage.restored(done)
        self.driver.tell(
            ev.RestoreSucceeded(
                at=self._clock.now(),
                job=effect.job,
                op=effect.op,
                attempt=effect.attempt,
                bytes=done.bytes,
                seconds=done.seconds,
            )
        )

    def kill(self, job: JobId, reason: str) -> None:
        """End the job's processes of this node: those that registered with us, and no other."""
        self._spawn(f"kill {job}", self._kill(job, reason))

    async def _kill(self, job: JobId, reason: str) -> None:
        members = self._members.of_job(self.id, job)
        self._reason = reason
        if members:
            self._killed[job] = reason
        further = await self._backend.retire(members)
        for each in further:  # processes of the job that did not register themselves
            kill(each.pid, each.started)
        hit = [member for member in members if member.process is not None and member.process.kill()]
        self._watch.killed()
        log.warning("killing job %s (pids %s): %s", job, ", ".join(str(m.pid) for m in hit) or "none", reason)
        ends = [member.process.ended.wait() for member in members if member.process is not None]
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await asyncio.gather(*ends)
        except TimeoutError:
            log.error("job %s: processes survive SIGKILL, probably in the kernel", job)
            return  # the core has its own bound, and says so
        incarnation = members[0].incarnation if members else Incarnation("")
        self.driver.tell(ev.JobKilled(at=self._clock.now(), job=job, incarnation=incarnation, reason=reason))

    # ── life ───────────────────────────────────────────────────────────────

    async def is_empty(self) -> bool:
        """Is nothing of any job here that could be needed again?"""
        await self.driver.post(ev.DeadlinePassed(at=self._clock.now()))  # what was told before is done then
        return not (self._members.of_group(self.id) or self._tasks or self.driver.state.running)

    async def close(self) -> None:
        if self._calling_off is not None:
            self._calling_off.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"{self.id}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s broke: %s", task.get_name(), error, exc_info=error)

    def _record(self, at: float, event: ev.NodeEvent, step: Step[Holdings, fx.NodeEffect]) -> None:
        decisions.tell(self._where, event, step)


def declared(context: Context) -> int:
    """What the job said it needs; 0: nothing."""
    return max(context.need, max((member.need for member in context.members), default=0))


def _common(member: Member) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(member.common.items()))


def _text(error: Exception, name: str) -> str:
    if isinstance(error, MoveError):
        return str(error)
    log.error("%s broke", name, exc_info=error)
    return f"the agent could not do it: {error!r}"
