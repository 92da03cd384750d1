"""Operations of the upstream protocol, carried out: begun when they are durable, done by the direct API,
carried on after a restart once their processes are back.

Called by the service. One operation of a job at a time; which may begin is the service's to say.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

import grpc

from coslice.agent.backends.base import ProcessRef
from coslice.agent.direct import NO_GROUP, DirectApi, DirectRefused
from coslice.agent.members import Member, Members
from coslice.agent.processes import alive
from coslice.agent.upstream_channel import BROKEN, UpstreamChannel
from coslice.agent.upstream_ledger import Entry, Ledger
from coslice.agent.upstream_operations import Operation, Operations, Order
from coslice.core.ids import JobId

log = logging.getLogger(__name__)

COME_BACK = 60.0
"""Seconds that an interrupted operation waits for its processes to return to the restarted agent."""


class Moves:
    def __init__(
        self, *, direct: DirectApi, members: Members, operations: Operations, ledger: Ledger
    ) -> None:
        self._direct, self._members = direct, members
        self._operations, self._ledger = operations, ledger
        self._moving: dict[str, Operation] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def resume(self) -> None:
        """Carry on with what the last agent began."""
        for operation in self._operations.pending():
            self._begin(operation, again=True)

    async def close(self) -> None:
        """What is under way is the next agent's to carry on."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ── what is under way ──────────────────────────────────────────────────

    def jobs(self) -> tuple[str, ...]:
        """Those of which an operation is under way."""
        return tuple(self._moving)

    def under_way(self, job: str) -> bool:
        """An operation, or a move that somebody asked of the direct API?"""
        return job in self._moving or self._direct.moving(job)

    def absent(self, job: str) -> list[Entry]:
        """Its processes that the last agent moved, and that have not come back to this one."""
        known = {(m.pid, m.started) for m in self._members.of_job(NO_GROUP, JobId(job))}
        return [e for e in self._ledger.living(NO_GROUP, job) if (e.pid, e.started) not in known]

    # ── an operation ───────────────────────────────────────────────────────

    async def start(self, order: Order, *, fault: str) -> Operation:
        """Durable when it returns. ``fault``: why it has failed already; empty: it is carried out, so nothing
        of the job may be under way."""
        members, absent = self._members.of_job(NO_GROUP, JobId(order.job)), self.absent(order.job)
        processes = [ProcessRef(m.pid, m.started) for m in members]
        processes += [ProcessRef(e.pid, e.started) for e in absent]
        operation = self._operations.new(order, processes)
        if fault:
            await self._operations.fail(operation, fault)
            return operation
        self._moving[order.job] = operation
        # Its caller may go away meanwhile: what is saved is also begun, or the next agent would do it.
        await asyncio.shield(self._spawn(self._saved(operation, again=bool(absent)), f"save {operation.id}"))
        return operation

    async def _saved(self, operation: Operation, *, again: bool) -> None:
        try:
            await self._operations.save(operation)
        except BaseException:
            del self._moving[operation.order.job]
            raise
        self._begin(operation, again=again)

    def _begin(self, operation: Operation, *, again: bool) -> None:
        """``again``: of a job whose processes were the last agent's, and have to come back first."""
        self._moving[operation.order.job] = operation
        self._spawn(self._carry_out(operation, again=again), f"{operation.order.kind} {operation.id}")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"upstream: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _carry_out(self, operation: Operation, *, again: bool) -> None:
        job = operation.order.job
        try:
            if again:
                await self._processes_back(operation)
            stored, on_device = await self._move(operation.order)
        except DirectRefused as refusal:
            if self._operations.get(operation.id) is operation:  # its stream broke, and that was told at once
                await self._operations.fail(operation, str(refusal))
        except Exception as error:
            log.exception("operation %s broke", operation.id)
            await self._operations.fail(operation, f"the agent could not do it: {error!r}")
        else:
            await self._operations.complete(operation, stored=stored, on_device=on_device)
        finally:
            if self._moving.get(job) is operation:
                del self._moving[job]

    def broken(self, member: Member) -> None:
        """Its stream ended before it answered an order."""
        operation = self._moving.get(member.job)
        if member.group == NO_GROUP and operation is not None:
            text = f"the {operation.order.kind} of {member.job} failed: process {member.pid}: {BROKEN}"
            self._spawn(self._operations.fail(operation, text), f"end of {operation.id}")

    async def _move(self, order: Order) -> tuple[int, int]:
        """Bytes in host memory and on the device when it is done."""
        if order.kind == "snapshot":
            out, nothing = await self._direct.snapshot(
                order.job,
                mode=order.mode or self._default_mode(order.job),
                tags=order.tags,
                timeout=0.0,
                pids=order.pids,
                backend=order.backend,
                admin=True,  # who named them was checked when it began
            )
            return (
                (self._held(order.job), self._on_device(order.job)) if nothing else (out.bytes, out.residual)
            )
        for member in self._members.of_job(NO_GROUP, JobId(order.job)):
            if isinstance(channel := member.channel, UpstreamChannel):
                channel.restore_tags = order.tags
        back, nothing = await self._direct.restore(order.job, timeout=0.0)
        return 0, self._on_device(order.job) if nothing else back.bytes

    def _default_mode(self, job: str) -> str:
        channels = (member.channel for member in self._members.of_job(NO_GROUP, JobId(job)))
        return next(
            (c.default_mode for c in channels if isinstance(c, UpstreamChannel) and c.default_mode), ""
        )

    def _held(self, job: str) -> int:
        """Bytes of the job that are in host memory, as far as anybody counted them."""
        members = self._members.of_job(NO_GROUP, JobId(job))
        return sum(m.state_bytes or self._ledger.of(m).freed for m in members if m.sleeps)

    def _on_device(self, job: str) -> int:
        """Bytes of the job's state there, as far as anybody has seen it move."""
        members = self._members.of_job(NO_GROUP, JobId(job))
        return sum(m.usage() if m.sleeps else max(m.usage(), self._ledger.of(m).freed) for m in members)

    async def _processes_back(self, operation: Operation) -> None:
        """Raises ``DirectRefused`` if they do not come."""

        def missing() -> list[int]:
            known = {(m.pid, m.started) for m in self._members.of_job(NO_GROUP, JobId(operation.order.job))}
            return [
                each.pid
                for each in operation.processes
                if (each.pid, each.started) not in known and alive(each.pid, each.started)
            ]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COME_BACK):
                while missing():
                    await self._members.changed()
        if gone := missing():
            raise DirectRefused(
                grpc.StatusCode.ABORTED,
                f"the agent restarted, and process {gone[0]} did not come back to it within {COME_BACK:g} s",
            )
