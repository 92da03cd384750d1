"""The processes of a benchmark: stopped at its end, killed by the kernel should it be killed."""

import json
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from coslice import tied
from coslice.errors import OperationFailed

STOP_S = 10


def start(
    stack: ExitStack, module: str, *arguments: str, env: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """Run a module of ours, with pipes as its input and output, until the stack is left."""
    process = subprocess.Popen(
        tied.command(module, *arguments),
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(_stop, process)
    return process


def serve(stack: ExitStack, command: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """``coslice orchestrator`` or ``coslice agent`` on a free port: its process, and what it says first."""
    words = (command, "--listen", "127.0.0.1:0", "--json", *arguments)
    process = start(stack, "coslice.cli.main", *words)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise OperationFailed(f"`coslice {command}` did not start; it ended with status {process.wait()}")
    return process.pid, json.loads(line)


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
