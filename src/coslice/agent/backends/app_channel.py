"""The app channel: the workload process moves its own state when the agent asks it to, and the agent
measures.

A snapshot counts only if the members' memory fell by at least 95 % of what they registered: the word of a
process is not enough (engines were seen to answer success and free nothing). On any failure those that
moved are moved back, so a failed snapshot leaves the job as it was.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Mapping, Sequence

from coslice.agent.ahead import Ahead
from coslice.agent.backends.base import (
    Capabilities,
    Defaults,
    MoveError,
    NodeContext,
    Presence,
    Restored,
    Snapshotted,
)
from coslice.agent.buffers import HostBuffers, NoHostMemory
from coslice.agent.host import Gone
from coslice.agent.members import BACK, OUT, Member, MoveRefused
from coslice.agent.tiers.disk import Damaged
from coslice.errors import ConfigError
from coslice.sizes import format_size
from coslice.wire.v1 import coslice_pb2 as pb

log = logging.getLogger(__name__)

ENOUGH = 0.95
"""Share of the registered bytes that must leave. The rest is what allocators keep between blocks."""
SETTLE_STEP = 0.01


class AppChannelBackend(Defaults):
    def __init__(
        self,
        buffers: HostBuffers,
        *,
        section_wait: float = 30.0,
        move_timeout: float = 120.0,
        settle: float = 0.5,
        overlap: bool = True,
    ) -> None:
        """``overlap``: while one job's state leaves, the next one's may come."""
        self._buffers, self._overlap = buffers, overlap
        self._section_wait, self._timeout, self._settle = section_wait, move_timeout, settle

    def deadline(self, size: int) -> float:
        return self._timeout + 30.0

    def capabilities(self) -> Capabilities:
        return Capabilities(name="app_channel", parts=True, in_process=True, modes=("offload", "discard"))

    async def probe(self, members: Sequence[Member]) -> Presence:
        parked = sum(member.sleeps for member in members)
        used = sum(member.usage() for member in members)
        return Presence(live=len(members) - parked, parked=parked, device_bytes=used)

    async def snapshot(
        self, members: Sequence[Member], *, op: str, mode: str = "offload", tags: Sequence[str] = ()
    ) -> Snapshotted:
        leaving = [member for member in members if not member.parked]
        orders = [pb.MoveOut(mode=mode, tags=tags) for _ in leaving]
        return await self._snapshot(members, leaving, orders, op, None)

    async def snapshot_part(
        self, members: Sequence[Member], *, op: str, least: int, ahead: Ahead | None = None
    ) -> Snapshotted:
        leaving = [member for member in members if not member.parked]
        orders = [pb.MoveOut(mode="offload", at_least_bytes=share) for share in _shares(leaving, least)]
        return await self._snapshot(members, leaving, orders, op, ahead if self._overlap else None)

    async def _snapshot(
        self,
        members: Sequence[Member],
        leaving: Sequence[Member],
        orders: Sequence[pb.MoveOut],
        op: str,
        ahead: Ahead | None,
    ) -> Snapshotted:
        """``orders``: what each of ``leaving`` is to move."""
        began = time.monotonic()
        for member in leaving:
            member.returned = None  # its buffer is ours from here on
        await self._make_room(leaving, orders)
        for member in leaving:  # what left on an order that it did not answer in time has left all the same
            member.full = max(member.full if member.unsure else 0, _measure(member))
        there = [member.state_bytes - member.away for member in leaving]
        if ahead is not None:
            ahead.begin(
                {m: o.at_least_bytes or size for m, o, size in zip(leaving, orders, there, strict=True)}
            )
        outcomes = await asyncio.gather(
            *(
                self._move_out(m, op, o, give_way=ahead is not None)
                for m, o in zip(leaving, orders, strict=True)
            ),
            return_exceptions=True,
        )
        moved = [outcome for outcome in outcomes if isinstance(outcome, pb.Moved)]
        try:
            if len(moved) < len(outcomes):
                raise _as_move_error([outcome for outcome in outcomes if isinstance(outcome, BaseException)])
            await self._verify(leaving, orders, moved, there)
        except MoveError:
            if ahead is not None:
                await ahead.call_off()  # the room is theirs who go back
            await self._roll_back(leaving, op)
            raise
        for member, order, answer in zip(leaving, orders, moved, strict=True):
            member.unsure = False
            member.residual = _residual(member, answer)
            if member.device != "cuda" and not (order.tags or order.at_least_bytes or answer.left_bytes):
                member.empty = _measure(member)
            if order.mode == "discard":  # nothing is kept
                self._buffers.free(member.buffer)
        before = sum(m.state_bytes for m in members if m not in leaving)
        return Snapshotted(
            bytes=sum(answer.bytes for answer in moved) + before,
            residual=sum(member.residual for member in members),
            seconds=time.monotonic() - began,
            left=sum(_left(*each) for each in zip(leaving, moved, strict=True)),
            copied=sum(answer.copied_bytes for answer in moved),
            copy_seconds=max((answer.copy_s for answer in moved), default=0.0),
        )

    async def restore(self, members: Sequence[Member], *, op: str) -> Restored:
        began = time.monotonic()
        away = [member for member in members if member.sleeps]
        outcomes = await asyncio.gather(
            *(self._move_in(member, op) for member in away), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            raise _as_move_error(failures)
        moved = [outcome for outcome in outcomes if isinstance(outcome, pb.Moved)]
        return Restored(
            bytes=sum(answer.bytes for answer in moved),
            seconds=time.monotonic() - began,
            copy_seconds=max((answer.copy_s for answer in moved), default=0.0),
        )

    # ── one member ─────────────────────────────────────────────────────────

    async def _make_room(self, members: Sequence[Member], orders: Sequence[pb.MoveOut]) -> None:
        """Have every member's host buffer ready, or refuse before any process is touched."""
        wanted, bases = dict[str, int](), dict[str, int]()
        for member, order in zip(members, orders, strict=True):
            if order.mode == "discard":
                continue
            await self._handed_back(member)  # a part of its state may be on disk
            asked = member.away + (order.at_least_bytes or member.state_bytes)
            wanted[member.buffer] = min(member.kept, asked)
            if asked > member.kept or (
                member.common and not order.at_least_bytes
            ):  # frozen weights leave too
                bases |= member.bases
        try:
            self._buffers.check(wanted, bases)
            for name, size in wanted.items():
                await self._buffers.reserve(name, size)
        except NoHostMemory as error:
            raise MoveError(str(error), no_room=True) from None
        except Damaged as error:
            raise MoveError(str(error), lost=True) from None

    async def _move_out(self, member: Member, op: str, order: pb.MoveOut, *, give_way: bool) -> pb.Moved:
        move = pb.MoveOut(
            op=f"{op}{OUT}",
            mode=order.mode,
            tags=order.tags,
            at_least_bytes=order.at_least_bytes,
            give_way=give_way,
            deadline_s=self._section_wait,
            buffer_bytes=self._buffers.size(member.buffer),
        )
        return await member.move(move.op, pb.WorkloadCommand(move_out=move), timeout=self._timeout)

    async def _move_in(self, member: Member, op: str) -> pb.Moved:
        member.returned = None
        await self._handed_back(member)
        try:
            await self._buffers.fetch(member.buffer)  # from disk, if it is there
        except Damaged as error:
            raise MoveError(str(error), lost=True, pid=member.pid) from None
        except NoHostMemory as error:
            raise MoveError(str(error), no_room=True, pid=member.pid) from None
        move = pb.MoveIn(op=f"{op}{BACK}", deadline_s=self._timeout)
        answer = await member.move(move.op, pb.WorkloadCommand(move_in=move), timeout=self._timeout)
        member.unsure = False
        self._buffers.release(member.buffer)
        return answer

    async def _handed_back(self, member: Member) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._buffers.handed_back(member.buffer)
        except TimeoutError:
            raise MoveError(
                f"process {member.pid} did not come back with its host buffer within {self._timeout:g} s of "
                "the agent's restart: look at the process",
                pid=member.pid,
            ) from None

    async def _roll_back(self, members: Sequence[Member], op: str) -> None:
        """Bring back what left. One that never answered may move yet: its late answer is told to go back."""
        back = [member for member in members if member.sleeps]
        results = await asyncio.gather(
            *(self._move_in(member, f"{op}/rollback") for member in back), return_exceptions=True
        )
        for member, result in zip(back, results, strict=True):
            if isinstance(result, BaseException):
                log.error("job %s: process %d was not rolled back: %s", member.job, member.pid, result)
        for member in members:
            release = functools.partial(self._buffers.release, member.buffer)
            if member.sleeps or member.unsure:  # it may be writing to it, and will read it again
                member.returned = release
            else:
                release()

    async def _verify(
        self,
        members: Sequence[Member],
        orders: Sequence[pb.MoveOut],
        moved: Sequence[pb.Moved],
        there: Sequence[int],
    ) -> None:
        """Raise ``MoveError`` unless the members' memory really fell. ``there``: what they had before.

        The kernel tells nobody when memory has become free (pages of another thread's malloc trim, batched
        counters), so this measures again for a moment before it calls the process a liar.
        """
        wanted = [_wanted(*each) for each in zip(members, orders, moved, there, strict=True)]
        deadline = time.monotonic() + self._settle
        while True:
            fallen = [_fall(m, a, w) for m, a, w in zip(members, moved, wanted, strict=True)]
            if sum(fallen) >= ENOUGH * sum(wanted):
                return
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(SETTLE_STEP)
        worst = min(range(len(members)), key=lambda i: fallen[i] - wanted[i])
        raise MoveError(
            f"memory fell by {format_size(sum(fallen))}, {format_size(ENOUGH * sum(wanted))} of "
            f"{format_size(sum(wanted))} registered must leave: process {members[worst].pid} freed "
            f"{format_size(fallen[worst])} of {format_size(wanted[worst])}; something else keeps the "
            "state alive (another reference to its storage, or an allocator that does not give memory back)",
            pid=members[worst].pid,
        )


