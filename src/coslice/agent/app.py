"""The agent as one object: built from a configuration, started, stopped.

Start: check the configuration, open what is ours alone (state, runtime directory), remember the processes
of the last instance, serve, dial. Stop is the reverse, and leaves the processes and their memory alone.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import grpc.aio
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from msgspec.structs import replace

from coslice.agent import cuda
from coslice.agent import upstream as upstream_service
from coslice.agent.backends.base import NodeContext
from coslice.agent.backends.resolve import Backends
from coslice.agent.buffers import BufferServer, HostBuffers
from coslice.agent.closed import ClosedChannels
from coslice.agent.common import CommonCopies
from coslice.agent.config import (
    AgentConfig,
    Follow,
    GroupDevices,
    accelerator,
    buffer_socket,
    validate,
)
from coslice.agent.direct import DirectApi
from coslice.agent.discovery.surveyor import Surveyor
from coslice.agent.group import CODEC, ServedGroup, holdings_for
from coslice.agent.link import Link
from coslice.agent.members import Member, Members
from coslice.agent.metrics import OF_NODE, Meter, of_node
from coslice.agent.named import NamedProcesses
from coslice.agent.occupancy import Occupancy
from coslice.agent.registry import RegistrationRefused, Registry
from coslice.agent.service import AgentService
from coslice.agent.tickets import Tickets
from coslice.agent.tiers.disk import DiskTier
from coslice.agent.topology.place import parse_place
from coslice.agent.topology.placing import Placed, Placing
from coslice.agent.upstream import UpstreamService
from coslice.agent.upstream_ledger import Ledger
from coslice.agent.upstream_operations import Operations
from coslice.core.holdings import Holdings
from coslice.core.ids import GroupId, Incarnation, JobId
from coslice.errors import ConfigError
from coslice.observe.board import Board
from coslice.observe.metric import Reading, Source
from coslice.observe.tracing import Tracing
from coslice.runtime.clock import LoopClock
from coslice.runtime.supervisor import Supervisor
from coslice.security import access
from coslice.security.access import Guard
from coslice.security.addresses import split_address
from coslice.security.files import private_directory
from coslice.security.served import Served
from coslice.sizes import format_size
from coslice.store import Store, make_store
from coslice.store.codec import Codec
from coslice.store.slot import Slot
from coslice.wire.malformed import RefuseMalformed
from coslice.wire.protocol import PROTOCOL
from coslice.wire.upstream import snapshot_agent_pb2_grpc as up_rpc
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["Agent"].full_name
RULES = {
    f"/{SERVICE}/Channel": access.INBAND,
    f"/{SERVICE}/Snapshot": access.INBAND,
    f"/{SERVICE}/Restore": access.INBAND,
    f"/{SERVICE}/GetNodeStatus": access.ANY,
    **upstream_service.RULES,
}
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.so_reuseport", 0),  # two agents on one port must be an error, not a lottery
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),  # an eager client is no reason to break its stream
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # what gRPC obeys: its default is 60 s
)


HOLDINGS = "holdings/"


class _Parts(NamedTuple):
    """What every group of this node shares."""

    store: Store
    found: dict[str, tuple[bytes, int]]
    buffers: HostBuffers
    common: CommonCopies
    backend: Backends


class Baselines(msgspec.Struct):
    """What each process had before its state, by ``Member.buffer``: it cannot be measured again later."""

    bytes: dict[str, int] = {}


class AgentApp:
    """``config.state_dir`` may be ``":memory:"``: then nothing survives a restart."""

    def __init__(
        self, config: AgentConfig, *, board: Board | None = None, tracing: Tracing | None = None
    ) -> None:
        """``board``: where its metrics and its readiness go; None: nobody asks for them. ``tracing``: where
        spans of its part in hand-overs go; None: nowhere."""
        self.config = config
        self._board, self._tracing = board, tracing
        self._meter = Meter(board.registry) if board is not None else None
        if board is not None:
            board.ready["agent"] = self._why_not_ready
        self.members = Members()
        self.backends: Backends
        self.groups: dict[GroupId, ServedGroup] = {}
        self.instance = uuid.uuid4().hex
        self._clock = LoopClock()
        self._supervisor = Supervisor("agent")
        self._exits = contextlib.AsyncExitStack()
        self._link: Link | None = None
        self._placing: Placing | None = None
        self._surveyor = Surveyor()
        self._occupancy = Occupancy(self.members, self._surveyor)
        self.closed = ClosedChannels(
            grace=config.channel_grace,
            asked=lambda m: self.members.get(m.group, m.id) is m and self.backends.asks(m),
            measure=self._occupancy.known_bytes_of,
            resized=self._resized,
        )
        self.members.gauge = self._occupancy.bytes_of
        self._baselines = Baselines()
        self._baseline_slot: Slot[Baselines] | None = None
        self._baselines_changed = asyncio.Event()
        self._served = Served(config.tls, config.token_secret)
        self._address = ""
        self._parts: _Parts
        self._running: dict[GroupId, tuple[asyncio.Task[object], ...]] = {}
        self._slots: dict[GroupId, Slot[Holdings]] = {}
        self._left: dict[GroupId, Holdings] = {}
        """Of groups that were served and are not any more: their epochs count when they come back."""

    @property
    def address(self) -> str:
        """Where it really listens (port 0 in the configuration asks the system for a free one)."""
        return self._address

    @property
    def peak_device_bytes(self) -> dict[GroupId, int]:
        """Per group, all jobs together, the highest sample so far."""
        return {group.id: group.sampler.peak for group in self.groups.values()}

    async def start(self) -> None:
        """Raises ``ConfigError`` for what configuration or machine do not allow; then nothing is left."""
        validate(self.config)
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def wait_ready(self) -> None:
        """Until the orchestrator has welcomed us; at once without one."""
        if self._link is not None:
            waiting = asyncio.ensure_future(self._link.attached.wait())
            crash = asyncio.ensure_future(self._supervisor.wait())
            try:
                await asyncio.wait((waiting, crash), return_when=asyncio.FIRST_COMPLETED)
                if crash.done():
                    crash.result()
            finally:
                waiting.cancel()
                crash.cancel()

    async def wait(self) -> None:
        """Blocks while all is well; raises ``Crashed`` when a part of the agent broke."""
        await self._supervisor.wait()

    def reload(self) -> tuple[str, ...]:
        """Read token secret and certificates again; returns what changed. Raises ``ConfigError``, and goes on
        with what it had. What the agent shows to the orchestrator is read at each connection anyway."""
        return self._served.read()

    async def regroup(self, devices: Sequence[GroupDevices]) -> frozenset[GroupId]:
        """Serve these groups from now on; what one has on the devices stays as it is while it is served.
        Returns all that are served now: one that is left out is, as long as it holds something. Raises
        ``ConfigError``, with nothing done."""
        config = replace(self.config, groups=tuple(devices))
        validate(config)
        self.config = config
        return await self._serve_groups(frozenset(one.group for one in devices))

    async def holds(self, group: GroupId) -> bool:
        """Is something of a job here that could be needed again?"""
        served = self.groups.get(group)
        return served is not None and not await served.is_empty()

    async def stop(self) -> None:
        await self._exits.aclose()

    # ── parts ──────────────────────────────────────────────────────────────

    async def _start(self) -> None:
        config, exits = self.config, self._exits
        runtime = private_directory(config.runtime_dir)
        store = _store(config)
        exits.push_async_callback(store.close)
        found = await store.load()
        buffers = HostBuffers(config.host_budget, disk=_disk(config), per_job=config.host_per_job)
        buffers.idle = self._saved_and_idle
        exits.callback(buffers.close)
        common = CommonCopies(self.members)
        exits.callback(common.close)
        exits.push_async_callback(self._surveyor.close)
        node = NodeContext(config=config, buffers=buffers, surveyor=self._surveyor, store=store, found=found)
        backend = self.backends = Backends(node, default=config.backend, settings=config.backends)
        exits.push_async_callback(backend.close)
        await backend.start()
        self._baseline_slot = Slot(
            store, "baselines", Codec(Baselines, kind="baselines"), found.get("baselines")
        )
        self._baselines = self._baseline_slot.state() or Baselines()
        exits.callback(self._forget_members)
        self._parts = _Parts(store, found, buffers, common, backend)
        for devices in self._served_at_start(found):
            self._add_group(_measured_device(devices))
        tickets = Tickets(uid=os.getuid())
        registry = Registry(
            config,
            members=self.members,
            groups=self.groups,
            buffers=buffers,
            backend=backend,
            uid=os.getuid(),
            remember=self._remember,
            tickets=tickets,
            heard=self._heard,
        )
        if config.follow is not None:  # before anybody is served
            registry.labels = self._placing = self._placed_by_labels(registry)
        self._recall(registry)
        if buffers.disk is not None:
            known = {member.buffer for member in self.members}
            buffers.disk.keep_only(known.__contains__)
        socket = BufferServer(buffer_socket(config), buffers, registry.by_token, tickets, common)
        log.debug("buffers are handed over in %s", runtime)
        await socket.start()
        exits.push_async_callback(socket.stop)
        exits.push_async_callback(self._close_groups)
        exits.push_async_callback(self._supervisor.stop)
        for group in self.groups.values():
            self._run_group(group)
        self._supervisor.start("baselines", self._save_baselines())
        if accelerator(self.config) == "cuda":
            self._supervisor.start("occupancy", self._occupancy.run())
        named = NamedProcesses(store, found, adopt=registry.adopt)
        direct = DirectApi(self.members, backend, self.groups, instance=self.instance, adopt=named.adopt)
        upstream = UpstreamService(
            direct=direct,
            registry=registry,
            members=self.members,
            groups=self.groups,
            occupancy=self._occupancy,
            backends=backend,
            operations=Operations(store, found),
            ledger=Ledger(store, found),
            port=lambda: split_address(self._address)[1],
            accelerator=accelerator(config),
            lost=self.closed.lost,
            hello_timeout=config.hello_timeout,
        )
        for problem in named.recall():
            log.warning("%s", problem)
        await self._serve(registry, buffers, direct, upstream)
        upstream.start()
        if self._board is not None:
            self._board.add(Source(OF_NODE, lambda: self._readings(buffers), lambda taken: taken))
        if config.orchestrator is not None:
            self._link = Link(
                config.orchestrator,
                credentials=config.credentials,
                hello=self._hello,
                command=self._on_command,
            )
            self._supervisor.start("link", self._link.run())
        if config.follow is not None and self._placing is not None:
            self._follow(config.follow, self._placing)

    # ── groups come and go ─────────────────────────────────────────────────

    def _served_at_start(self, found: Mapping[str, tuple[bytes, int]]) -> Iterator[GroupDevices]:
        """With labels to follow: those that hold something of the last agent's, until labels are read."""
        if self.config.follow is None:
            yield from self.config.groups
            return
        for key in sorted(found):
            name = key.removeprefix(HOLDINGS)
            if name != key and any(context.members for context in CODEC.decode(found[key][0]).contexts):
                yield self._devices_of(GroupId(name))

    def _devices_of(self, group: GroupId) -> GroupDevices:
        said = next((devices for devices in self.config.groups if devices.group == group), None)
        if said is None:
            assert self.config.follow is not None
            said = replace(self.config.follow.default, group=group)
        return said

    def _placed_by_labels(self, registry: Registry) -> Placing:
        async def place(it: Placed, incarnation: Incarnation) -> str:
            try:
                await registry.place(self.groups[it.group], it.job, it.pid, it.started, incarnation)
            except RegistrationRefused as refusal:
                return str(refusal)
            return ""

        whole = self.backends.capabilities().whole_process
        return Placing(
            self.members, serve=self._serve_groups, place=place, release=registry.release, whole=whole
        )

    def _follow(self, follow: Follow, placing: Placing) -> None:
        from coslice.agent.topology.kubernetes import NodeTopology

        topology = NodeTopology(parse_place(follow.place), self.config.node, heard=placing.heard)
        self._supervisor.start("placing", placing.run())
        self._supervisor.start("topology", topology.run())

    async def _serve_groups(self, wanted: frozenset[GroupId]) -> frozenset[GroupId]:
        """These, and those that still hold something. Returns all that are served now."""
        before = set(self.groups)
        for name in sorted(wanted - before):
            devices = await asyncio.to_thread(_measured_device, self._devices_of(name))
            self._add_group(devices)
            self._run_group(self.groups[name])
            log.info("node %s serves group %s now", self.config.node, name)
        for name in sorted(before - wanted):
            if await (group := self.groups[name]).is_empty():
                await self._drop_group(group)
                log.info("node %s does not serve group %s any more", self.config.node, name)
        if set(self.groups) != before and self._link is not None:
            self._link.renew()
        return frozenset(self.groups)

    def _run_group(self, group: ServedGroup) -> None:
        self._running[group.id] = (
            self._supervisor.start(f"group {group.id}", group.driver.run()),
            self._supervisor.start(f"sampler {group.id}", group.sampler.run()),
        )

    async def _drop_group(self, group: ServedGroup) -> None:
        del self.groups[group.id]
        tasks = self._running.pop(group.id)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._left[group.id] = group.driver.state
        await group.close()

    async def _close_groups(self) -> None:
        for group in self.groups.values():
            await group.close()

    def _add_group(self, devices: GroupDevices) -> None:
        store, found, buffers, common, backend = self._parts
        key = f"{HOLDINGS}{devices.group}"
        slot = self._slots.setdefault(devices.group, Slot(store, key, CODEC, found.get(key)))
        self.groups[devices.group] = ServedGroup(
            devices,
            self.config,
            holdings=holdings_for(
                self.config,
                devices,
                self._left.pop(devices.group, None) or slot.state(),
                now=self._clock.now(),
                move_seconds=backend.deadline(devices.device_budget),
            ),
            slot=slot,
            clock=self._clock,
            members=self.members,
            buffers=buffers,
            common=common,
            backend=backend,
            publish=self._publish,
            meter=self._meter,
            tracing=self._tracing,
        )

    def _why_not_ready(self) -> str:
        if not self._address:
            return "it is starting"
        if self.config.orchestrator is not None and (self._link is None or not self._link.attached.is_set()):
            return f"no orchestrator has welcomed it at {self.config.orchestrator}"
        return ""

    def _readings(self, buffers: HostBuffers) -> tuple[Reading, ...]:
        attached = self._link is not None and self._link.attached.is_set()
        return tuple(of_node(self.groups.values(), buffers, attached=attached))

    async def _serve(
        self, registry: Registry, buffers: HostBuffers, direct: DirectApi, upstream: UpstreamService
    ) -> None:
        service = AgentService(
            registry=registry,
            members=self.members,
            groups=self.groups,
            direct=direct,
            buffers=buffers,
            identity=self._identity,
            hello_timeout=self.config.hello_timeout,
            occupancy=self._occupancy,
            lost=self.closed.lost,
        )
        self._served.read()
        guard = Guard(RULES, self._served)
        server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[guard, RefuseMalformed()])
        rpc.add_AgentServicer_to_server(service, server)
        up_rpc.add_SnapshotAgentServiceServicer_to_server(upstream, server)
        checks = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        reflection.enable_server_reflection(
            (
                SERVICE,
                upstream_service.SERVICE,
                health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
                reflection.SERVICE_NAME,
            ),
            server,
        )
        host, port = split_address(self.config.listen)
        try:
            if self.config.tls is None:
                port = server.add_insecure_port(self.config.listen)
            else:
                port = server.add_secure_port(self.config.listen, self._served.credentials(ask_client=False))
        except RuntimeError:
            port = 0
        if port == 0:
            raise ConfigError(
                f"cannot listen on {self.config.listen}: another process (perhaps another agent) has the "
                "port, or the address is not this node's. Stop the other, or choose another port (0: any)"
            )
        await server.start()
        self._exits.push_async_callback(server.stop, 0.5)
        self._exits.push_async_callback(upstream.close)
        self._exits.callback(service.close)
        self._exits.callback(self.closed.stop)
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for name in ("", SERVICE, upstream_service.SERVICE):
            await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
        absent = {*upstream_service.ABSENT, *(() if accelerator(self.config) == "cuda" else ("cuda",))}
        if "tpu" not in (self.config.backend, *self.config.backends):
            absent.add("tpu")
        for name in upstream_service.HEALTH:
            serving = health_pb2.HealthCheckResponse.SERVING
            await checks.set(name, health_pb2.HealthCheckResponse.NOT_SERVING if name in absent else serving)

    # ── memory over restarts ───────────────────────────────────────────────

    def _recall(self, registry: Registry) -> None:
        for group in self.groups.values():
            for context in group.driver.state.contexts:
                for member in context.members:
                    base = self._baselines.bytes.get(f"{group.id}/{member.id}")
                    registry.remembered(group, context.job, member, context.incarnation, base)

    def _remember(self, member: Member) -> None:
        self._baselines.bytes[member.buffer] = member.baseline
        self._baselines_changed.set()

    async def _save_baselines(self) -> None:
        """Off a registration's path: a lost baseline costs precision after a restart, not correctness."""
        assert self._baseline_slot is not None
        while True:
            await self._baselines_changed.wait()
            self._baselines_changed.clear()
            known = {member.buffer for member in self.members}
            kept = {name: size for name, size in self._baselines.bytes.items() if name in known}
            self._baselines = Baselines(kept)
            await self._baseline_slot.save(self._baselines)

    def _saved_and_idle(self, buffer: str) -> bool:
        """May its content go to disk? Not while anybody copies; page-locked memory (cuda) stays."""
        member = next((member for member in self.members if member.buffer == buffer), None)
        if member is None or member.device != "host":
            return False
        return member.sleeps and not member.moving and member.ahead is None

    def _resized(self, member: Member) -> None:
        if (group := self.groups.get(member.group)) is not None:
            group.resized(member)

    def _forget_members(self) -> None:
        for member in self.members:
            member.close()

    # ── the orchestrator's stream ──────────────────────────────────────────

    def _publish(self, message: pb.AgentMessage) -> None:
        if self._link is not None:
            self._link.send(message)

    async def _heard(self) -> None:
        if self._link is not None:
            await self._link.heard()

    def _hello(self) -> pb.AgentHello:
        offers = [
            pb.GroupOffer(group=group.id, epoch=group.epoch, residency=group.residency())
            for group in self.groups.values()
        ]
        return pb.AgentHello(
            node=self.config.node,
            groups=offers,
            accelerator=accelerator(self.config),
            instance=self.instance,
            protocol=PROTOCOL,
        )

    def _on_command(self, command: pb.AgentCommand) -> None:
        match command.WhichOneof("kind"):
            case "make_resident" if (
                group := self.groups.get(GroupId(command.make_resident.group))
            ) is not None:
                group.command(command.make_resident)
            case "expect" if (group := self.groups.get(GroupId(command.expect.group))) is not None:
                group.expect(JobId(command.expect.job))
            case "forget_job" if (group := self.groups.get(GroupId(command.forget_job.group))) is not None:
                group.forget(command.forget_job.job)
            case other:
                log.warning("the orchestrator sent %s for a group that is not served here; ignored", other)

    def _identity(self) -> pb.GetNodeStatusResponse:
        link = self._link
        return pb.GetNodeStatusResponse(
            node=self.config.node,
            accelerator=accelerator(self.config),
            orchestrator=link.address if link is not None else "",
            attached=link is not None and link.attached.is_set(),
            socket=str(buffer_socket(self.config)),
        )


