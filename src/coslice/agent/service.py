"""The agent's gRPC face: workload channels, the direct API, status. Translates and hands on; decides
nothing.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio

from coslice.agent import convert
from coslice.agent.buffers import HostBuffers
from coslice.agent.direct import DirectApi, DirectRefused
from coslice.agent.group import ServedGroup
from coslice.agent.members import Member, Members, OpenChannel
from coslice.agent.occupancy import Occupancy
from coslice.agent.registry import RegistrationRefused, Registry, unkept_of
from coslice.core.ids import GroupId
from coslice.security import access
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext  # generic in the stubs only
StatusOf = Callable[[], pb.GetNodeStatusResponse]


class AgentService(rpc.AgentServicer):
    def __init__(
        self,
        *,
        registry: Registry,
        members: Members,
        groups: Mapping[GroupId, ServedGroup],
        direct: DirectApi,
        buffers: HostBuffers,
        identity: StatusOf,
        occupancy: Occupancy,
        lost: Callable[[Member, bool], None],
        hello_timeout: float = 10.0,
    ) -> None:
        """``identity``: a node status with the fields that only the app knows (names, the link). ``lost``: of
        ``ClosedChannels``."""
        self._registry, self._members, self._groups = registry, members, groups
        self._direct, self._buffers, self._identity = direct, buffers, identity
        self._occupancy, self._lost = occupancy, lost
        self._channels: set[OpenChannel] = set()
        self._hello_timeout = hello_timeout

    def close(self) -> None:
        """End all channels; their processes come back to the next agent."""
        for channel in self._channels:
            channel.end()

    # ── the workload channel ───────────────────────────────────────────────

    async def Channel(
        self,
        request_iterator: AsyncIterator[pb.WorkloadMessage],
        context: "Context[pb.WorkloadMessage, pb.WorkloadCommand]",
    ) -> AsyncIterator[pb.WorkloadCommand]:
        channel = OpenChannel()
        self._channels.add(channel)
        serving = asyncio.create_task(self._serve(request_iterator, channel), name="workload-channel")
        try:
            while (command := await channel.next()) is not None:
                yield command
        finally:
            self._channels.discard(channel)
            serving.cancel()
            if channel.member is not None:
                channel.member.detach(channel)
                self._lost(channel.member, channel.member.moving or channel.member.unsure)

    async def _serve(self, messages: AsyncIterator[pb.WorkloadMessage], channel: OpenChannel) -> None:
        """One channel's incoming side. Registration may itself need answers, so reading goes on during it."""
        registering: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        silence = loop.call_later(self._hello_timeout, self._silent, channel)
        try:
            async for message in messages:
                silence.cancel()
                if registering is None:
                    registering = asyncio.create_task(self._register(message, channel))
                elif channel.member is not None:
                    self._hear(channel.member, message)
        except grpc.aio.AioRpcError as error:
            log.debug("a workload channel broke: %s", error.details())
        finally:
            silence.cancel()
            if registering is not None:
                registering.cancel()
            channel.end()

    def _silent(self, channel: OpenChannel) -> None:
        text = f"a channel begins with a registration, within {self._hello_timeout:g} s"
        self._refuse(channel, pb.INVALID, text)

    async def _register(self, message: pb.WorkloadMessage, channel: OpenChannel) -> None:
        try:
            if message.WhichOneof("kind") != "register":
                raise RegistrationRefused(pb.INVALID, "the first message of a channel is its registration")
            if denied := access.caller().problem(access.JOB, message.register.job):
                raise RegistrationRefused(pb.DENIED, denied)
            await self._registry.register(message.register, channel)
        except RegistrationRefused as refusal:
            log.info("refused process %d of job %r: %s", message.register.pid, message.register.job, refusal)
            self._refuse(channel, refusal.code, str(refusal))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.exception("a registration broke")
            self._refuse(channel, pb.FAILED, f"the agent could not register the process: {error!r}")

    @staticmethod
    def _refuse(channel: OpenChannel, code: pb.Code.ValueType, message: str) -> None:
        channel.send(pb.WorkloadCommand(refused=pb.RegisterRefused(code=code, message=message)))
        channel.end()

    def _hear(self, member: Member, message: pb.WorkloadMessage) -> None:
        match message.WhichOneof("kind"):
            case "moved":
                member.moved(message.moved)
            case "move_failed":
                member.refused(message.move_failed)
            case "resized":
                member.state_bytes = max(0, message.resized.state_bytes)
                member.need = max(0, message.resized.need_bytes)
                member.unkept, member.bases = unkept_of(message.resized)
                if (group := self._groups.get(member.group)) is not None:
                    group.resized(member)
            case "leaving":
                member.leaving(message.leaving)
            case "ahead":
                member.came_ahead(message.ahead)
            case other:
                log.warning("process %d sent %s on an open channel; ignored", member.pid, other)

    # ── the direct API ─────────────────────────────────────────────────────

    async def Snapshot(
        self, request: pb.SnapshotRequest, context: "Context[pb.SnapshotRequest, pb.MoveResponse]"
    ) -> pb.MoveResponse:
        await _check_token(context, request.job)
        try:
            done, reason = await self._direct.snapshot(
                request.job,
                mode=request.mode,
                tags=tuple(request.tags),
                backend=request.backend,
                timeout=request.timeout_s,
                pids=tuple(request.pids),
                admin=access.caller().proven_admin,
            )
        except DirectRefused as refusal:
            await _abort(context, refusal)
        return pb.MoveResponse(
            bytes=done.bytes,
            seconds=done.seconds,
            reason=reason,
            copied_bytes=done.copied,
            copy_s=done.copy_seconds,
        )

    async def Restore(
        self, request: pb.RestoreRequest, context: "Context[pb.RestoreRequest, pb.MoveResponse]"
    ) -> pb.MoveResponse:
        await _check_token(context, request.job)
        try:
            done, reason = await self._direct.restore(request.job, timeout=request.timeout_s)
        except DirectRefused as refusal:
            await _abort(context, refusal)
        return pb.MoveResponse(
            bytes=done.bytes, seconds=done.seconds, reason=reason, copy_s=done.copy_seconds
        )

    async def GetNodeStatus(
        self,
        request: pb.GetNodeStatusRequest,
        context: "Context[pb.GetNodeStatusRequest, pb.GetNodeStatusResponse]",
    ) -> pb.GetNodeStatusResponse:
        status = self._identity()
        for group in self._groups.values():
            status.groups.append(group.residency())
            status.devices.append(group.device_status())
        status.direct.extend(convert.context_to_pb(fact) for fact in self._direct.facts())
        await self._add_accelerators(status)
        for member in sorted(self._members, key=lambda m: (m.group, m.job, m.rank, m.pid)):
            status.members.append(
                pb.MemberStatus(
                    member=member.id,
                    job=member.job,
                    group=member.group,
                    pid=member.pid,
                    state_bytes=member.state_bytes,
                    device_bytes=member.usage(),
                    host_bytes=self._buffers.size(member.buffer) - self._buffers.spilled(member.buffer),
                    disk_bytes=self._buffers.spilled(member.buffer),
                    connected=member.connected,
                    backend=self._direct.backend_of(member),
                    parked=member.parked,
                    parked_bytes=member.state_bytes if member.parked else member.away,
                )
            )
        return status

    async def _add_accelerators(self, status: pb.GetNodeStatusResponse) -> None:
        kinds = {group.devices.accelerator for group in self._groups.values()}
        if "cuda" not in kinds | {member.device for member in self._members}:
            return
        survey = await self._occupancy.refresh(max_age=0.1)
        status.survey_error = survey.error
        status.accelerators.extend(convert.accelerators_to_pb(survey, self._occupancy))


async def _check_token(context: "Context[Any, Any]", job: str) -> None:
    if denied := access.caller().problem(access.JOB, job):
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, denied)


async def _abort(context: "Context[Any, Any]", refusal: DirectRefused) -> NoReturn:
    await context.abort(refusal.status, str(refusal))
    raise AssertionError("abort raises")
