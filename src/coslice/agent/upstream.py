"""The agent's upstream face: llm-d's ``SnapshotAgentService`` over the direct API and the same members.

A call begins an operation and answers with its name; another asks what became of it. Operations are durable
and outlive the agent: one that a restart interrupted is carried on when its processes are back. Upstream's
words end in this file and the ``upstream_*`` beside it: the calls here, operations, states, channels there.

Better than upstream: byte counts are measured, a restore of what is on the device is an operation too, a
failed snapshot leaves the job running, and no job is faulted for good.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio

from coslice.agent import upstream_request as requests
from coslice.agent.backends.resolve import CHANNEL, Backends
from coslice.agent.direct import NO_GROUP, DirectApi, DirectRefused
from coslice.agent.group import ServedGroup
from coslice.agent.members import Member, Members
from coslice.agent.occupancy import Occupancy
from coslice.agent.registry import Registry
from coslice.agent.upstream_ledger import Ledger
from coslice.agent.upstream_moves import Moves
from coslice.agent.upstream_operations import Operation, Operations, Order
from coslice.agent.upstream_serving import ChannelServer
from coslice.agent.upstream_states import State, States
from coslice.core.ids import GroupId, JobId
from coslice.errors import ConfigError
from coslice.security import access
from coslice.wire.upstream import snapshot_agent_pb2 as up
from coslice.wire.upstream import snapshot_agent_pb2_grpc as up_grpc

SERVICE = up.DESCRIPTOR.services_by_name["SnapshotAgentService"].full_name
RULES = {
    f"/{SERVICE}/{name}": access.ANY
    for name in ("Snapshot", "Restore", "GetOperation", "Status", "WorkloadChannel")
}
HEALTH = ("app-channel", "app-endpoint", "cuda", "direct-memory", "noop", "tpu")
"""Names under which upstream's health service tells of backends."""
ABSENT = ("direct-memory", "noop")

Context = grpc.aio.ServicerContext[Any, Any]
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
        lost: Callable[[Member, bool], None],
        hello_timeout: float = 10.0,
    ) -> None:
        """``port``, ``accelerator``, ``lost`` and ``hello_timeout``: as of ``ChannelServer``."""
        self._direct, self._members, self._backends = direct, members, backends
        self._operations, self._port = operations, port
        self.moves = Moves(direct=direct, members=members, operations=operations, ledger=ledger)
        self._states = States(
            direct=direct,
            members=members,
            groups=groups,
            occupancy=occupancy,
            ledger=ledger,
            moves=self.moves,
        )
        self._channels = ChannelServer(
            registry=registry,
            members=members,
            groups=groups,
            ledger=ledger,
            measure=occupancy.measure,
            broken=self.moves.broken,
            lost=lost,
            port=port,
            accelerator=accelerator,
            hello_timeout=hello_timeout,
        )

    def start(self) -> None:
        """Carry on with what the last agent began."""
        self.moves.resume()

    async def close(self) -> None:
        """Operations that are under way are the next agent's to carry on."""
        await self.moves.close()
        self._channels.close()

    # ── the calls ──────────────────────────────────────────────────────────

    async def Snapshot(self, request: up.SnapshotRequest, context: Context) -> up.SnapshotResponse:
        job = await self._checked(request.job_id, context)
        try:
            asked = requests.asked(request.backend_config)
            await self._take_in(job, asked, context.peer())
            state = await self._states.of(job)
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
            operation = await self._start(order, asked)
        except DirectRefused as refusal:
            await _abort(context, refusal)
        return up.SnapshotResponse(operation_id=operation.id)

    async def Restore(self, request: up.RestoreRequest, context: Context) -> up.RestoreResponse:
        job = await self._checked(request.job_id, context)
        try:
            asked = requests.asked(request.backend_config)
            await self._take_in(job, asked, context.peer())
            state = await self._states.of(job)
            if state not in (up.JOB_STATE_RUNNING, up.JOB_STATE_FAULTED):
                self._expect(job, state, up.JOB_STATE_SAVED)
            order = Order(kind="restore", job=job, backend=asked.backend, tags=asked.tags)
            operation = await self._start(order, asked)
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
        states = await self._states.of_all()
        return up.StatusResponse(
            job_statuses=[up.JobStatus(job_id=job, state=states[job]) for job in sorted(states)],
            accelerator_statuses=self._states.accelerators(),
        )

    async def WorkloadChannel(
        self, request_iterator: AsyncIterator[up.WorkloadMessage], context: Context
    ) -> AsyncIterator[up.AgentCommand]:
        async with aclosing(self._channels.serve(request_iterator, context)) as commands:
            async for command in commands:
                yield command

    # ── what may be asked ──────────────────────────────────────────────────

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

    def _expect(self, job: str, state: State, wanted: State) -> None:
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

    async def _start(self, order: Order, asked: requests.Asked) -> Operation:
        """Raises ``DirectRefused`` when another was faster."""
        if self.moves.under_way(order.job):
            self._expect(order.job, up.JOB_STATE_TRANSITIONING, up.JOB_STATE_RUNNING)
        return await self.moves.start(order, fault=self._fault(order.job, asked))

    def _fault(self, job: str, asked: requests.Asked) -> str:
        """Why upstream would begin the operation and fail it; empty: no reason."""
        members = self._members.of_job(NO_GROUP, JobId(job))
        connected = any(member.connected for member in members)
        if asked.backend == CHANNEL and not connected and not self.moves.absent(job):
            return f"job {job} has no workload channel to this agent: it is to register, or to come back"
        return asked.fault


async def _abort(context: Context, refusal: DirectRefused) -> NoReturn:
    await context.abort(refusal.status, str(refusal))
    raise AssertionError("abort raises")
