"""The processes that registered with this agent: what they are, how to reach them, what they use.

Written by the service (registrations, answers) and read by backends, groups and the sampler. A member
outlives its channel: a lost stream is a reason to wait for the process to come back, only its end (its
pidfd) removes it. Decides nothing about who is on the device.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from coslice.agent.host import AnonymousMemory, Gone
from coslice.agent.processes import Process
from coslice.core.ids import GroupId, Incarnation, JobId, MemberId
from coslice.wire.v1 import coslice_pb2 as pb

OUT, BACK = "/out", "/in"
"""How the names of moves end: an answer carries its direction in its name."""


class MoveRefused(Exception):
    """A process did not move its state. ``gone``: it, or what it had, cannot come back. ``unsure``: it never
    answered, so it may have, or may yet."""

    def __init__(
        self,
        message: str,
        *,
        pid: int,
        busy: bool = False,
        gone: bool = False,
        unsure: bool = False,
        no_room: bool = False,
    ) -> None:
        super().__init__(message)
        self.pid, self.busy, self.gone, self.unsure, self.no_room = pid, busy, gone, unsure, no_room


class OpenChannel:
    """One open stream of a workload process: commands out, in order; and whose it is, once that is known."""

    open = True

    def __init__(self) -> None:
        self.member: Member | None = None
        self._queue: asyncio.Queue[pb.WorkloadCommand | None] = asyncio.Queue()

    def send(self, command: pb.WorkloadCommand) -> None:
        self._queue.put_nowait(command)

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def next(self) -> pb.WorkloadCommand | None:
        """None: the stream is over."""
        return await self._queue.get()


def member_id(job: JobId, incarnation: Incarnation, pid: int, started: int) -> MemberId:
    return MemberId(f"{job}/{incarnation}/{pid}/{started}")


@dataclass(slots=True)
class _Pending:
    op: str
    command: pb.WorkloadCommand
    answer: "asyncio.Future[pb.Moved]"


@dataclass(slots=True, eq=False)
class Member:
    """One process of one incarnation, within one group (``group`` empty: direct API only)."""

    id: MemberId
    job: JobId
    incarnation: Incarnation
    group: GroupId
    pid: int
    started: int
    memory: AnonymousMemory
    rank: int = 0
    state_bytes: int = 0
    need: int = 0
    unkept: int = 0
    """Of ``state_bytes``, what needs no host memory of its own: it is read again, or shared."""
    bases: dict[str, int] = field(default_factory=dict)
    """Digest and bytes of what it shares with other processes, once it has left."""
    common: dict[str, int] = field(default_factory=dict)
    """Digest and bytes of what it has on the device in one copy with others; not in ``state_bytes``."""
    mapped: set[str] = field(default_factory=set)
    """Of these digests, those that it has on the device now."""
    parked: bool = False
    away: int = 0
    """Bytes of its state that are in host memory, while the rest is on the device; 0: none, or all."""
    given: int = 0
    """Bytes that left so far, in a move that gives way to another's."""
    ahead: int | None = None
    """Bytes that are on the device ahead of the move in; None: nothing was brought ahead."""
    asked: int = 0
    """Commands to bring state ahead that are not answered yet."""
    heard: "Callable[[], None] | None" = None
    """Told when ``given`` or ``ahead`` changed."""
    admitted: bool = False
    """Its group knows of it, so it is on the device or parked; before, its memory is its own."""
    placed: bool = False
    """It registered nothing: labels of its pod say whose it is."""
    announced: bool = False
    """This agent instance has told the group of it (not yet for one that only the store remembers)."""
    device: str = "host"
    backend: str = ""
    """The job's choice, as ``NAME`` or ``NAME:key=value,…``; empty: none."""
    gauge: "Callable[[Member], int] | None" = None
    """Bytes on cuda devices, measured from outside. For those that register no state: their whole process is
    it."""
    modes: tuple[str, ...] = ("offload",)
    baseline: int = 0
    """Anonymous memory of the process itself, which is not state and never leaves."""
    full: int = 0
    """Anonymous memory before the state last began to leave."""
    empty: int = 0
    """Anonymous memory when all its state had last left, as measured; 0: it never had."""
    unsure: bool = False
    """It did not answer an order to move out in time: some of the state may have left on it."""
    returned: "Callable[[], None] | None" = None
    """Told once when its state is back on a late answer, for which no move waited any more."""
    lost: bool = False
    """It had a channel to this agent, or the last one, and has none now."""
    residual: int = 0
    """What was left on the device when its state had moved out; counts while it is parked."""
    process: Process | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    _channel: "OpenChannel | None" = None
    _pending: _Pending | None = None

    @property
    def connected(self) -> bool:
        return self._channel is not None and self._channel.open

    @property
    def closed(self) -> bool:
        """It closed its channel, and something else answers in its place."""
        return self._channel is not None and not self._channel.open

    @property
    def channel(self) -> "OpenChannel | None":
        return self._channel

    @property
    def has_ended(self) -> bool:
        return self.process is not None and self.process.ended.is_set()

    @property
    def moving(self) -> bool:
        return self._pending is not None

    @property
    def sleeps(self) -> bool:
        """Some of its state is in host memory at least: it must come back before the process runs."""
        return self.parked or self.away > 0

    @property
    def divisible(self) -> bool:
        """Can move a part of its state and leave the rest."""
        return "parts" in self.modes

    @property
    def kept(self) -> int:
        """Host memory of its own that it needs at most."""
        return max(0, self.state_bytes - self.unkept)

    @property
    def any_time(self) -> bool:
        """May be moved in the middle of a phase, as far as it is concerned."""
        return "mid_phase" in self.modes

    @property
    def buffer(self) -> str:
        """Names its host buffer: one process may serve two groups."""
        return f"{self.group}/{self.id}"

    def usage(self) -> int:
        """Bytes on the device now, above the baseline; 0 once it has ended. Cheap, may be a little off.

        A parked process is off the accelerator: what it allocates meanwhile is its host memory, so it counts
        for what it left behind at most, until state is brought ahead. On cuda nothing is measured from
        outside: the process's word counts.
        """
        if self.has_ended:
            return 0
        if self.device == "cuda":
            if self.gauge is not None and not self.state_bytes:
                return self.gauge(self)
            return self.residual + (self.ahead or 0) if self.sleeps else self.state_bytes - self.given
        try:
            now = max(0, self.memory.fast() - self.baseline)
        except Gone:
            return 0
        return min(now, self.residual) if self.sleeps and self.ahead is None else now

    def attach(self, channel: OpenChannel) -> None:
        """A channel of this process is open. A move that waits for an answer is asked for again."""
        if self._channel is not None:
            self._channel.end()  # its process has opened another
            self.ahead, self.asked = None, 0
        self._channel = channel
        self.lost = not channel.open
        if self._pending is not None:
            channel.send(self._pending.command)

    def detach(self, channel: OpenChannel) -> None:
        if self._channel is channel:  # not when a newer channel took its place
            self._channel, self.lost = None, True
            self.ahead, self.asked = None, 0  # it frees that before it registers again
            self._tell()

    async def move(self, op: str, command: pb.WorkloadCommand, *, timeout: float) -> pb.Moved:
        """Ask the process to move its state; raises ``MoveRefused``. One move at a time."""
        if self.has_ended:
            raise MoveRefused(f"process {self.pid} has ended", pid=self.pid, gone=True)
        pending = _Pending(op, command, asyncio.get_running_loop().create_future())
        self._pending = pending
        if self._channel is not None:
            self._channel.send(command)
        try:
            async with asyncio.timeout(timeout):
                return await pending.answer
        except asyncio.CancelledError:  # whoever asked went away, and the process may be at it still
            self.unsure = self.unsure or op.endswith(OUT)
            raise
        except TimeoutError:
            self.unsure = self.unsure or op.endswith(OUT)
            why = "did not answer" if self.connected else "has no channel to the agent and did not come back"
            raise MoveRefused(
                f"process {self.pid} {why} within {timeout:g} s", pid=self.pid, unsure=True
            ) from None
        finally:
            if self._pending is pending:
                self._pending = None

    def moved(self, answer: pb.Moved) -> None:
        out = answer.op.endswith(OUT)
        self.parked = out and answer.left_bytes <= 0 and not self.mapped
        self.away = max(1, self.state_bytes - answer.left_bytes) if out and not self.parked else 0
        self.given, self.ahead = 0, None
        pending = self._pending
        if pending is not None and pending.op == answer.op and not pending.answer.done():
            pending.answer.set_result(answer)
        elif out and pending is None and self._channel is not None:
            # It answered after we had given up on it: the job counts as live, so its state goes back.
            self.ahead = 0  # it is coming
            late = pb.MoveIn(op=f"{answer.op.removesuffix(OUT)}/late{BACK}", deadline_s=0)
            self._channel.send(pb.WorkloadCommand(move_in=late))
        elif not out and pending is None and self.returned is not None:
            returned, self.returned, self.unsure = self.returned, None, False
            returned()

    def refused(self, answer: pb.MoveFailed) -> None:
        if (pending := self._pending) is None or pending.op != answer.op or pending.answer.done():
            return
        self.away, self.given = self.away + self.given, 0  # what had given way stays away
        text = f"process {self.pid}: {answer.message or pb.Code.Name(answer.code)}"
        refusal = MoveRefused(
            text,
            pid=self.pid,
            busy=answer.code == pb.BUSY,
            no_room=answer.code == pb.NO_ROOM and answer.op.endswith(OUT),
            gone=answer.code == pb.STATE_LOST,
        )
        pending.answer.set_exception(refusal)

    def leaving(self, said: pb.Leaving) -> None:
        if self._pending is not None and self._pending.op == said.op:
            self.given = max(self.given, said.bytes)
            self._tell()

    def bring_ahead(self, op: str, most: int) -> None:
        """Begin to bring up to ``most`` bytes of its parked state, or free it again (0); see ``ahead``.

        Raises ``MoveRefused`` without a channel to it.
        """
        if self._channel is None or self.closed:
            raise MoveRefused(f"process {self.pid} has no channel to the agent", pid=self.pid)
        self.ahead, self.asked = self.ahead or 0, self.asked + 1
        self._channel.send(pb.WorkloadCommand(bring_ahead=pb.BringAhead(op=op, most_bytes=most)))

    def came_ahead(self, said: pb.Ahead) -> None:
        self.ahead, self.asked = said.bytes if said.ok else None, max(0, self.asked - 1)
        self._tell()

    def prepare(self, size: int) -> None:
        """Have it map ``size`` bytes of host buffer, so that its next move need not."""
        if self._channel is not None:
            self._channel.send(pb.WorkloadCommand(prepare=pb.Prepare(buffer_bytes=size)))

    def _tell(self) -> None:
        if self.heard is not None:
            self.heard()

    def ended(self) -> None:
        self._tell()
        if self._pending is not None and not self._pending.answer.done():
            error = MoveRefused(f"process {self.pid} ended during the move", pid=self.pid, gone=True)
            self._pending.answer.set_exception(error)

    def close(self) -> None:
        self.memory.close()
        if self.process is not None:
            self.process.close()


