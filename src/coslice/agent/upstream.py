"""The agent's upstream face: llm-d's ``SnapshotAgentService`` over the direct API and the same members.

A call begins an operation and answers with its name; another asks what became of it. Operations are durable
and outlive the agent: one that a restart interrupted is carried on when its processes are back. Upstream's
words end in this file and the ``upstream_*`` beside it.

Better than upstream: byte counts are measured, a restore of what is on the device is an operation too, a
failed snapshot leaves the job running, and no job is faulted for good.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio

from coslice.agent import upstream_request as requests
from coslice.agent.backends.base import ProcessRef
from coslice.agent.backends.resolve import CHANNEL, Backends
from coslice.agent.direct import NO_GROUP, DirectApi, DirectRefused
from coslice.agent.discovery import procfs
from coslice.agent.group import ServedGroup
from coslice.agent.host import AnonymousMemory, Gone
from coslice.agent.members import Member, Members
from coslice.agent.occupancy import Occupancy
from coslice.agent.peer import Peer, Unidentified, process_of
from coslice.agent.processes import alive
from coslice.agent.registry import RegistrationRefused, Registry
from coslice.agent.upstream_channel import BROKEN, UpstreamChannel
from coslice.agent.upstream_ledger import NOTABLE, Entry, Ledger, Place
from coslice.agent.upstream_operations import Operation, Operations, Order
from coslice.core.events import ContextState
from coslice.core.ids import GroupId, JobId
from coslice.errors import ConfigError
from coslice.security import access
from coslice.wire.status import grpc_status
from coslice.wire.upstream import snapshot_agent_pb2 as up
from coslice.wire.upstream import snapshot_agent_pb2_grpc as up_grpc
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.workload.listening import tree

log = logging.getLogger(__name__)

SERVICE = up.DESCRIPTOR.services_by_name["SnapshotAgentService"].full_name
RULES = {
    f"/{SERVICE}/{name}": access.ANY
    for name in ("Snapshot", "Restore", "GetOperation", "Status", "WorkloadChannel")
}
HEALTH = ("app-channel", "app-endpoint", "cuda", "direct-memory", "noop", "tpu")
"""Names under which upstream's health service tells of backends."""
ABSENT = ("direct-memory", "noop")
COME_BACK = 60.0
"""Seconds that an interrupted operation waits for its processes to return to the restarted agent."""

Context = grpc.aio.ServicerContext[Any, Any]
_State: TypeAlias = up.JobState.ValueType

_GROUP_STATES: dict[ContextState, _State] = {
    ContextState.LIVE: up.JOB_STATE_RUNNING,
    ContextState.LEAVING: up.JOB_STATE_TRANSITIONING,
    ContextState.RETURNING: up.JOB_STATE_TRANSITIONING,
    ContextState.SAVED: up.JOB_STATE_SAVED,
    ContextState.LOST: up.JOB_STATE_FAULTED,
}
_NOTABLE = (
    up.JOB_STATE_IDLE,
    up.JOB_STATE_RUNNING,
    up.JOB_STATE_SAVED,
    up.JOB_STATE_FAULTED,
    up.JOB_STATE_TRANSITIONING,
)
"""Upstream has one state for a job, we have one in each group: the last of these is told."""
_STATUS = {"pending": up.OPERATION_STATUS_PENDING, "failed": up.OPERATION_STATUS_FAILED}


