"""A workload channel of the upstream protocol, as one of ours: the agent's orders to move become its
commands, and its results become answers, with figures that are measured here because it has none.

Its workload knows neither names of operations nor where its state is, so nothing is ever sent twice: an order
that it carried out already is answered from the ledger. Called by members like any other channel.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence

import grpc
from msgspec.structs import replace

from coslice.agent.members import Member, OpenChannel
from coslice.agent.occupancy import NOTABLE
from coslice.agent.upstream_ledger import Entry, Ledger, Place, judged
from coslice.sizes import format_size
from coslice.wire.upstream import snapshot_agent_pb2 as up
from coslice.wire.v1 import coslice_pb2 as pb

log = logging.getLogger(__name__)

MODES = {"offload": up.SUSPEND_MODE_OFFLOAD, "discard": up.SUSPEND_MODE_DISCARD}
ENOUGH = 0.05
"""Share of the memory in use that must leave at least: how much of it is state, the workload does not say."""

BROKEN = "its stream broke before it answered"

Measure = Callable[[int, str], Awaitable[int]]
"""Bytes that a process uses on its device, now: pid, kind of device."""


class Broken(Exception):
    """The stream ended before the answer came."""


class UpstreamChannel(OpenChannel):
    def __init__(self, *, ledger: Ledger, measure: Measure, broken: Callable[[Member], None]) -> None:
        """``broken`` is told when the stream ends before an order was answered: what had left goes back once
        the process is here again, which can take long."""
        super().__init__()
        self._ledger, self._measure, self._broken = ledger, measure, broken
        self.default_mode = ""
        self.restore_tags: Sequence[str] = ()
        """Of the restore that comes next: our own orders have none."""
        self.closed: tuple[grpc.StatusCode, str] | None = None
        """How the stream ends, if not well."""
        self.unanswered = False
        """It ended before an order was answered, which its process may be at still."""
        self._commands: asyncio.Queue[up.AgentCommand | None] = asyncio.Queue()
        self._waiting: dict[str, asyncio.Future[up.CommandResult]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = False

    # ── as members see it ──────────────────────────────────────────────────

    def send(self, command: pb.WorkloadCommand) -> None:
        match command.WhichOneof("kind"):
            case "move_out":
                self._spawn(self._move_out(command.move_out), command.move_out.op)
            case "move_in":
                self._spawn(self._move_in(command.move_in), command.move_in.op)
            case _:
                pass  # upstream has no words for the others, and they need no answer

    def end(self) -> None:
        """What is under way fails: its answer would come on a stream that is gone."""
        self._over = True
        self._commands.put_nowait(None)
        self.unanswered = self.unanswered or bool(self._waiting)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Broken())

    def leave(self) -> None:
        """The agent stops: nothing fails by that. What has no answer yet is the next agent's to settle."""
        for task in self._tasks:
            task.cancel()
        self.end()

    async def take_over(self) -> None:
        """Its process has opened another: returns once nothing is under way here."""
        self.end()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ── as the stream sees it ──────────────────────────────────────────────

    async def next_command(self) -> up.AgentCommand | None:
        """None: the stream is over."""
        return await self._commands.get()

    def close(self, status: grpc.StatusCode, message: str) -> None:
        if self.closed is None:
            self.closed = (status, message)
        self.end()

    def hear(self, result: up.CommandResult) -> None:
        """An answer to a command that is unknown, or was given up, is dropped."""
        waiting = self._waiting.get(result.command_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(result)

    # ── moves ──────────────────────────────────────────────────────────────

    async def _move_out(self, move: pb.MoveOut) -> None:
        member = self._member()
        entry = self._ledger.of(member)
        if entry.place is Place.AWAY:
            member.moved(pb.Moved(op=move.op, bytes=entry.freed))
            return
        if entry.place is not Place.HERE:
            self._refuse(move.op, "nobody knows where its state is: restore it first")
            return
        before = await self._measure(member.pid, member.device)
        entry = replace(entry, place=Place.LEAVING, before=before)
        await self._ledger.put(entry)
        mode = self._mode(member, move)
        error = await self._ask(up.AgentCommand(snapshot=up.SnapshotCommand(mode=mode, tags=move.tags)))
        if error is None:
            await self._left(member, entry, move, began=before)
        elif error:  # so its state is here, unless its memory says otherwise
            fell = judged(entry, await self._measure(member.pid, member.device)) is Place.AWAY
            await self._ledger.put(replace(entry, place=Place.UNSURE if fell else Place.HERE))
            self._refuse(move.op, f"its workload could not save its state: {error}")
        else:
            member.away = max(1, member.away)  # perhaps: it has to come back before it runs
            self._refuse(move.op, BROKEN)
            self._broken(member)

    async def _left(self, member: Member, entry: Entry, move: pb.MoveOut, *, began: int) -> None:
        """It says that its state has left; by its word alone nothing counts."""
        after = await self._measure(member.pid, member.device)
        freed, used = max(0, began - after), began - member.baseline if member.device == "host" else began
        if used >= NOTABLE and freed < ENOUGH * used:
            text = (
                f"its workload said that its state is saved, and its memory fell by {format_size(freed)} of "
                f"{format_size(used)}"
            )
            back = await self._ask(up.AgentCommand(restore=up.RestoreCommand()))
            await self._ledger.put(replace(entry, place=Place.HERE if back is None else Place.UNSURE))
            self._refuse(move.op, text)
            return
        if member.device == "host":  # what is left is not state, whatever it had when it registered
            member.baseline = min(member.baseline, after)
        await self._ledger.put(replace(entry, place=Place.AWAY, freed=freed))
        member.moved(pb.Moved(op=move.op, bytes=freed, device_bytes_before=began, device_bytes_after=after))

    async def _move_in(self, move: pb.MoveIn) -> None:
        member = self._member()
        entry = self._ledger.of(member)
        if entry.place is Place.HERE:
            member.moved(pb.Moved(op=move.op))
            return
        before = await self._measure(member.pid, member.device)
        tags, self.restore_tags = self.restore_tags, ()
        told = Place.RETURNING if entry.place is Place.AWAY else Place.UNSURE
        await self._ledger.put(replace(entry, place=told, before=before))
        error = await self._ask(up.AgentCommand(restore=up.RestoreCommand(tags=tags)))
        if error is None:
            after = await self._measure(member.pid, member.device)
            await self._ledger.put(replace(entry, place=Place.HERE))
            member.moved(pb.Moved(op=move.op, bytes=max(0, after - before), device_bytes_after=after))
        elif error:
            await self._ledger.put(entry)  # may be tried again
            self._refuse(move.op, f"its workload could not restore its state: {error}")
        else:
            self._refuse(move.op, BROKEN)
            self._broken(member)

    async def _ask(self, command: up.AgentCommand) -> str | None:
        """None: done. Otherwise what the workload says against it; empty: the stream broke."""
        if self._over:
            return ""
        command.command_id = str(uuid.uuid4())  # the wire's own; nothing is found again by it
        answer = asyncio.get_running_loop().create_future()
        self._waiting[command.command_id] = answer
        self._commands.put_nowait(command)
        try:
            result = await answer
        except Broken:
            return ""
        finally:
            del self._waiting[command.command_id]
        return None if result.ok else result.error or "it gives no reason"

    def _mode(self, member: Member, move: pb.MoveOut) -> up.SuspendMode.ValueType:
        """Groups ask for no mode of their own: what the workload registered counts there."""
        wanted = self.default_mode if member.group and self.default_mode else move.mode
        return MODES.get(wanted or self.default_mode, up.SUSPEND_MODE_OFFLOAD)

    def _refuse(self, op: str, message: str) -> None:
        self._member().refused(pb.MoveFailed(op=op, code=pb.FAILED, message=message))

    def _member(self) -> Member:
        assert self.member is not None, "orders come after the registration"
        return self.member

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"upstream channel: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s broke: %s", task.get_name(), error, exc_info=error)
