"""Keeps the long-running tasks of one process by name. When one of them breaks, the process is told and
stops.

A background task that dies unseen leaves a process that looks alive and does nothing; here its error is
logged with its name and raised out of ``wait``, which every app awaits beside its stop signal.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from coslice.errors import CosliceError

log = logging.getLogger(__name__)


class Crashed(CosliceError):
    """A task of the app ended with an error; ``__cause__`` is that error, ``data["task"]`` its name."""


class Supervisor:
    def __init__(self, name: str) -> None:
        self.name = name
        self._tasks: list[asyncio.Task[object]] = []
        self._crash: Crashed | None = None
        self._broken = asyncio.Event()
        self._stopping = False

    def start(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        """Run ``work`` until it ends or ``stop`` is called. An error in it is a crash of the app; a normal
        end is not."""
        task: asyncio.Task[object] = asyncio.get_running_loop().create_task(work, name=f"{self.name}/{name}")
        self._tasks.append(task)
        task.add_done_callback(self._ended)
        return task

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(task.get_name() for task in self._tasks)

    async def wait(self) -> None:
        """Blocks while all is well; raises ``Crashed`` as soon as a task breaks."""
        await self._broken.wait()
        assert self._crash is not None
        raise self._crash

    async def stop(self, grace: float = 10.0) -> None:
        """Cancel all tasks, the newest first, and wait for them, at most ``grace`` seconds."""
        self._stopping = True
        pending = [task for task in reversed(self._tasks) if task is not asyncio.current_task()]
        for task in pending:
            task.cancel()
        if not pending:
            return
        _, late = await asyncio.wait(pending, timeout=grace)
        for task in late:
            log.error("%s did not stop within %.0f s", task.get_name(), grace)

    def _ended(self, task: asyncio.Task[object]) -> None:
        if task in self._tasks:
            self._tasks.remove(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        told = isinstance(error, CosliceError)  # a disk that is full, a leader that was deposed: nobody's bug
        where = None if told and not log.isEnabledFor(logging.DEBUG) else error
        log.error("%s broke: %s", task.get_name(), error, exc_info=where)
        if self._crash is None and not self._stopping:
            self._crash = Crashed(f"{task.get_name()} broke: {error}", data={"task": task.get_name()})
            self._crash.__cause__ = error
            self._broken.set()
