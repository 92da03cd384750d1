"""Processes that live on without a channel: what is asked of one is answered in its place.

A stream that broke comes back: clients dial again at once, llm-d's within 45 s, unless they carry out an
order still. One that stays away was closed, and nobody in that process moves state any more. Whoever needs
the room is not to wait out each order, but to be told; what follows is the group's rule (``on_stuck``).
Where the process has given its memory back there is nothing to move. Told by both services of streams that
end.
"""

import asyncio
import logging
from collections.abc import Callable

from coslice.agent.discovery import cgroups
from coslice.agent.host import Gone
from coslice.agent.members import Member, OpenChannel
from coslice.agent.occupancy import NOTABLE
from coslice.agent.processes import stopped
from coslice.sizes import format_size
from coslice.wire.v1 import coslice_pb2 as pb

log = logging.getLogger(__name__)

Measure = Callable[[Member], int | None]
"""Bytes on cuda devices, by the driver. None: it does not tell, which is never taken for nothing."""


class ClosedChannel(OpenChannel):
    """Stands where the process's channel was, until it opens another."""

    open = False

    def __init__(self, member: Member, measure: Measure, resized: Callable[[Member], None]) -> None:
        super().__init__()
        self.member = member
        self._member, self._measure, self._resized = member, measure, resized
        self._left_nothing = False
        figures = member.device == "cuda" or member.state_bytes > 0 or member.empty > 0
        self._told = figures or _anonymous(member) - member.baseline >= NOTABLE
        """Can its state be told from its memory? What it had when it registered may be either."""

    def send(self, command: pb.WorkloadCommand) -> None:
        match command.WhichOneof("kind"):
            case "move_out":
                self._move_out(command.move_out.op)
            case "move_in":
                self._move_in(command.move_in.op)
            case _:
                pass  # the others need no answer

    def _move_out(self, op: str) -> None:
        member = self._member
        used = self._measure(member) if member.device == "cuda" else _anonymous(member)
        if not self._told:
            used = None
        kept = member.residual if member.device == "cuda" else member.baseline
        if used is None or used - kept >= min(NOTABLE, member.state_bytes // 2 or NOTABLE):
            there = "nobody knows how much" if used is None else format_size(used - kept)
            text = f"it closed its channel to the agent and lives on, with {there} on the device"
            member.refused(pb.MoveFailed(op=op, code=pb.FAILED, message=text))
            return
        self._left_nothing = not member.away  # a part of it is saved: that is the process's to bring back
        if self._left_nothing and member.state_bytes:
            member.state_bytes = 0
            self._resized(member)
        member.moved(pb.Moved(op=op, device_bytes_before=used, device_bytes_after=used))

    def _move_in(self, op: str) -> None:
        if self._left_nothing:
            self._left_nothing = False
            self._member.moved(pb.Moved(op=op))
            return
        text = "it closed its channel to the agent while its state was saved: nobody can bring that back"
        self._member.refused(pb.MoveFailed(op=op, code=pb.FAILED, message=text))


class ClosedChannels:
    def __init__(
        self,
        *,
        grace: float,
        asked: Callable[[Member], bool],
        measure: Measure,
        resized: Callable[[Member], None],
    ) -> None:
        """``grace``: seconds after which a stream that ended was closed. ``asked``: does its backend need the
        channel, of one that is a member still? ``resized`` is told of members whose state is no more."""
        self._grace, self._asked, self._measure, self._resized = grace, asked, measure, resized
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._stopped = False

    def lost(self, member: Member, unanswered: bool) -> None:
        """Its stream ended. ``unanswered``: it may be at an order still, and dial again when that is done."""
        self._stop(member)
        if member.lost and not (unanswered or self._stopped):
            timer = asyncio.get_running_loop().call_later(self._grace, self.over, member)
            self._timers[member.buffer] = timer

    def over(self, member: Member) -> None:
        """Its grace is over."""
        self._stop(member)
        if not member.lost or member.channel is not None or member.has_ended or not self._asked(member):
            return
        if stopped(member.pid) or cgroups.frozen(cgroups.groups_of(member.pid)):
            # It cannot have dialled; the kernel tells nobody when it goes on.
            self.lost(member, False)
            return
        log.warning(
            "job %s: process %d has closed its channel to the agent and lives on. What it has on the device "
            "cannot be moved: it is to be given back before others need the room, or the process to register "
            "again",
            member.job,
            member.pid,
        )
        member.attach(ClosedChannel(member, self._measure, self._resized))

    def stop(self) -> None:
        """Streams that end from now on are ended by the agent."""
        self._stopped = True
        for timer in self._timers.values():
            timer.cancel()

    def _stop(self, member: Member) -> None:
        if (timer := self._timers.pop(member.buffer, None)) is not None:
            timer.cancel()


def _anonymous(member: Member) -> int:
    try:
        return member.memory.measure(NOTABLE)
    except Gone:
        return 0