class UpstreamService(up_grpc.SnapshotAgentServiceServicer):
    def __init__(
        self,
        *,
        direct: DirectApi,
        registry: Registry,
        members: Members,
        groups: Mapping[GroupId, ServedGroup],
        occupancy: Occupancy,
        backends: Backends,
        operations: Operations,
        ledger: Ledger,
        port: Callable[[], int],
        accelerator: str,
        hello_timeout: float = 10.0,
    ) -> None:
        """``port``: where this agent listens. ``accelerator``: of jobs without a group."""
        self._direct, self._registry, self._members, self._groups = direct, registry, members, groups
        self._occupancy, self._backends = occupancy, backends
        self._operations, self._ledger = operations, ledger
        self._port, self._accelerator, self._hello_timeout = port, accelerator, hello_timeout
        self._moving: dict[str, Operation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._channels: set[UpstreamChannel] = set()

    def start(self) -> None:
        """Carry on with what the last agent began."""
        for operation in self._operations.pending():
            self._begin(operation, again=True)

    async def close(self) -> None:
        """Operations that are under way are the next agent's to carry on."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels:
            channel.leave()

    # ── the calls ──────────────────────────────────────────────────────────

    async def Snapshot(self, request: up.SnapshotRequest, context: Context) -> up.SnapshotResponse:
        job = await self._checked(request.job_id, context)
        try:
            asked = requests.asked(request.backend_config)
            await self._take_in(job, asked, context.peer())
            state = await self._state(job)
            if asked.fault and state in (up.JOB_STATE_UNSPECIFIED, up.JOB_STATE_IDLE):
                state = up.JOB_STATE_RUNNING  # upstream fails the operation then, not the call
            self._expect(job, state, up.JOB_STATE_RUNNING)
            order = Order(
                kind="snapshot",
                job=job,
                backend=asked.backend,
                mode=asked.mode,
                tags=asked.tags,
                pids=asked.pids,
            )
            operation = await self._start(order, fault=self._fault(job, asked))
        except DirectRefused as refusal:
            await _abort(context, refusal)
        return up.SnapshotResponse(operation_id=operation.id)

    async def Restore(self, request: up.RestoreRequest, context: Context) -> up.RestoreResponse:
        job = await self._checked(request.job_id, context)
        try:
            asked = requests.asked(request.backend_config)
            await self._take_in(job, asked, context.peer())
            state = await self._state(job)
            if state not in (up.JOB_STATE_RUNNING, up.JOB_STATE_FAULTED):
                self._expect(job, state, up.JOB_STATE_SAVED)
            order = Order(kind="restore", job=job, backend=asked.backend, tags=asked.tags)
            operation = await self._start(order, fault=self._fault(job, asked))
        except DirectRefused as refusal:
            await _abort(context, refusal)
        return up.RestoreResponse(operation_id=operation.id)

    async def GetOperation(
        self, request: up.GetOperationRequest, context: Context
    ) -> up.GetOperationResponse:
        found = self._operations.get(request.operation_id)
        if found is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"there is no operation {request.operation_id!r} on this node"
            )
        elapsed = self._operations.elapsed(found)
        if found.state != "complete":
            error = found.error if found.state == "failed" else None
            return up.GetOperationResponse(status=_STATUS[found.state], elapsed_ms=elapsed, error=error)
        return up.GetOperationResponse(
            status=up.OPERATION_STATUS_COMPLETE,
            storage_bytes=found.stored,
            snapshot_device_bytes=found.on_device,
            elapsed_ms=elapsed,
        )

    async def Status(self, request: up.StatusRequest, context: Context) -> up.StatusResponse:
        await self._survey(max_age=0.1)
        known = {JobId(e.job) for e in self._ledger.living(NO_GROUP)}
        states = {j: self._state_now(j) for j in known | {m.job for m in self._members.of_group(NO_GROUP)}}
        states |= {JobId(job): up.JOB_STATE_TRANSITIONING for job in self._moving}
        for group in self._groups.values():
            for fact in group.facts().contexts:
                so_far = states.get(fact.job, up.JOB_STATE_IDLE)
                state = up.JOB_STATE_RUNNING if fact.crowded else _GROUP_STATES[fact.state]
                states[fact.job] = max(so_far, state, key=_NOTABLE.index)
        return up.StatusResponse(
            job_statuses=[up.JobStatus(job_id=job, state=states[job]) for job in sorted(states)],
            accelerator_statuses=self._accelerators(),
        )

    async def WorkloadChannel(
        self, request_iterator: AsyncIterator[up.WorkloadMessage], context: Context
    ) -> AsyncIterator[up.AgentCommand]:
        channel = UpstreamChannel(ledger=self._ledger, measure=self._measure, broken=self._broken)
        self._channels.add(channel)
        serving = asyncio.create_task(self._serve(request_iterator, channel, context.peer()))
        try:
            while (command := await channel.next_command()) is not None:
                yield command
            if channel.closed is not None:
                await context.abort(*channel.closed)
        finally:
            self._channels.discard(channel)
            channel.end()
            serving.cancel()
            if channel.member is not None:
                channel.member.detach(channel)

    # ── operations ─────────────────────────────────────────────────────────

    async def _checked(self, job: str, context: Context) -> str:
        if denied := access.caller().problem(access.JOB, job):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, denied)
        return job

    async def _take_in(self, job: str, asked: requests.Asked, peer: str) -> None:
        """Processes that the request names become the job's; raises ``DirectRefused``."""
        if asked.backend:
            try:
                self._backends.named(asked.backend)
            except ConfigError as error:
                raise DirectRefused(grpc.StatusCode.NOT_FOUND, str(error)) from None
        if asked.fault or not (asked.pids or asked.urls):
            return
        if asked.urls and self._members.of_job(NO_GROUP, JobId(job)):
            return
        try:
            pids = asked.pids or await requests.engines(asked.urls)
            requests.may_name(pids, peer, self._port())
            await self._direct.take_in(job, pids, asked.spec)
        except ConfigError as error:
            raise DirectRefused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None

    def _expect(self, job: str, state: _State, wanted: _State) -> None:
        if state == wanted:
            return
        text = f"job {job} is {up.JobState.Name(state)}, not {up.JobState.Name(wanted)}"
        if (last := self._operations.last_of(job)) is not None:
            text += f"; its last operation was {last.order.kind} {last.id}"
        status = grpc.StatusCode.FAILED_PRECONDITION
        if state == up.JOB_STATE_TRANSITIONING:
            status = grpc.StatusCode.ABORTED
        elif state == up.JOB_STATE_IDLE and not self._members.of_job(NO_GROUP, JobId(job)):
            text = (
                f"no process of job {job!r} is known here: its workload registers first, or is named by pids"
            )
        elif state == up.JOB_STATE_IDLE:
            text += "; its processes use no device"
        elif state == up.JOB_STATE_FAULTED:
            text += "; where its state is was lost with an agent or a stream: restore it"
        raise DirectRefused(status, text)

    async def _start(self, order: Order, *, fault: str) -> Operation:
        """Durable when it returns; raises ``DirectRefused`` when another was faster."""
        if order.job in self._moving or self._direct.moving(order.job):
            self._expect(order.job, up.JOB_STATE_TRANSITIONING, up.JOB_STATE_RUNNING)
        members, absent = self._members.of_job(NO_GROUP, JobId(order.job)), self._absent(order.job)
        processes = [ProcessRef(m.pid, m.started) for m in members]
        processes += [ProcessRef(e.pid, e.started) for e in absent]
        operation = self._operations.new(order, processes)
        if fault:
            await self._operations.fail(operation, fault)
            return operation
        self._moving[order.job] = operation
        # Its caller may go away meanwhile: what is saved is also begun, or the next agent would do it.
        await asyncio.shield(self._spawn(self._saved(operation, again=bool(absent)), f"save {operation.id}"))
        return operation

    async def _saved(self, operation: Operation, *, again: bool) -> None:
        try:
            await self._operations.save(operation)
        except BaseException:
            del self._moving[operation.order.job]
            raise
        self._begin(operation, again=again)

    def _begin(self, operation: Operation, *, again: bool) -> None:
        """``again``: of a job whose processes were the last agent's, and have to come back first."""
        self._moving[operation.order.job] = operation
        self._spawn(self._carry_out(operation, again=again), f"{operation.order.kind} {operation.id}")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"upstream: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _carry_out(self, operation: Operation, *, again: bool) -> None:
        job = operation.order.job
        try:
            if again:
                await self._processes_back(operation)
            stored, on_device = await self._move(operation.order)
        except DirectRefused as refusal:
            if self._operations.get(operation.id) is operation:  # its stream broke, and that was told at once
                await self._operations.fail(operation, str(refusal))
        except Exception as error:
            log.exception("operation %s broke", operation.id)
            await self._operations.fail(operation, f"the agent could not do it: {error!r}")
        else:
            await self._operations.complete(operation, stored=stored, on_device=on_device)
        finally:
            if self._moving.get(job) is operation:
                del self._moving[job]

    def _broken(self, member: Member) -> None:
        operation = self._moving.get(member.job)
        if member.group == NO_GROUP and operation is not None:
            text = f"the {operation.order.kind} of {member.job} failed: process {member.pid}: {BROKEN}"
            self._spawn(self._operations.fail(operation, text), f"end of {operation.id}")

    async def _move(self, order: Order) -> tuple[int, int]:
        """Bytes in host memory and on the device when it is done."""
        if order.kind == "snapshot":
            out, nothing = await self._direct.snapshot(
                order.job,
                mode=order.mode or self._default_mode(order.job),
                tags=order.tags,
                timeout=0.0,
                pids=order.pids,
                backend=order.backend,
                admin=True,  # who named them was checked when it began
            )
            return (
                (self._held(order.job), self._on_device(order.job)) if nothing else (out.bytes, out.residual)
            )
        for member in self._members.of_job(NO_GROUP, JobId(order.job)):
            if isinstance(channel := member.channel, UpstreamChannel):
                channel.restore_tags = order.tags
        back, nothing = await self._direct.restore(order.job, timeout=0.0)
        return 0, self._on_device(order.job) if nothing else back.bytes

    def _held(self, job: str) -> int:
        """Bytes of the job that are in host memory, as far as anybody counted them."""
        members = self._members.of_job(NO_GROUP, JobId(job))
        return sum(m.state_bytes or self._ledger.of(m).freed for m in members if m.sleeps)

    def _on_device(self, job: str) -> int:
        """Bytes of the job's state there, as far as anybody has seen it move."""
        members = self._members.of_job(NO_GROUP, JobId(job))
        return sum(m.usage() if m.sleeps else max(m.usage(), self._ledger.of(m).freed) for m in members)

    def _absent(self, job: str) -> list[Entry]:
        """Its processes that the last agent moved, and that have not come back to this one."""
        known = {(m.pid, m.started) for m in self._members.of_job(NO_GROUP, JobId(job))}
        return [e for e in self._ledger.living(NO_GROUP, job) if (e.pid, e.started) not in known]

    async def _processes_back(self, operation: Operation) -> None:
        """Raises ``DirectRefused`` if they do not come."""

        def missing() -> list[int]:
            known = {(m.pid, m.started) for m in self._members.of_job(NO_GROUP, JobId(operation.order.job))}
            return [
                each.pid
                for each in operation.processes
                if (each.pid, each.started) not in known and alive(each.pid, each.started)
            ]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COME_BACK):
                while missing():
                    await self._members.changed()
        if gone := missing():
            raise DirectRefused(
                grpc.StatusCode.ABORTED,
                f"the agent restarted, and process {gone[0]} did not come back to it within {COME_BACK:g} s",
            )

    # ── what is known ──────────────────────────────────────────────────────

    async def _state(self, job: str) -> _State:
        """Raises ``DirectRefused`` for a job of an orchestrated group, and for a name that is none."""
        if job in self._moving or self._direct.moving(job):
            return up.JOB_STATE_TRANSITIONING
        try:
            members = self._direct.find(job)
        except DirectRefused as refusal:
            if refusal.status is grpc.StatusCode.NOT_FOUND:
                return self._state_now(JobId(job))
            raise
        if any(member.device == "cuda" for member in members):
            await self._survey(max_age=0.0)
        return self._state_now(JobId(job))

    def _state_now(self, job: JobId) -> _State:
        if job in self._moving or self._direct.moving(job):
            return up.JOB_STATE_TRANSITIONING
        members, absent = self._members.of_job(NO_GROUP, job), self._absent(job)
        if any(not entry.settled for entry in (*map(self._ledger.of, members), *absent)):
            return up.JOB_STATE_FAULTED
        if absent:
            here = any(e.place is Place.HERE for e in absent) or not all(m.sleeps for m in members)
            return up.JOB_STATE_RUNNING if here else up.JOB_STATE_SAVED
        if members and all(member.sleeps for member in members):
            return up.JOB_STATE_SAVED
        if not members or all(m.device == "cuda" and m.usage() == 0 for m in members):
            return up.JOB_STATE_IDLE
        return up.JOB_STATE_RUNNING

    def _fault(self, job: str, asked: requests.Asked) -> str:
        """Why upstream would begin the operation and fail it; empty: no reason."""
        members = self._members.of_job(NO_GROUP, JobId(job))
        connected = any(member.connected for member in members)
        if asked.backend == CHANNEL and not connected and not self._absent(job):
            return f"job {job} has no workload channel to this agent: it is to register, or to come back"
        return asked.fault

    def _default_mode(self, job: str) -> str:
        channels = (member.channel for member in self._members.of_job(NO_GROUP, JobId(job)))
        return next(
            (c.default_mode for c in channels if isinstance(c, UpstreamChannel) and c.default_mode), ""
        )

    async def _survey(self, *, max_age: float) -> None:
        if any(member.device == "cuda" for member in self._members):
            await self._occupancy.refresh(max_age=max_age)

    async def _measure(self, pid: int, device: str) -> int:
        """Bytes of a process on its device, by the kernel or the driver; 0 once it has ended."""
        if device == "cuda":
            return (await self._occupancy.refresh()).bytes_of(tree(pid))
        with contextlib.suppress(Gone), contextlib.closing(AnonymousMemory(pid)) as memory:
            return memory.measure(NOTABLE)
        return 0

    def _accelerators(self) -> list[up.AcceleratorStatus]:
        gpus = [
            up.AcceleratorStatus(id=gpu.uuid, memory_used_bytes=gpu.used, memory_total_bytes=gpu.total)
            for gpu in self._occupancy.last.gpus
        ]
        return gpus + [
            up.AcceleratorStatus(
                id=f"host/{group.id}",
                memory_used_bytes=group.sampler.used,
                memory_total_bytes=group.devices.device_budget,
            )
            for group in self._groups.values()
            if group.devices.accelerator == "host"
        ]

    # ── the workload channel ───────────────────────────────────────────────

    async def _serve(
        self, messages: AsyncIterator[up.WorkloadMessage], channel: UpstreamChannel, peer: str
    ) -> None:
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        silence = asyncio.get_running_loop().call_later(
            self._hello_timeout,
            channel.close,
            invalid,
            f"a channel begins with a registration, within {self._hello_timeout:g} s",
        )
        registering: asyncio.Task[None] | None = None
        try:
            async for message in messages:
                silence.cancel()
                kind = message.WhichOneof("message")
                if registering is None:
                    if kind != "register" or not message.register.job_id:
                        text = "the first message of a channel is its registration, with a job_id"
                        channel.close(invalid, text)
                        return
                    registering = asyncio.create_task(self._register(message.register, channel, peer))
                elif kind == "register":
                    channel.close(invalid, "this channel is registered already")
                    return
                else:
                    channel.hear(message.result)
            if registering is None:
                channel.close(invalid, "the channel ended before it was registered")
        except grpc.aio.AioRpcError as error:
            log.debug("an upstream workload channel broke: %s", error.details())
        finally:
            silence.cancel()
            if registering is not None:
                registering.cancel()
            channel.end()

    async def _register(self, said: up.RegisterWorkload, channel: UpstreamChannel, peer: str) -> None:
        try:
            if denied := access.caller().problem(access.JOB, said.job_id):
                raise RegistrationRefused(pb.DENIED, denied)
            message = await self._registration(said, peer)
            channel.default_mode = requests.MODES.get(said.capabilities.default_mode, "")
            await self._registry.register_identified(message, channel)
        except Unidentified as error:
            text = (
                f"job {said.job_id}: the agent cannot tell which process this is ({error}). Register with "
                "coslice.workload, which proves it over the agent's socket"
            )
            log.warning("%s", text)
            channel.close(grpc.StatusCode.PERMISSION_DENIED, text)
        except RegistrationRefused as refusal:
            log.info("refused job %r: %s", said.job_id, refusal)
            status = grpc.StatusCode.INVALID_ARGUMENT
            if refusal.code not in (pb.INVALID, pb.UNKNOWN_GROUP):
                status = grpc_status(refusal.code)
            channel.close(status, str(refusal))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("a registration broke")
            channel.close(grpc.StatusCode.INTERNAL, f"the agent could not register the process: {error!r}")

    async def _registration(self, said: up.RegisterWorkload, peer: str) -> pb.Register:
        """As if the process had registered with us: who it is by the kernel's word, where its state is by the
        ledger's. Raises ``Unidentified`` or ``RegistrationRefused``."""
        await self._registry.group_known(said.group)
        process = await asyncio.to_thread(process_of, peer, self._port())
        group = GroupId(said.group if self._groups else "")
        served = self._groups.get(group)
        device = self._accelerator if served is None else served.devices.accelerator
        modes = (requests.MODES.get(number, "") for number in said.capabilities.supported_modes)
        await self._end_older(group, JobId(said.job_id), process)
        entry = self._ledger.get(group, said.job_id, process.pid, process.started)
        if not entry.settled:
            entry = await self._ledger.settle(entry, await self._measure(process.pid, device))
        return pb.Register(
            job=said.job_id,
            group=group,
            incarnation=procfs.environment(process.pid).get("COSLICE_INCARNATION", ""),
            pid=process.pid,
            start_time=process.started,
            device=device,
            backend=CHANNEL,
            modes=[mode for mode in modes if mode] or ["offload", "discard"],
            parked=entry.place is not Place.HERE,
        )

    async def _end_older(self, group: GroupId, job: JobId, process: Peer) -> None:
        """The process's channel of before, if there is one. It speaks of its state in one way: raises
        ``RegistrationRefused`` for another."""
        for member in self._members.of_job(group, job):
            if (member.pid, member.started) != (process.pid, process.started) or member.channel is None:
                continue
            if not isinstance(member.channel, UpstreamChannel):
                text = f"process {process.pid} has a channel of coslice's own for job {job}: use one of both"
                raise RegistrationRefused(pb.INVALID, text)
            await member.channel.take_over()


async def _abort(context: Context, refusal: DirectRefused) -> NoReturn:
    await context.abort(refusal.status, str(refusal))
    raise AssertionError("abort raises")
