"""Brings the next job's state in while another's leaves, never more than the device has room for.

Nothing depends on it: the next job stays parked until its restore, which then finds some of its bytes there
already. So it may be called off at any moment, and then the device is as it would have been. The group makes
one for an eviction, the backend begins it and calls it off if the eviction fails.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

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

    def begin(self, leaving: Sequence[Member]) -> None:
        """``leaving`` give way part by part from now on."""
        for member in (*self._members, *leaving):
            member.heard = self._look
        self._look()

    def end(self) -> None:
        """What has come stays for the restore."""
        self._over = True

    def _look(self) -> None:
        """Something left, or came: is there room for more?"""
        self._changed.set()
        if self._over or any(member.asked for member in self._members):
            return
        rest = [_parked(member) - (member.ahead or 0) for member in self._members]
        spare = self._room() - len(self._members) * MARGIN
        if sum(rest) <= 0 or spare < min(STEP, sum(rest)):
            return
        for member, size in zip(self._members, rest, strict=True):
            with contextlib.suppress(MoveRefused):
                member.bring_ahead(self.op, (member.ahead or 0) + min(size, spare * size // sum(rest)))

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
