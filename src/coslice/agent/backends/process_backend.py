"""What backends of whole processes have in common: one operation of a job at a time and to its end, and a
ledger of who is parked.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from coslice.agent.backends.base import Defaults, MoveError, NodeContext
from coslice.agent.backends.process_hooks import Hooks
from coslice.agent.backends.process_ledger import Entry, Key, Ledger, Target
from coslice.agent.members import Member

log = logging.getLogger(__name__)

T = TypeVar("T")


class ProcessBackend(Defaults):
    def __init__(self, name: str, node: NodeContext, *, patience: float) -> None:
        """``patience``: seconds for which ``close`` waits for operations to end."""
        self._name, self._node, self._patience = name, node, patience
        self._ledger = Ledger(name, node.store, node.found)
        self._hooks = Hooks(timeout=node.config.move_timeout, section_wait=node.config.section_wait)
        self._turns: dict[Key, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def holds(self, members: Sequence[Member]) -> bool:
        entry = self._entry(members)
        return entry is not None and entry.phase != "leaving"

    async def close(self) -> None:
        """Operations go on to their end, within reason: half a swap is worse than a slow stop."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._patience)

    async def _whole(self, members: Sequence[Member], work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """One operation of a job at a time, and to its end, whatever becomes of the caller."""

        async def run() -> T:
            async with self._turns.setdefault(_key(members), asyncio.Lock()):
                return await work()

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a move ended: %s", error)

    def _check_whole(self, mode: str, tags: Sequence[str]) -> None:
        if tags or mode != "offload":
            raise MoveError(f"backend {self._name} moves whole processes: no tags, and no mode but offload")

    def _entry(self, members: Sequence[Member]) -> Entry | None:
        """What is parked of this very start of the job."""
        entry = self._ledger.get(_key(members)) if members else None
        return entry if entry is not None and entry.incarnation == members[0].incarnation else None

    @staticmethod
    def _new_entry(members: Sequence[Member], op: str, targets: tuple[Target, ...]) -> Entry:
        group, job = _key(members)
        return Entry(
            group=group, job=job, incarnation=members[0].incarnation, phase="leaving", op=op, targets=targets
        )

    @staticmethod
    def _mark(members: Sequence[Member], *, parked: bool) -> None:
        for member in members:
            member.parked = parked
            member.residual = 0


def _key(members: Sequence[Member]) -> Key:
    return (members[0].group, members[0].job)
