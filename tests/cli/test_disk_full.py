"""A disk that takes no more: the process says so and ends, rather than live on and serve nobody."""

import contextlib
import json
import resource
import subprocess
import sys
from pathlib import Path

import coslice
from coslice.errors import CosliceError

UP = (sys.executable, "-m", "coslice.cli.main", "up", "--json", "--memory", "64MiB", "--cpus", "0")
PATIENCE = 60.0


def start(state: Path) -> tuple["subprocess.Popen[str]", str]:
    words = ("--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0", "--state", str(state))
    up = subprocess.Popen([*UP, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert up.stdout is not None
    return up, str(json.loads(up.stdout.readline())["orchestrator"])


def turn(address: str, *, within: float = PATIENCE) -> None:
    with coslice.Client(address, job="a", groups=["default"]) as client:
        client.acquire("default", timeout=within)
        client.yield_("default")


def test_it_ends_with_one_error_and_the_next_start_goes_on(tmp_path: Path) -> None:
    up, address = start(tmp_path)
    try:
        turn(address)
        resource.prlimit(up.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # EFBIG from now on
        with contextlib.suppress(CosliceError):
            turn(address, within=1.0)  # whoever answers nothing any more has had its chance
        _, errors = up.communicate(timeout=PATIENCE)
        assert up.returncode == 1, errors
        assert errors.strip().splitlines()[-1].startswith("coslice: ")
        assert "broke" in errors
    finally:
        up.kill()
        up.wait()
    up, address = start(tmp_path)
    try:
        turn(address)
    finally:
        up.terminate()
        up.communicate(timeout=PATIENCE)
    assert up.returncode == 0
