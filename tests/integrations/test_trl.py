"""Two real TRL jobs share an accelerator that holds one of them, and learn what each learns alone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coslice.testing.recording import RecordingOrchestrator

pytestmark = [pytest.mark.trl, pytest.mark.timeout(300)]
pytest.importorskip("trl", reason="needs trl: make test-trl")

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_grpo.py"
COSLICE = (sys.executable, "-m", "coslice.cli.main")
PLAIN = {key: value for key, value in os.environ.items() if not key.startswith("COSLICE_")}
STEPS = "4"


def command(seed: int) -> list[str]:
    return [sys.executable, str(EXAMPLE), "--seed", str(seed), "--steps", STEPS, "--reward-s", "0.1"]


def result(process: "subprocess.Popen[str]") -> dict[str, Any]:
    said, complained = process.communicate(timeout=120)
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


class Loop:
    """The order in which a GRPOTrainer calls what ``share`` wraps; notes what is held where it matters."""

    def __init__(self, recording: RecordingOrchestrator, scored: set[int], steps: int = 3) -> None:
        self.recording, self.scored, self.steps = recording, scored, steps
        self.callback: Any = None
        self.trace: list[str] = []

    def add_callback(self, callback: Any) -> None:
        self.callback = callback

    def train(self) -> None:
        for step in range(self.steps):
            self.callback.on_step_begin(None, SimpleNamespace(global_step=step), None)
            self._note(f"generate {step}")
            if step in self.scored:
                self._calculate_rewards(step)
            self._note(f"update {step}")

    def _calculate_rewards(self, step: int) -> None:
        self._note(f"score {step}")

    def save_model(self) -> None:
        self._note("save")

    def _note(self, what: str) -> None:
        self.trace.append(f"{what}: {'held' if self.recording.held else 'away'}")


def test_a_step_gives_way_once_and_a_model_is_saved_on_the_accelerators() -> None:
    from coslice.client.sync import Client
    from coslice.integrations.trl import share

    with RecordingOrchestrator(groups=("group",)) as recording:
        with Client.from_env(recording.env("job", "group")) as client:
            loop = share(Loop(recording, scored={0, 1}), client=client, register=False)
            loop.train()
            loop.save_model()
        assert recording.problems() == []
        taken = [said for said in recording.trace if said.kind == "acquire"]
    work = ["generate 0: held", "score 0: away", "update 0: held"]
    work += ["generate 1: held", "score 1: away", "update 1: held"]
    work += ["generate 2: held", "update 2: held", "save: held"]
    assert loop.trace == work
    assert len(taken) == 4, "at the beginning, after each score, to save; a step that scored needs no more"
    with RecordingOrchestrator(groups=("group",)) as recording:
        with Client.from_env(recording.env("job", "group")) as client:
            share(Loop(recording, scored={0}), client=client, register=False).train()
        taken = [said for said in recording.trace if said.kind == "acquire"]
    assert len(taken) == 3, "at the beginning, after the score, and after a step that gave nobody a chance"


def test_without_an_orchestrator_a_trainer_is_left_alone() -> None:
    from coslice.client.sync import Client
    from coslice.integrations.trl import share

    trainer = type("Trainer", (), {"train": lambda self: "trained"})()
    before = dict(vars(trainer))
    assert share(trainer, client=Client.from_env({})) is trainer
    assert vars(trainer) == before
