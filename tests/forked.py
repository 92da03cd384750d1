"""Scripts as processes of their own that begin as forks of one that has loaded torch and coslice already.

An interpreter that loads them takes seconds of a core, and the tests start hundreds. Only modules are loaded:
no thread runs and no connection is open where the fork happens (``multiprocessing``'s fork server).
"""

import asyncio
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["loaded"])
_starting = threading.Lock()
"""Processes are started from several threads, and the environment is everybody's."""


def context() -> multiprocessing.context.ForkServerContext:
    """Its server runs: it looks for modules on PYTHONPATH only, and says nothing if there are none."""
    with _starting:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), before)))
        try:
            forkserver.ensure_running()
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
    return _CONTEXT


class _Descriptor:
    """Arrives in the process as a number that is open there."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detached, (DupFd(self.number),)


def _detached(descriptor: Any) -> int:
    return int(descriptor.detach())


def _run(script: str, arguments: list[str], environment: dict[str, str], pipes: list[Any]) -> None:
    for number, pipe in enumerate(pipes):
        os.dup2(pipe, number)
        os.close(pipe)
    assert "loaded" in sys.modules, "the fork server could not load what is in loaded.py"
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


class _Started:
    """``input`` and ``output`` are our ends of its pipes."""

    def __init__(
        self, script: Path, arguments: Sequence[str], env: Mapping[str, str], stderr: IO[Any] | None = None
    ) -> None:
        theirs_in, self.input = os.pipe()
        self.output, theirs_out = os.pipe()
        errors = (stderr or sys.__stderr__).fileno()
        pipes = [_Descriptor(number) for number in (theirs_in, theirs_out, errors)]
        self._process = context().Process(
            target=_run, args=(str(script), list(arguments), dict(env), pipes), daemon=True
        )
        self._process.start()
        os.close(theirs_in)
        os.close(theirs_out)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class Forked(_Started):
    """As much of ``subprocess.Popen`` as tests use, with pipes for input and output."""

    def __init__(
        self,
        script: Path,
        *arguments: str,
        env: Mapping[str, str] = os.environ,
        stderr: IO[Any] | None = None,
    ) -> None:
        super().__init__(script, arguments, env, stderr)
        self.stdin: IO[str] = os.fdopen(self.input, "w")
        self.stdout: IO[str] = os.fdopen(self.output)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def run(program: str, *arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Its text, to its end. Raises nothing for its status."""
    script = folder / "program.py"
    script.write_text(program)
    with (folder / "errors").open("w+") as errors:
        process = Forked(script, *arguments, stderr=errors)
        with process.stdin, process.stdout:
            process.stdin.close()
            said = process.stdout.read()
        code = process.wait()
        errors.seek(0)
        return subprocess.CompletedProcess([str(script), *arguments], code, said, errors.read())


class AsyncForked(_Started):
    """The same of ``asyncio.subprocess.Process``."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    @classmethod
    async def start(cls, script: Path, *arguments: str, env: Mapping[str, str] = os.environ) -> "AsyncForked":
        started = await asyncio.to_thread(cls, script, arguments, env)
        loop = asyncio.get_running_loop()
        started.stdout = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(started.stdout)
        await loop.connect_read_pipe(lambda: protocol, os.fdopen(started.output, "rb"))
        transport, flow = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(started.input, "wb")
        )
        started.stdin = asyncio.StreamWriter(transport, flow, None, loop)
        return started

    async def wait(self) -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            while (code := self.returncode) is None:
                await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        return code