def make(node: NodeContext, settings: Mapping[str, object]) -> AppChannelBackend:
    """The entry point. One setting of its own, ``overlap=no``; its times are the agent's."""
    if unknown := settings.keys() - {"overlap"}:
        raise ConfigError(f"backend app_channel has no setting {', '.join(sorted(unknown))}: it has overlap")
    if (overlap := str(settings.get("overlap", "yes"))) not in ("yes", "no"):
        raise ConfigError(f"backend app_channel: overlap is {overlap!r}: yes or no")
    config = node.config
    return AppChannelBackend(
        node.buffers,
        section_wait=config.section_wait,
        move_timeout=config.move_timeout,
        settle=config.settle,
        overlap=overlap == "yes",
    )


def _shares(members: Sequence[Member], least: int) -> list[int]:
    """What each has to move so that ``least`` bytes leave in all, in proportion to what it has; 0: all."""
    there = [member.state_bytes - member.away for member in members]
    if not least or least >= sum(there) or not all(member.divisible for member in members):
        return [0] * len(members)
    return [-(-least * size // sum(there)) for size in there]


def _wanted(member: Member, order: pb.MoveOut, answer: pb.Moved, there: int) -> int:
    """Bytes that had to leave. It said how many did; of all of it, that is what it had registered before, or
    has now if that is less: what it wrote to shared weights becomes its own only as it leaves."""
    if order.tags or order.at_least_bytes:
        return max(answer.bytes, order.at_least_bytes)
    return min(there, member.state_bytes) if not answer.left_bytes else answer.bytes


def _left(member: Member, answer: pb.Moved) -> int:
    """Of its own state, what stayed; at least a byte while it has a part in what several jobs have there."""
    return max(answer.left_bytes, 1 if member.mapped else 0)


def _measure(member: Member) -> int:
    try:
        return member.memory.measure(member.state_bytes)
    except Gone:
        return 0


def _fall(member: Member, answer: pb.Moved, wanted: int) -> int:
    """By how many bytes its use of the device fell. On cuda these are the allocator's own figures.

    State that comes back into memory that its allocator had kept takes less than its size, and its leaving
    gives back no more. So whoever uses again what it used when all of its state had left has given all.
    """
    if member.device == "cuda":
        return answer.device_bytes_before - answer.device_bytes_after
    now = _measure(member)
    if now <= member.empty + (1 - ENOUGH) * wanted:
        return max(wanted, member.full - now)
    return max(0, member.full - now)


def _residual(member: Member, answer: pb.Moved) -> int:
    if member.device == "cuda":
        return answer.device_bytes_after
    return max(0, _measure(member) - member.baseline)


def _as_move_error(failures: Sequence[BaseException]) -> MoveError:
    for failure in failures:
        if isinstance(failure, MoveError):
            return failure
        if not isinstance(failure, MoveRefused):
            raise failure
    refusals = [failure for failure in failures if isinstance(failure, MoveRefused)]
    return MoveError(
        "; ".join(str(refusal) for refusal in refusals),
        busy=all(refusal.busy for refusal in refusals),
        no_room=all(refusal.no_room for refusal in refusals),
        lost=any(refusal.gone for refusal in refusals),
        pid=refusals[0].pid,
    )
