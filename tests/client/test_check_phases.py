"""``coslice check-phases`` on jobs that are right, and on jobs that are wrong in every way it knows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RIGHT = """
import time, coslice
orchestrator = coslice.connect()
@orchestrator.on_accelerators(group="trainer")
def train(): time.sleep(0.02)
with orchestrator.on_accelerators(group="trainer,sampler", phase="sync"): time.sleep(0.02)
train(); train()
"""

WRONG_ORDER = """
import coslice
orchestrator = coslice.connect()
with orchestrator.on_accelerators(group="sampler", phase="generate"):
    with orchestrator.on_accelerators(group="trainer", phase="train"):
        pass
"""

LEAK = """
import coslice
orchestrator = coslice.connect()
orchestrator.acquire("trainer", phase="train")
"""

KILLED = """
import os, signal, coslice
coslice.connect().acquire("trainer", phase="train")
os.kill(os.getpid(), signal.SIGKILL)
"""

OUTSIDE = """
import torch, coslice
orchestrator = coslice.connect()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
coslice.workload.register(model, optimizer)
with orchestrator.on_accelerators(group="trainer", phase="train"):
    model(torch.ones(4)).sum().backward()
optimizer.step()
model(torch.ones(4))
"""

CALLBACK = """
from coslice.client.phases import PhaseCallback
callback = PhaseCallback.from_env()
callback.on_phase_begin("weight_sync")
callback.on_phase_end("weight_sync")
"""


IN_A_TASK = """
import asyncio, concurrent.futures, coslice
orchestrator = coslice.connect()
@orchestrator.on_accelerators(group="sampler")
async def generate(): pass
@orchestrator.on_accelerators(group="trainer")
def train(): pass
async def main():
    await asyncio.create_task(generate())
    await asyncio.get_running_loop().run_in_executor(None, train)
asyncio.run(main())
"""


def checked(tmp_path: Path, program: str, *options: str) -> tuple[int, dict[str, Any], Path, str]:
    script, report = tmp_path / "job.py", tmp_path / "report.json"
    script.write_text(program.lstrip())
    command = [sys.executable, "-m", "coslice.cli.main", "check-phases", "--json", str(report), *options]
    ended = subprocess.run(
        [*command, "--", sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert report.exists(), ended.stderr
    return ended.returncode, json.loads(report.read_text()), script, ended.stdout


def line_of(program: str, text: str) -> int:
    return next(n for n, line in enumerate(program.lstrip().splitlines(), 1) if text in line)


def test_a_job_without_a_problem(tmp_path: Path) -> None:
    status, report, script, _ = checked(tmp_path, RIGHT, "--swap-s", "0.001")
    assert (status, report["findings"]) == (0, [])
    phases = {phase["name"]: phase for phase in report["phases"]}
    assert phases["sync"]["groups"] == ["trainer", "sampler"]
    assert len(phases["train"]["seconds"]) == 2
    assert phases["train"]["where"].startswith(str(script))


@pytest.mark.parametrize(
    ("program", "rule", "phase", "text"),
    [
        (WRONG_ORDER, "lock-order", "train", 'phase="train"'),
        (LEAK, "leak", "train", "acquire"),
        (KILLED, "leak", "train", "acquire"),
        (OUTSIDE, "outside", "", "optimizer.step()"),
    ],
    ids=["order", "leak", "killed", "outside"],
)
def test_a_wrong_job_is_told_rule_phase_and_line(
    tmp_path: Path, program: str, rule: str, phase: str, text: str
) -> None:
    status, report, script, shown = checked(tmp_path, program, "--swap-s", "0")
    assert status != 0
    found = [f for f in report["findings"] if f["rule"] == rule]
    assert found, report
    assert found[0]["phase"] == phase
    assert found[0]["where"] == f"{script}:{line_of(program, text)}"
    assert rule in shown


def test_a_phase_that_a_loop_or_a_pool_runs_is_where_it_is_defined(tmp_path: Path) -> None:
    _, report, script, _ = checked(tmp_path, IN_A_TASK, "--swap-s", "0")
    where = {phase["name"]: phase["where"] for phase in report["phases"]}
    assert where == {
        "generate": f"{script}:{line_of(IN_A_TASK, 'sampler')}",
        "train": f"{script}:{line_of(IN_A_TASK, 'trainer')}",
    }


def test_every_line_of_work_outside_is_told_once(tmp_path: Path) -> None:
    _, report, script, _ = checked(tmp_path, OUTSIDE, "--swap-s", "0")
    lines = [f["where"] for f in report["findings"] if f["rule"] == "outside"]
    assert lines == [f"{script}:{line_of(OUTSIDE, 'optimizer.step()')}", f"{script}:9"]


def test_short_phases_are_reported_with_their_median(tmp_path: Path) -> None:
    status, report, _, _ = checked(tmp_path, RIGHT, "--swap-s", "30")
    assert status == 1
    assert {(f["rule"], f["phase"]) for f in report["findings"]} == {("short", "sync"), ("short", "train")}


def test_phase_callbacks_are_enabled_in_a_check(tmp_path: Path) -> None:
    _, report, script, _ = checked(tmp_path, CALLBACK, "--swap-s", "0")
    assert [(p["name"], p["groups"]) for p in report["phases"]] == [("weight_sync", ["trainer", "sampler"])]
    assert report["phases"][0]["where"] == f"{script}:{line_of(CALLBACK, 'begin')}"


def test_the_jobs_own_failure_is_its_status(tmp_path: Path) -> None:
    status, report, _, _ = checked(tmp_path, "raise SystemExit(7)")
    assert (status, report["status"]) == (7, 7)