def _measured_device(devices: GroupDevices) -> GroupDevices:
    """``device_budget`` 0 on cuda: all that torch sees."""
    if devices.accelerator == "cuda" and devices.device_budget == 0:
        return replace(devices, device_budget=cuda.device_memory())
    return devices


def _disk(config: AgentConfig) -> DiskTier | None:
    if not config.disk_budget:
        return None
    # Of our own within what was named: that may be a whole disk, with others' files and modes.
    # A folder's name has at most 255 characters.
    node = config.node if len(config.node) < 240 else hashlib.sha256(config.node.encode()).hexdigest()
    inside = f"{config.disk_dir}/coslice-{node}" if config.disk_dir else f"{config.state_dir}/saved"
    folder = private_directory(inside)
    tier = DiskTier(folder, config.disk_budget)
    if (free := shutil.disk_usage(folder).free) < config.disk_budget - tier.used:
        raise ConfigError(
            f"the disk budget is {format_size(config.disk_budget)}, {folder} has {format_size(free)} free: "
            "give less (coslice up --disk), or another folder (--disk-dir)"
        )
    return tier


def _store(config: AgentConfig) -> Store:
    if config.state_dir == ":memory:":
        return make_store(":memory:")
    # What it describes, processes and their memory, dies with the machine: no need to wait for the disk.
    return make_store(private_directory(config.state_dir) / "agent.sqlite", flush=False)
