"""Workload channels of the upstream protocol, served: who registers, and what its process was told before.

Called by the service, once for each stream. What a channel is to its member is ``upstream_channel``'s.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from coslice.agent import upstream_request as requests
from coslice.agent.backends.resolve import CHANNEL
from coslice.agent.discovery import procfs
from coslice.agent.group import ServedGroup
from coslice.agent.members import Member, Members
from coslice.agent.peer import Peer, Unidentified, process_of
from coslice.agent.registry import RegistrationRefused, Registry
from coslice.agent.upstream_channel import Measure, UpstreamChannel
from coslice.agent.upstream_ledger import Ledger, Place
from coslice.core.ids import GroupId, JobId
from coslice.security import access
from coslice.wire.status import grpc_status
from coslice.wire.upstream import snapshot_agent_pb2 as up
from coslice.wire.v1 import coslice_pb2 as pb

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class ChannelServer:
    def __init__(
        self,
        *,
        registry: Registry,
        members: Members,
        groups: Mapping[GroupId, ServedGroup],
        ledger: Ledger,
        measure: Measure,
        broken: Callable[[Member], None],
        lost: Callable[[Member, bool], None],
        port: Callable[[], int],
        accelerator: str,
        hello_timeout: float,
    ) -> None:
        """``broken``: as of ``UpstreamChannel``. ``lost``: of ``ClosedChannels``. ``port``: of this
        agent. ``accelerator``: of jobs without a group. ``hello_timeout``: seconds that a stream may take to
        register."""
        self._registry, self._members, self._groups, self._ledger = registry, members, groups, ledger
        self._measure, self._broken, self._lost, self._port = measure, broken, lost, port
        self._accelerator, self._hello_timeout = accelerator, hello_timeout
        self._channels: set[UpstreamChannel] = set()

    def close(self) -> None:
        for channel in self._channels:
            channel.leave()

    async def serve(
        self, messages: AsyncIterator[up.WorkloadMessage], context: Context
    ) -> AsyncGenerator[up.AgentCommand, None]:
        """One stream, to its end."""
        channel = UpstreamChannel(ledger=self._ledger, measure=self._measure, broken=self._broken)
        self._channels.add(channel)
        hearing = asyncio.create_task(self._hear(messages, channel, context.peer()))
        try:
            while (command := await channel.next_command()) is not None:
                yield command
            if channel.closed is not None:
                await context.abort(*channel.closed)
        finally:
            self._channels.discard(channel)
            channel.end()
            hearing.cancel()
            if channel.member is not None:
                channel.member.detach(channel)
                self._lost(channel.member, channel.unanswered)

    async def _hear(
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
            if (member.pid, member.started) != (process.pid, process.started) or not member.connected:
                continue
            if not isinstance(member.channel, UpstreamChannel):
                text = f"process {process.pid} has a channel of coslice's own for job {job}: use one of both"
                raise RegistrationRefused(pb.INVALID, text)
            await member.channel.take_over()
