"""Brings the next job's state in while another's leaves, never more than the device has room for.

It takes the room that the other one makes, and of what was free before only what will be lacking: memory that
was just in use is at hand, and what lay idle may be the system's to find again. On a virtual machine whose
host takes free pages back, pages that nobody used for two seconds cost thirty times as much.

Nothing depends on it: the next job stays parked until its restore, which then finds some of its bytes there
already. So it may be called off at any moment, and then the device is as it would have been. The group makes
one for an eviction, the backend begins it and calls it off if the eviction fails.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

from coslice.agent.host import counter_error
from coslice.agent.members import Member, MoveRefused
from coslice.core.ids import JobId, OpId

log = logging.getLogger(__name__)

WORTH = 64 << 20
"""Below this a state is back sooner than told to come."""
STEP = 8 << 20
"""Room for less than this is not worth another message."""
MARGIN = 2 * counter_error()
"""Memory as measured is that far from the truth, for each process."""
CALL_OFF_SECONDS = 30.0


class Ahead:
    """``job``: whose state comes."""

    def __init__(self, job: JobId, members: Sequence[Member], *, op: OpId, room: Callable[[], int]) -> None:
        """``room``: bytes of the device that nobody uses, as measured now."""
        self.job, self._members, self.op, self._room = job, members, op, room
        self._going: dict[Member, int] = {}
        self._gone: dict[Member, int] = {}
        self._told = [0] * len(members)
        """Up to where each was told to come."""
        self._over = False
        self._changed = asyncio.Event()

    @classmethod
    def for_job(
        cls, job: JobId, members: Sequence[Member], *, op: OpId, room: Callable[[], int]
    ) -> "Ahead | None":
        """None if it would not pay, or cannot be done with these processes."""
        if not members or not all(m.sleeps and m.connected and m.divisible for m in members):
            return None
        return cls(job, members, op=op, room=room) if sum(map(_parked, members)) >= WORTH else None

    def begin(self, leaving: Mapping[Member, int]) -> None:
        """``leaving`` give way part by part from now on, so many bytes each."""
        self._going |= leaving
        self._gone |= dict.fromkeys(leaving, 0)
        for member in (*self._members, *leaving):
            member.heard = self._look
        self._look()

    def end(self) -> None:
        """What has come stays for the restore."""
        self._over = True

    def _look(self) -> None:
        """Something left, or came: is there room for more?"""
        self._changed.set()
        self._gone = {member: max(gone, member.given) for member, gone in self._gone.items()}
        if self._over:
            return
        here = [member.ahead or 0 for member in self._members]
        if not any(member.asked for member in self._members):
            self._told = here
        whole = list(map(_parked, self._members))
        rest = [size - told for size, told in zip(whole, self._told, strict=True)]
        made = sum(self._gone.values()) + max(0, sum(whole) - sum(self._going.values()))
        least = min(STEP, sum(rest))
        if least <= 0 or made - sum(self._told) < least:
            return
        # Of a command that is not answered yet a part may be done: that counts twice then, never less.
        spare = sum(here) + self._room() - len(self._members) * MARGIN
        more = min(spare, made) - sum(self._told)
        if more < least:
            return
        for index, (member, size) in enumerate(zip(self._members, rest, strict=True)):
            most = self._told[index] + min(size, more * size // sum(rest))
            with contextlib.suppress(MoveRefused):
                member.bring_ahead(self.op, most)
                self._told[index] = most

    async def call_off(self) -> None:
        """Free what came, and wait until it is freed."""
        self._over = True
        for member in self._members:
            if member.ahead is not None:
                with contextlib.suppress(MoveRefused):
                    member.bring_ahead(self.op, 0)
        try:
            async with asyncio.timeout(CALL_OFF_SECONDS):
                while any(member.asked and not member.has_ended for member in self._members):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            log.error("job %s: what was brought ahead of its turn may still be on the device", self.job)
        for member in self._members:
            if not member.asked:
                member.ahead = None


def _parked(member: Member) -> int:
    return member.state_bytes if member.parked else member.away
