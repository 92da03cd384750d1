"""Calls of the CUDA driver by NVIDIA's ``cuda-checkpoint`` program, where cuda-bindings is not installed.

Explicit actions only: ``--toggle`` does whatever it thinks is next, and ignores a device map. The program
says in words what went wrong, so a code is guessed from them, and the state is read after every failure. Each
run initialises CUDA, which takes seconds on a large node: prefer the bindings.
"""

import asyncio
import logging
import os
import time
from pathlib import Path

from coslice.agent.backends.cuda_calls import (
    ILLEGAL_STATE,
    INVALID_VALUE,
    NOT_INITIALIZED,
    NOT_READY,
    NOT_SUPPORTED,
    OK,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    UNAVAILABLE,
    UNKNOWN_STATE,
    CallHangs,
    Reply,
    Request,
    State,
)
from coslice.agent.backends.process_guard import guard_of, hold, is_locked
from coslice.agent.privileged import Ended, run_program

log = logging.getLogger(__name__)

_WORDS = {
    "out of memory": OUT_OF_MEMORY,
    "not ready": NOT_READY,
    "timed out": NOT_READY,
    "initialization error": NOT_INITIALIZED,
    "invalid argument": INVALID_VALUE,
    "operation not supported on this os": OPERATING_SYSTEM,
    "os call failed": OPERATING_SYSTEM,
    "operation not supported": NOT_SUPPORTED,
    "present state": ILLEGAL_STATE,
    "illegal state": ILLEGAL_STATE,
}
_UNKNOWN = 999


class CheckpointProgram:
    def __init__(self, program: Path, folder: Path) -> None:
        """``folder``: for the files that guard processes against two calls at once; made if need be."""
        self._program, self._folder = program, folder
        self._hanging: dict[int, asyncio.Task[Ended]] = {}

    def hanging(self, pid: int) -> bool:
        return pid in self._hanging or is_locked(guard_of(self._folder, pid))

    async def warm(self, calls: int) -> None:
        pass

    async def call(self, request: Request, *, deadline: float) -> Reply:
        if request.pid in self._hanging:
            raise CallHangs(
                f"an earlier {self._program.name} for process {request.pid} still hangs", pid=request.pid
            )
        began = time.monotonic()
        reply = await self._run(request, deadline=deadline)
        if request.action not in ("state", "tid") and (reply.code or request.verify):
            after = await self._run(Request(action="state", pid=request.pid), deadline=deadline)
            reply = Reply(code=reply.code, name=reply.name, state=after.state)
        return Reply(
            code=reply.code,
            name=reply.name,
            state=reply.state,
            tid=reply.tid,
            began=began,
            seconds=time.monotonic() - began,
        )

    async def close(self) -> None:
        for task in self._hanging.values():
            task.cancel()  # the program ends by itself

    async def _run(self, request: Request, *, deadline: float) -> Reply:
        """The program inherits a locked file, so that no second call is made while it runs, whoever waits."""
        arguments = self._arguments(request)
        if request.action in ("state", "tid"):
            work = run_program(arguments)
        else:
            work = _holding(self._guard(request), arguments)
        return await self._await(asyncio.create_task(work), request, deadline=deadline)

    def _guard(self, request: Request) -> int:
        guard = hold(self._folder, request.pid)
        if guard is None:
            raise CallHangs(
                f"a driver call for process {request.pid} that an earlier agent made still hangs",
                pid=request.pid,
            )
        return guard

    async def _await(self, task: "asyncio.Task[Ended]", request: Request, *, deadline: float) -> Reply:
        try:
            async with asyncio.timeout(deadline):
                ended = await asyncio.shield(task)
        except (TimeoutError, asyncio.CancelledError) as error:
            self._hanging[request.pid] = task
            task.add_done_callback(lambda _: self._hanging.pop(request.pid, None))
            if isinstance(error, asyncio.CancelledError):
                raise
            raise CallHangs(
                f"{self._program.name} did not {request.action} process {request.pid} within {deadline:g} s",
                pid=request.pid,
            ) from None
        except OSError as error:
            return Reply(code=UNAVAILABLE, name=f"{self._program} cannot be run: {error.strerror}")
        return _reply(request, ended)

    def _arguments(self, request: Request) -> list[str]:
        pid = ["--pid", str(request.pid)]
        match request.action:
            case "state":
                return [str(self._program), "--get-state", *pid]
            case "tid":
                return [str(self._program), "--get-restore-tid", *pid]
            case "lock":
                timeout = ["--timeout", str(request.timeout_ms)]
                return [str(self._program), "--action", "lock", *pid, *timeout]
            case "restore" if request.pairs:
                devices = ",".join(f"{old}={new}" for old, new in request.pairs)
                return [str(self._program), "--action", "restore", *pid, "--device-map", devices]
            case action:
                return [str(self._program), "--action", action, *pid]


async def _holding(guard: int, arguments: list[str]) -> Ended:
    try:
        return await run_program(arguments, keep=(guard,))
    finally:
        os.close(guard)


def _reply(request: Request, ended: Ended) -> Reply:
    if ended.code:
        text = ended.err.strip() or ended.out.strip() or f"exit status {ended.code}"
        code = next((code for words, code in _WORDS.items() if words in text.lower()), _UNKNOWN)
        return Reply(code=code, name=text.splitlines()[-1])
    word = ended.out.strip()
    if request.action == "state":
        known = {state.name.lower(): int(state) for state in State}
        return Reply(code=OK, state=known.get(word.lower(), UNKNOWN_STATE))
    if request.action == "tid":
        return Reply(code=OK, tid=int(word)) if word.isdigit() else Reply(code=_UNKNOWN, name=word)
    return Reply(code=OK)
