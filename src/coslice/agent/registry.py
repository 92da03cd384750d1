"""Takes registrations: checks what a process says of itself, watches it, and puts it on the device or
beside it.

Called by the service for each new channel, and by the app after a restart for processes that only the store
remembers. A process whose state does not fit beside what is on the device is parked at once, before the
group hears of it: nobody gets device memory by registering.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from coslice.agent.backends.base import MoveError
from coslice.agent.backends.resolve import Backends, parse_backend
from coslice.agent.buffers import HostBuffers, same_token
from coslice.agent.config import AgentConfig, accelerator, buffer_socket
from coslice.agent.convert import refusal_code
from coslice.agent.group import ServedGroup
from coslice.agent.host import AnonymousMemory, Gone
from coslice.agent.members import Member, Members, OpenChannel, member_id
from coslice.agent.processes import Process, owner, start_time
from coslice.agent.tickets import Tickets, pids_of
from coslice.core import holdings as core
from coslice.core.ids import GroupId, Incarnation, JobId, check_name
from coslice.core.outcome import Rejected
from coslice.errors import ConfigError
from coslice.security import fingerprint
from coslice.sizes import format_size
from coslice.wire.v1 import coslice_pb2 as pb

log = logging.getLogger(__name__)

TOKEN_MAX = 200
PLACED = "pod-"
"""How incarnations begin whose processes were placed."""


class RegistrationRefused(Exception):
    def __init__(self, code: pb.Code.ValueType, message: str) -> None:
        super().__init__(message)
        self.code = code


class Labels(Protocol):
    async def known(self) -> bool:
        """Have they been read? Waits for a while."""
        ...

    def problem(self, job: JobId, pid: int) -> str:
        """Why the process with this pid may not register as this job; empty: it may."""
        ...


class Registry:
    def __init__(
        self,
        config: AgentConfig,
        *,
        members: Members,
        groups: Mapping[GroupId, ServedGroup],
        buffers: HostBuffers,
        backend: Backends,
        uid: int,
        remember: Callable[[Member], None],
        tickets: Tickets,
        heard: Callable[[], Awaitable[None]],
        labels: Labels | None = None,
    ) -> None:
        """``uid``: the user whose processes may register. ``remember`` is told each new member's baseline.
        ``heard`` returns once the orchestrator, if there is one, knows what the groups have said so far.
        ``labels``: what says whose a process is, where anything does.
        """
        self._config, self._members, self._groups = config, members, groups
        self._buffers, self._backend, self._uid, self._remember = buffers, backend, uid, remember
        self._heard, self._tickets, self.labels = heard, tickets, labels

    def by_token(self, token: str, pid: int) -> Member | None:
        """Who registered with this token, if that is the process that shows it."""
        for member in self._members:
            if member.pid == pid and same_token(member.token, token):
                return member
        return None

    async def register(self, message: pb.Register, channel: OpenChannel) -> None:
        """Makes the process behind the channel a member; raises ``RegistrationRefused``."""
        await self.group_known(message.group)
        self._check(message)
        await self.register_identified(self._identified(message), channel)

    async def register_identified(self, message: pb.Register, channel: OpenChannel) -> None:
        """The same for a process whose pid and start time the kernel vouched for. Raises
        ``RegistrationRefused``."""
        self._check_owner(message.pid)
        group, job = GroupId(message.group), JobId(message.job)
        process = (message.pid, message.start_time)
        if not any((m.pid, m.started) == process for m in self._members.of_job(group, job)):
            await self._labels_known()  # one that is a member was asked when it came
        self._check(message)
        if self.labels is not None and (other := self.labels.problem(job, message.pid)):
            raise RegistrationRefused(pb.DENIED, other)
        if message.incarnation:  # a start of its own; without, it joins those that were placed
            self._release_placed(group, job)
        incarnation = self._incarnation(message)
        known = self._members.get(group, member_id(job, incarnation, message.pid, message.start_time))
        if known is not None:
            await self._again(known, message, channel)
        else:
            self._check_limits(group, job)
            self._check_incarnation(group, job, incarnation)
            member = self._new(message, incarnation)
            try:
                await self._admit(member, channel)
            except BaseException:
                self._drop(member)
                raise
        self._release_placed(group, job)
        # Not before: the process may acquire next, and be granted without its state by somebody who has not
        # heard that it was set aside.
        await self._heard()
        channel.send(pb.WorkloadCommand(admitted=pb.Admitted()))

    async def group_known(self, group: str) -> None:
        """Returns once it is certain whether the group is served here. Raises ``RegistrationRefused``."""
        if group and GroupId(group) not in self._groups:
            await self._labels_known()

    async def _labels_known(self) -> None:
        if self.labels is not None and not await self.labels.known():
            raise RegistrationRefused(
                pb.FAILED,
                "no label of this node and its pods has been read since the agent started, so nobody can "
                "tell which job a process is of: does the Kubernetes API answer (see the agent's log)?",
            )

    async def place(
        self, group: ServedGroup, job: JobId, pid: int, started: int, incarnation: Incarnation
    ) -> None:
        """Make a member of a process that labels say is the job's, for the node's own backend, which does
        without its help. Raises ``RegistrationRefused``."""
        self._check_limits(group.id, job)
        self._check_incarnation(group.id, job, incarnation)
        device = group.devices.accelerator
        message = pb.Register(
            job=job, group=group.id, pid=pid, start_time=started, device=device, modes=("offload",)
        )
        member = self._new(message, incarnation)
        member.placed = True
        try:
            await self._announce(member, group)
        except BaseException:
            self._drop(member)
            raise
        self._remember(member)

    def release(self, member: Member, reason: str) -> None:
        """It is the job's no longer, whether or not it has ended."""
        self._drop(member)
        if (group := self._groups.get(member.group)) is not None:
            group.gone(member.job, member.id, reason)

    def _release_placed(self, group: GroupId, job: JobId) -> None:
        for member in self._members.of_job(group, job):
            if member.placed:
                self.release(member, "processes of its job registered themselves")

    def adopt(self, job: str, pids: Sequence[int], backend: str) -> None:
        """Make members of processes that did not register, for a backend that does without their help. By
        the word of somebody who may name them; raises ``ConfigError``."""
        self._backend.check_job(backend)
        name = parse_backend(backend).name
        able = self._backend.named(name).capabilities()
        if able.in_process:
            raise ConfigError(f"backend {name} needs the processes' own help: they register, none is named")
        found = dict[int, int]()
        for pid in pids:
            if (started := start_time(pid)) is None:
                raise ConfigError(f"there is no process {pid}")
            found[pid] = started
        first = min(pids)
        incarnation = Incarnation(f"named-{first}-{found[first]}")
        for pid, started in sorted(found.items()):
            device = "cuda" if name == "cuda" else "host" if able.whole_process else accelerator(self._config)
            message = pb.Register(
                job=job,
                pid=pid,
                start_time=started,
                device=device,
                backend=backend,
                modes=(*able.modes, "mid_phase"),
            )
            try:
                self._new(message, incarnation)
            except RegistrationRefused as refusal:
                raise ConfigError(str(refusal)) from None

    def remembered(
        self, group: ServedGroup, job: JobId, stored: core.Member, incarnation: Incarnation, base: int | None
    ) -> None:
        """A member of the last agent instance: watched again if it lives, reported gone if not."""
        try:
            memory = AnonymousMemory(stored.pid)
        except Gone:
            group.gone(job, stored.id, f"process {stored.pid} ended while the agent was down")
            return
        member = Member(
            id=stored.id,
            job=job,
            incarnation=incarnation,
            group=group.id,
            pid=stored.pid,
            started=stored.start_time,
            memory=memory,
            state_bytes=stored.bytes,
            need=stored.need,
            parked=stored.parked,
            unkept=stored.unkept,
            common=dict(stored.common),
            mapped=set() if stored.parked else {digest for digest, _ in stored.common},
            away=int(stored.part),  # how much, it says when it is back
            device=group.devices.accelerator,
            placed=incarnation.startswith(PLACED) and not stored.bytes,
        )
        member.lost = not member.placed
        member.parked = member.parked or self._backend.holds([member])
        if not self._watch(member):
            memory.close()
            group.gone(job, stored.id, f"process {stored.pid} ended while the agent was down")
            return
        now = memory.measure(max(stored.bytes, 1))
        member.baseline = base if base is not None else max(0, now - (0 if stored.parked else stored.bytes))
        member.residual = max(0, now - member.baseline)
        member.admitted = True
        group.sampler.wake()

    # ── checks ─────────────────────────────────────────────────────────────

    def _check(self, message: pb.Register) -> None:
        try:
            check_name("job", message.job)
            if message.group:
                check_name("group", message.group)
        except ValueError as error:
            raise RegistrationRefused(pb.INVALID, str(error)) from None
        if len(message.incarnation) > TOKEN_MAX:
            raise RegistrationRefused(pb.INVALID, f"an incarnation is at most {TOKEN_MAX} characters")
        if min(message.state_bytes, message.need_bytes, message.parked_bytes) < 0:
            raise RegistrationRefused(pb.INVALID, "sizes are bytes and cannot be negative")
        if message.group and GroupId(message.group) not in self._groups:
            known = ", ".join(sorted(self._groups)) or "none"
            text = f"this agent serves no group {message.group!r}; it serves: {known}"
            if self.labels is None:
                raise RegistrationRefused(pb.UNKNOWN_GROUP, text)
            raise RegistrationRefused(pb.FAILED, f"{text}. It does once its node has the group's label")
        self._check_device(message)
        if message.backend:
            try:
                self._backend.check_job(message.backend)
            except ConfigError as error:
                raise RegistrationRefused(pb.INVALID, str(error)) from None

    def _identified(self, message: pb.Register) -> pb.Register:
        """With the pid, as this agent sees it, of the process that the ticket was given to."""
        socket = buffer_socket(self._config)
        if not message.ticket:
            raise RegistrationRefused(
                pb.DENIED,
                f"process {message.pid} shows no ticket: it must reach the agent's socket {socket} on node "
                f"{self._config.node}. In a container, mount that folder at the same path (or say where "
                "it is with COSLICE_AGENT_SOCKET); on another node, use that node's own agent",
            )
        ticket = self._tickets.redeem(message.ticket)
        if ticket is None:
            raise RegistrationRefused(
                pb.FAILED, f"the ticket is used or too old: fetch another from {socket} and register with it"
            )
        if message.pid not in pids_of(ticket.pid) or message.start_time != ticket.started:
            raise RegistrationRefused(
                pb.DENIED,
                f"the ticket was given to process {ticket.pid}, and not to process {message.pid} with start "
                f"time {message.start_time}: register from the process itself, on the agent's own node",
            )
        identified = pb.Register()
        identified.CopyFrom(message)
        identified.pid = ticket.pid
        return identified

    def _check_owner(self, pid: int) -> None:
        if (found := owner(pid)) != self._uid:
            raise RegistrationRefused(
                pb.DENIED, f"process {pid} is user {found}'s, the agent is user {self._uid}'s: use one user"
            )

    def _check_limits(self, group: GroupId, job: JobId) -> None:
        members = list(self._members)
        jobs = {(member.group, member.job) for member in members}
        config = self._config
        for there, limit, name in (
            (len(members), config.max_members, "max_members"),
            (len(jobs | {(group, job)}) - 1, config.max_jobs, "max_jobs"),
        ):
            if there >= limit:
                raise RegistrationRefused(
                    pb.LIMIT,
                    f"node {config.node} has {there} registered "
                    f"{'processes' if name == 'max_members' else 'jobs'}, the limit ({name}): end one first, "
                    "or raise the limit of the agent",
                )

    def _check_device(self, message: pb.Register) -> None:
        device = message.device or "host"
        group = self._groups.get(GroupId(message.group))
        if device not in ("host", "cuda"):
            raise RegistrationRefused(pb.INVALID, f"device is {device!r}: 'host' or 'cuda'")
        if group is not None and group.devices.accelerator != device:
            raise RegistrationRefused(
                pb.INVALID,
                f"group {group.id} shares a {group.devices.accelerator} device, the state is on {device!r}",
            )

    def _incarnation(self, message: pb.Register) -> Incarnation:
        """Its token; a process without one joins the job's other processes without one, or is the first."""
        if message.incarnation:
            return Incarnation(fingerprint.incarnation(message.incarnation))
        for member in self._members.of_job(GroupId(message.group), JobId(message.job)):
            if member.placed or member.incarnation.startswith("self-"):
                return member.incarnation
        return Incarnation(f"self-{message.pid}-{message.start_time}")

    def _check_incarnation(self, group: GroupId, job: JobId, incarnation: Incarnation) -> None:
        for other in self._members.of_job(group, job):
            if other.incarnation != incarnation and not other.has_ended:
                raise RegistrationRefused(
                    pb.JOB_RUNNING,
                    f"job {job} runs already: process {other.pid} of another start of it is alive on node "
                    f"{self._config.node}. Stop that one, or give this run another job name",
                )

    # ── taking it in ───────────────────────────────────────────────────────

    def _new(self, message: pb.Register, incarnation: Incarnation) -> Member:
        try:
            memory = AnonymousMemory(message.pid)
            parked, away = _whereabouts(message)
            state = 0 if parked else message.state_bytes - away
            baseline = max(0, memory.measure(max(message.state_bytes, 1)) - state)
        except Gone:
            raise RegistrationRefused(pb.INVALID, f"process {message.pid} has ended") from None
        job = JobId(message.job)
        member = Member(
            id=member_id(job, incarnation, message.pid, message.start_time),
            job=job,
            incarnation=incarnation,
            group=GroupId(message.group),
            pid=message.pid,
            started=message.start_time,
            memory=memory,
            rank=message.rank,
            state_bytes=message.state_bytes,
            need=message.need_bytes,
            parked=parked,
            away=away,
            device=message.device or "host",
            backend=message.backend,
            modes=tuple(message.modes) or ("offload",),
            baseline=baseline,
        )
        member.unkept, member.bases = unkept_of(message)
        member.parked = member.parked or self._backend.holds([member])
        if not self._watch(member):
            memory.close()
            raise RegistrationRefused(pb.INVALID, f"process {message.pid} has ended")
        return member

    def _watch(self, member: Member) -> bool:
        member.process = Process.watch(member.pid, member.started, lambda: self._process_ended(member))
        if member.process is None:
            return False
        self._members.add(member)
        return True

    async def _admit(self, member: Member, channel: OpenChannel) -> None:
        group = self._groups.get(member.group)
        if group is not None:
            self._check_size(member, group)
            with group.admitting(member.job):
                if not (member.sleeps or group.is_coming(member.job) or group.fits(member)):
                    await self._park(member, group, channel)
                await self._announce(member, group)
            self._remember(member)
        if channel.member is None:
            self._open(member, channel)

    @staticmethod
    def _check_size(member: Member, group: ServedGroup) -> None:
        if member.state_bytes > group.devices.device_budget > 0:
            raise RegistrationRefused(
                pb.NO_ROOM,
                f"{format_size(member.state_bytes)} of state do not fit on the device of {group.id}: it "
                f"has {format_size(group.devices.device_budget)}: use less or raise the device budget",
            )

    async def _announce(self, member: Member, group: ServedGroup) -> None:
        try:
            await group.registered(member)
        except Rejected as refusal:
            raise RegistrationRefused(refusal_code(refusal.code), str(refusal)) from None
        if member.has_ended:  # perhaps before the group had heard of it
            group.gone(member.job, member.id, f"process {member.pid} ended")

    def _open(self, member: Member, channel: OpenChannel) -> None:
        answer = pb.Registered(
            member=member.id, buffer_socket=str(buffer_socket(self._config)), buffer_token=member.token
        )
        channel.send(pb.WorkloadCommand(registered=answer))
        channel.member = member
        member.attach(channel)

    async def _park(self, member: Member, group: ServedGroup, channel: OpenChannel) -> None:
        """Its state goes to host memory now: the device is another's, and it holds no lease to be there."""
        size = format_size(member.state_bytes)
        self._open(member, channel)
        try:
            await self._backend.snapshot([member], op=f"{group.id}/admit/{member.pid}")
        except MoveError as error:
            raise RegistrationRefused(
                pb.NO_ROOM,
                f"{size} of state do not fit beside what is on the device of group {group.id}, and could not "
                f"be set aside ({error}): acquire the group before creating state on it",
            ) from None
        log.info("job %s: %s registered while the device is another's; set aside", member.job, size)

    async def _again(self, member: Member, message: pb.Register, channel: OpenChannel) -> None:
        """The same process is back (its channel or this agent had gone); it says where its state is."""
        parked, away = _whereabouts(message)
        parked = parked or self._backend.holds([member])
        says = (message.state_bytes, message.need_bytes, parked, away, *unkept_of(message))
        known = (member.state_bytes, member.need, member.parked, member.away, member.unkept, member.bases)
        changed = known != says
        came = member.parked and not (parked or member.moving)  # by itself: its channel was closed
        member.state_bytes, member.need, member.parked, member.away, member.unkept, member.bases = says
        member.modes = tuple(message.modes) or ("offload",)
        member.rank, member.device, member.backend = message.rank, message.device or "host", message.backend
        member.placed = False
        moving, group = member.moving, self._groups.get(member.group)
        if group is not None and came and not (group.is_coming(member.job) or group.fits(member)):
            member.admitted = False  # nobody else pays for it meanwhile
            with group.admitting(member.job):
                try:
                    await self._park(member, group, channel)
                finally:
                    await self._announce(member, group)
            return
        self._open(member, channel)
        if group is not None and (not member.announced or (changed and not moving)):
            await self._announce(member, group)

    # ── letting go ─────────────────────────────────────────────────────────

    def _process_ended(self, member: Member) -> None:
        member.ended()
        self._drop(member)
        if (group := self._groups.get(member.group)) is not None:
            group.gone(member.job, member.id, f"process {member.pid} ended")

    def _drop(self, member: Member) -> None:
        self._members.remove(member)
        self._buffers.free(member.buffer)
        self._buffers.leave_shared(member.buffer)
        member.close()


def unkept_of(message: pb.Register | pb.Resized) -> tuple[int, dict[str, int]]:
    """What of its state needs no host memory of its own, and what it shares."""
    bases = {base.digest: max(0, base.bytes) for base in message.bases}
    return min(max(0, message.unkept_bytes), max(0, message.state_bytes)), bases


def _whereabouts(message: pb.Register) -> tuple[bool, int]:
    """Is all of its state in host memory? If only a part is: how many bytes."""
    if message.parked and 0 < message.parked_bytes < message.state_bytes:
        return False, message.parked_bytes
    return message.parked, 0