class Members:
    """All members, keyed by group and member: one process may serve two groups with two roles."""

    def __init__(self) -> None:
        self._all: dict[tuple[GroupId, MemberId], Member] = {}
        self._changed = asyncio.Event()
        self.gauge: Callable[[Member], int] | None = None

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._all.values()))

    def get(self, group: GroupId, member: MemberId) -> Member | None:
        return self._all.get((group, member))

    def add(self, member: Member) -> None:
        member.gauge = self.gauge
        self._all[member.group, member.id] = member
        self._tell()

    def remove(self, member: Member) -> None:
        if self._all.get((member.group, member.id)) is member:
            del self._all[member.group, member.id]
            self._tell()

    async def changed(self) -> None:
        """Until somebody comes or goes."""
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def of_group(self, group: GroupId) -> tuple[Member, ...]:
        return tuple(m for m in self._all.values() if m.group == group)

    def of_job(self, group: GroupId, job: JobId) -> tuple[Member, ...]:
        """In rank order, then by age: the same on every run."""
        found = (m for m in self._all.values() if m.group == group and m.job == job)
        return tuple(sorted(found, key=lambda m: (m.rank, m.started, m.pid)))

    def groups_of(self, job: JobId) -> tuple[GroupId, ...]:
        return tuple(sorted({m.group for m in self._all.values() if m.job == job}))
