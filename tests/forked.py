"""Scripts as processes of their own that begin as forks of one that has loaded torch and coslice already.

An interpreter that loads them takes seconds of a core, and the tests start hundreds. Only modules are loaded:
no thread runs and no connection is open where the fork happens (``multiprocessing``'s fork server).
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any

LOADED = [
    "torch",
    "coslice.workload",
    "coslice.agent.app",
    "coslice.orchestrator.app",
    "coslice.testing.engines",
]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(LOADED)


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
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


class Forked:
    """As much of ``subprocess.Popen`` as tests use, with pipes for input and output."""

    def __init__(
        self, script: Path, *arguments: str, env: Mapping[str, str] = os.environ, stderr: IO[Any] = sys.stderr
    ) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        pipes = [_Descriptor(number) for number in (theirs_in, theirs_out, stderr.fileno())]
        self._process = _CONTEXT.Process(
            target=_run, args=(str(script), list(arguments), dict(env), pipes), daemon=True
        )
        self._process.start()
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin: IO[str] = os.fdopen(ours_in, "w")
        self.stdout: IO[str] = os.fdopen(ours_out)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        if not connection.wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode
