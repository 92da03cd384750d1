"""The real command line: real processes, real sockets on free ports, state in a temporary folder."""

import contextlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from coslice.cli.main import main

COSLICE = (sys.executable, "-m", "coslice.cli.main")
TWO_CORES = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two groups on a machine without a GPU have a core each"
)
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("COSLICE_")}


@dataclass
class Up:
    """A running ``coslice up``."""

    process: "subprocess.Popen[str]"
    orchestrator: str
    agent: str
    journal: Path

    def stop(self, signum: int = signal.SIGINT) -> int:
        self.process.send_signal(signum)
        return self.process.wait(30)


Start = Callable[..., Up]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, state: Path | None = None) -> Up:
        command = [*COSLICE, "up", "--json", "--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0"]
        command += ["--device", "host", "--state", str(state or tmp_path / "state"), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"`coslice up` ended with {process.wait()}"
        ready = json.loads(line)
        return Up(process, ready["orchestrator"], ready["agent"], Path(ready["journal"]))

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def coslice(*arguments: str, timeout: float = 60.0, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end; never raises for its status."""
    return subprocess.run(
        [*COSLICE, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ENVIRONMENT | environment,
        check=False,
    )


def in_process(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> "subprocess.CompletedProcess[str]":
    """The same in this process, for commands that end before they start anything: an interpreter less."""
    out, err = io.StringIO(), io.StringIO()
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    with monkeypatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["coslice", *arguments])
        patch.setattr(os, "environ", dict(ENVIRONMENT))
        try:
            main()
            status: object = 0
        except SystemExit as ended:
            status = ended.code
        finally:
            root.setLevel(level)
            root.handlers[:] = handlers  # not the one of ``main``, whose stream is gone
    return subprocess.CompletedProcess(arguments, int(str(status or 0)), out.getvalue(), err.getvalue())


def run_arguments(up: Up, job: str, *command: str, group: str = "default") -> list[str]:
    return ["run", "-o", up.orchestrator, "--agent", up.agent, "--job", job, "--group", group, "--", *command]
