"""Two real TRL jobs share an accelerator that holds one of them, and learn what each learns alone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trl, pytest.mark.timeout(600)]
pytest.importorskip("trl", reason="needs trl: make test-trl")

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_grpo.py"
COSLICE = (sys.executable, "-m", "coslice.cli.main")
PLAIN = {key: value for key, value in os.environ.items() if not key.startswith("COSLICE_")}
STEPS = "4"


def command(seed: int) -> list[str]:
    return [sys.executable, str(EXAMPLE), "--seed", str(seed), "--steps", STEPS, "--reward-s", "0.1"]


def result(process: "subprocess.Popen[str]") -> dict[str, Any]:
    said, complained = process.communicate(timeout=500)
    assert process.returncode == 0, complained[-3000:]
    return dict(json.loads(said.splitlines()[-1]))


def started(arguments: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=PLAIN,
    )


@pytest.fixture
def up(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Addresses of orchestrator and agent; a job alone takes up to 40 MiB of it."""
    arguments = [*COSLICE, "up", "--json", "--memory", "64MiB", "--state", str(tmp_path / "state")]
    arguments += ["--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0"]
    with ExitStack() as stack:
        process = stack.enter_context(started(arguments))
        stack.callback(process.terminate)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        facts = json.loads(line)
        yield facts["orchestrator"], facts["agent"]


def test_two_grpo_jobs_learn_shared_what_they_learn_alone(up: tuple[str, str]) -> None:
    alone = [result(started(command(seed)))["digest"] for seed in (1, 2)]
    orchestrator, agent = up
    shared = [
        started(
            [
                *COSLICE,
                "run",
                "--job",
                f"job-{seed}",
                "-o",
                orchestrator,
                "--agent",
                agent,
                "--",
                *command(seed),
            ]
        )
        for seed in (1, 2)
    ]
    assert [result(process)["digest"] for process in shared] == alone
    assert alone[0] != alone[1]
    answer = subprocess.run(
        [*COSLICE, "status", "-o", orchestrator, "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=PLAIN,
    )
    groups = json.loads(answer.stdout)["groups"]
    assert sum(int(group.get("swaps", 0)) for group in groups) > 0, groups


def test_without_an_orchestrator_a_trainer_is_left_alone() -> None:
    from coslice.client.sync import Client
    from coslice.integrations.trl import share

    trainer = type("Trainer", (), {"train": lambda self: "trained"})()
    before = dict(vars(trainer))
    assert share(trainer, client=Client.from_env({})) is trainer
    assert vars(trainer) == before
