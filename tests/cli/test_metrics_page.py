"""``--http``: what a real process shows, and that a signal still ends it."""

import json
import signal
import subprocess
import urllib.request
from pathlib import Path

from cli.conftest import COSLICE, ENVIRONMENT, coslice


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


def test_coslice_up_shows_orchestrator_and_agent_on_one_port_and_ends_by_a_signal(tmp_path: Path) -> None:
    addresses = ("--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    logs = ("--log-level", "info", "--log-format", "json")
    command = [*COSLICE, "up", "--json", *addresses, *logs, "--device", "host", "--state", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=ENVIRONMENT, **pipes)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        text = read(f"{ready['http']}/metrics")
        assert "coslice_leader 1.0" in text
        assert "coslice_agent_attached 1.0" in text
        assert read(f"{ready['http']}/readyz") == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
        (joined,) = [line for line in lines if line.get("reason") == "node_attached"]
        assert joined["group"] == "default"
        assert joined["level"] == "info"
    finally:
        process.kill()
        process.wait()


def test_an_address_that_others_can_reach_is_refused_before_anything_starts(tmp_path: Path) -> None:
    result = coslice(
        "orchestrator", "--listen", "127.0.0.1:0", "--http", "0.0.0.0:0", "--state", str(tmp_path)
    )
    assert result.returncode == 2
    assert "metrics page" in result.stderr
    assert "--token-secret" in result.stderr
