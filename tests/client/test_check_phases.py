"""``coslice check-phases`` on jobs that are right, and on jobs that are wrong in every way it knows."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coslice.cli.check_phases import check_phases
from coslice.errors import ConfigError
from coslice.testing import phase_rules

GROUPS = ("trainer", "sampler")

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

NEVER_ACQUIRED = """
import coslice
coslice.connect().yield_("trainer")
"""

ROLES_IN_THE_WRONG_ORDER = """
from coslice.client.phases import PhaseCallback
callback = PhaseCallback.from_env()
callback.on_phase_begin("generate")
callback.on_phase_begin("train")
"""

TORN = """
import glob, os, signal, coslice
orchestrator = coslice.connect()
orchestrator.acquire("trainer", phase="train")
if (child := os.fork()) == 0:
    with orchestrator.on_accelerators(group="sampler", phase="generate"): pass
    own, = glob.glob(f"{os.environ['COSLICE_RECORD_PHASES']}/{os.getpid()}-*")
    os.truncate(own, os.path.getsize(own) - 40)
    os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
orchestrator.yield_("trainer")
print(child)
"""

FAILS = """
import coslice
with coslice.connect().on_accelerators(group="trainer", phase="a[/b]"):
    raise ValueError("of its own")
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


@dataclass
class Checked:
    status: int
    report: dict[str, Any]
    script: Path
    out: str
    err: str


Check = Callable[..., Checked]


@pytest.fixture
def check(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Check:
    def check(program: str, *, swap_s: float = 0.0) -> Checked:
        script, report = tmp_path / "job.py", tmp_path / "report.json"
        script.write_text(program.lstrip())
        command = [sys.executable, str(script)]
        status = check_phases(command, environment=os.environ, groups=GROUPS, swap_s=swap_s, out=report)
        return Checked(status, json.loads(report.read_text()), script, *capfd.readouterr())

    return check


def line_of(program: str, text: str) -> int:
    return next(n for n, line in enumerate(program.lstrip().splitlines(), 1) if text in line)


def test_a_job_without_a_problem(check: Check) -> None:
    found = check(RIGHT, swap_s=0.001)
    assert (found.status, found.report["findings"]) == (0, [])
    phases = {phase["name"]: phase for phase in found.report["phases"]}
    assert phases["sync"]["groups"] == ["trainer", "sampler"]
    assert len(phases["train"]["seconds"]) == 2
    assert phases["train"]["where"].startswith(str(found.script))
    assert "no problem found" in found.out


@pytest.mark.parametrize(
    ("program", "rule", "phase", "text"),
    [
        (WRONG_ORDER, "lock-order", "train", 'phase="train"'),
        (LEAK, "leak", "train", "acquire"),
        (KILLED, "leak", "train", "acquire"),
        (NEVER_ACQUIRED, "not-held", "", "yield_"),
        (ROLES_IN_THE_WRONG_ORDER, "lock-order", "train", '"train"'),
    ],
    ids=["order", "leak", "killed", "not held", "roles"],
)
def test_a_wrong_job_is_told_rule_phase_and_line(
    check: Check, program: str, rule: str, phase: str, text: str
) -> None:
    found = check(program)
    assert found.status != 0
    told = [f for f in found.report["findings"] if f["rule"] == rule]
    assert told, found.report
    assert told[0]["phase"] == phase
    assert told[0]["where"] == f"{found.script}:{line_of(program, text)}"
    assert rule in found.out


def test_every_line_of_work_outside_is_told_once(check: Check) -> None:
    found = check(OUTSIDE)
    assert found.status == 1
    told = [(f["where"], f["phase"]) for f in found.report["findings"] if f["rule"] == "outside"]
    step = line_of(OUTSIDE, "optimizer.step()")
    assert told == [(f"{found.script}:{line}", "") for line in (step, step + 1)]


def test_a_phase_that_a_loop_or_a_pool_runs_is_where_it_is_defined(check: Check) -> None:
    found = check(IN_A_TASK)
    where = {phase["name"]: phase["where"] for phase in found.report["phases"]}
    assert where == {
        "generate": f"{found.script}:{line_of(IN_A_TASK, 'sampler')}",
        "train": f"{found.script}:{line_of(IN_A_TASK, 'trainer')}",
    }


def test_short_phases_are_reported_with_their_median(check: Check) -> None:
    found = check(RIGHT, swap_s=30)
    assert found.status == 1
    told = {(f["rule"], f["phase"]) for f in found.report["findings"]}
    assert told == {("short", "sync"), ("short", "train")}


def test_phase_callbacks_are_enabled_in_a_check(check: Check) -> None:
    found = check(CALLBACK)
    phases = found.report["phases"]
    assert [(p["name"], p["groups"]) for p in phases] == [("weight_sync", ["trainer", "sampler"])]
    assert phases[0]["where"] == f"{found.script}:{line_of(CALLBACK, 'begin')}"


def test_the_jobs_own_failure_is_its_status(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "coslice.cli.main", "check-phases", "--json", str(report)]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("COSLICE_", "GRPC_"))
    }
    script = [sys.executable, "-c", "import os; print(sorted(n for n in os.environ if 'GRPC' in n)); exit(7)"]
    ended = subprocess.run(
        [*command, "--", *script], capture_output=True, text=True, check=False, env=environment
    )
    assert (ended.returncode, json.loads(report.read_text())["status"]) == (7, 7)
    assert ended.stdout.splitlines()[0] == "[]", "what we set for ourselves is not the command's"
    assert ended.stderr == "coslice: the command ended with status 7 before it entered a phase\n"


def test_a_phase_that_an_exception_ended_is_not_too_short(check: Check) -> None:
    found = check(FAILS, swap_s=30)
    assert (found.status, found.report["findings"]) == (1, [])
    assert f"phase a[/b] at {found.script}:2 was ended by ValueError" in found.out


def test_a_torn_line_is_told_and_the_rest_is_analysed(check: Check) -> None:
    found = check(TORN)
    child = found.out.splitlines()[0]
    assert found.report["torn"] == {child: 1}
    assert f"record of process {child} has 1 line(s) that are not whole" in found.err
    assert "no problem found" not in found.out
    ended = {phase["name"]: len(phase["seconds"]) for phase in found.report["phases"]}
    assert (found.status, ended) == (1, {"train": 1, "generate": 0})


def test_a_process_with_the_number_of_one_that_was_killed_holds_nothing_of_it() -> None:
    about = {"pid": 7, "record": 1, "phase": "train", "where": "job.py:1"}
    lines = [
        {"what": "starts", "at": 1.0, "pid": 7},
        {"what": "enters", "at": 2.0, "groups": ["b"], **about},
        {"what": "starts", "at": 3.0, "pid": 7},
        {"what": "asks", "at": 4.0, "groups": ["a"], **about},
        {"what": "exits", "at": 5.0, "pid": 7},
    ]
    (finding,) = phase_rules.check(lines, order=["a", "b"])
    assert finding.rule == "leak"
    assert finding.text.startswith("b was still held when its process was killed")


def test_a_command_without_a_phase_was_not_checked(check: Check) -> None:
    found = check("pass")
    assert found.status == 1
    assert "nothing to check" in found.err


def test_a_report_that_cannot_be_written_stops_the_check_before_the_job_runs(tmp_path: Path) -> None:
    command, report = ["touch", str(tmp_path / "ran")], tmp_path / "nowhere" / "report.json"
    with pytest.raises(ConfigError, match="cannot write"):
        check_phases(command, environment={}, groups=GROUPS, swap_s=0, out=report)
    assert not (tmp_path / "ran").exists()
