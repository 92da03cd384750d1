"""Calls of the CUDA driver by helper processes (``cuda_helper``), kept warm: starting CUDA takes seconds.

A helper whose call does not come back in time is left alone (killing it would put the driver out of order)
and another takes its place; the process it was called for is out of bounds until the call is over.
"""

import asyncio
import contextlib
import logging
from pathlib import Path

import msgspec
from msgspec.structs import replace

from coslice.agent.backends.cuda_calls import (
    GUARDED,
    UNAVAILABLE,
    CallBroke,
    CallHangs,
    Reply,
    Request,
    UsableError,
)
from coslice.agent.backends.process_guard import guard_of, is_locked
from coslice.agent.privileged import Helper, HelperGone

log = logging.getLogger(__name__)

MODULE = "coslice.agent.backends.cuda_helper"
KEPT = 64
"""Idle helpers beyond these end. Each costs some 60 MiB of host memory."""
START_SECONDS = 60.0


class HelperPool:
    def __init__(self, folder: Path) -> None:
        """``folder``: for the files that guard processes against two calls at once; made if need be."""
        self._folder = folder
        self._idle: list[Helper] = []
        self._hanging: dict[int, Helper] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._encode, self._decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(Reply).decode
        self._closed = False

    def hanging(self, pid: int) -> bool:
        return pid in self._hanging or is_locked(guard_of(self._folder, pid))

    @property
    def pids(self) -> frozenset[int]:
        """Of the helpers: the driver may list them, and they are nobody's job."""
        return frozenset(helper.pid for helper in (*self._idle, *self._hanging.values()))

    async def warm(self, calls: int) -> None:
        """Raises ``UsableError`` where CUDA cannot be used."""
        lacking = calls - len(self._idle)
        if lacking > 0:
            fresh = await asyncio.gather(*(self._start() for _ in range(lacking)), return_exceptions=True)
            for each in fresh:
                if isinstance(each, BaseException):
                    raise each
            self._idle += [each for each in fresh if isinstance(each, Helper)]

    async def call(self, request: Request, *, deadline: float) -> Reply:
        if request.pid in self._hanging:
            helper = self._hanging[request.pid]
            raise CallHangs(
                f"an earlier driver call for process {request.pid} still hangs (helper {helper.pid})",
                pid=request.pid,
            )
        helper = self._idle.pop() if self._idle else await self._start()
        if request.action not in ("state", "tid"):
            request = replace(request, guard=str(guard_of(self._folder, request.pid)))
        try:
            async with asyncio.timeout(deadline):
                reply = self._decode(await helper.ask(self._encode(request)))
        except TimeoutError:
            self._leave(helper, request)
            raise CallHangs(
                f"the driver did not {request.action} process {request.pid} within {deadline:g} s (helper "
                f"{helper.pid} still waits for it)",
                pid=request.pid,
            ) from None
        except asyncio.CancelledError:
            self._leave(helper, request)
            raise
        except HelperGone as gone:
            raise CallBroke(f"{request.action} of process {request.pid}: {gone}") from None
        self._put_back(helper)
        if reply.code == GUARDED:
            raise CallHangs(
                f"a driver call for process {request.pid} that an earlier agent made still hangs",
                pid=request.pid,
            )
        return reply

    async def close(self) -> None:
        """Idle helpers end now; those that hang when their call does."""
        self._closed = True
        for helper in (*self._idle, *self._hanging.values()):
            helper.close()
        self._idle.clear()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _start(self) -> Helper:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        helper = Helper(MODULE)
        try:
            async with asyncio.timeout(START_SECONDS):
                hello = self._decode(await helper.ask(self._encode(Request(action="hello"))))
        except TimeoutError:
            helper.close()
            raise UsableError(f"the CUDA driver did not start within {START_SECONDS:g} s") from None
        except HelperGone as gone:
            raise UsableError(f"the CUDA driver does not start: {gone}") from None
        if hello.code == UNAVAILABLE:
            helper.close()
            raise UsableError(hello.name)
        return helper

    def _put_back(self, helper: Helper) -> None:
        if self._closed or helper.ended.is_set() or len(self._idle) >= KEPT:
            helper.close()
        else:
            self._idle.append(helper)

    def _leave(self, helper: Helper, request: Request) -> None:
        """Its call goes on without us."""
        self._hanging[request.pid] = helper
        task = asyncio.create_task(self._await_late(helper, request), name=f"late {request.action}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await_late(self, helper: Helper, request: Request) -> None:
        with contextlib.suppress(HelperGone):
            await helper.idle()
        if self._hanging.get(request.pid) is helper:
            del self._hanging[request.pid]
        log.warning("the %s of process %d came back late", request.action, request.pid)
        self._put_back(helper)
