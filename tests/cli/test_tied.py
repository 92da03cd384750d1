"""Of a command that is killed (kill -9) no process stays."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli.conftest import ENVIRONMENT

BOUND = 60.0
SIM = """
from coslice.cli import bench_sim
bench_sim._say = lambda number, count: print("started", flush=True)  # a part is played, the others are on
bench_sim.bench_sim(processes=2, nodes=40, jobs=400, hours=24, out=None)
"""
SERVER = """
import contextlib, signal, sys
from coslice.cli.bench_processes import serve
with contextlib.ExitStack() as stack:
    serve(stack, "orchestrator", "--state", sys.argv[1])
    print("started", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("script", [SIM, SERVER], ids=["the simulator's workers", "a benchmark's server"])
def test_processes_of_a_benchmark_end_with_it_even_if_it_is_killed(script: str, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == b"started\n"
        parent.kill()
        parent.communicate(timeout=BOUND)  # what it had is closed: all who inherited it have ended
    except BaseException:
        os.killpg(parent.pid, signal.SIGKILL)
        raise
