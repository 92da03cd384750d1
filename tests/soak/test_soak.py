"""The soak itself, short: it runs, judges, and leaves nothing behind. And its judge sees what it should."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from soak.trouble import Fault
from soak.verdict import judge

TESTS = Path(__file__).parents[1]
RUN = [sys.executable, "-m", "soak", "--groups", "2", "--jobs", "4"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}


def write(folder: Path, job: str, *said: dict[str, object]) -> None:
    (folder / "records").mkdir(exist_ok=True)
    lines = [json.dumps({"at": at, "pid": 1, **facts}) for at, facts in enumerate(said)]
    (folder / "records" / f"{job}.jsonl").write_text("\n".join(lines) + "\n")


def test_the_judge_sees_an_epoch_granted_twice(tmp_path: Path) -> None:
    for job in ("a", "b"):
        write(tmp_path, job, {"what": "ask"}, {"what": "granted", "epoch": 7})
    assert len(judge(tmp_path, {"a": "g", "b": "g"}, []).double_grants) == 1
    assert not judge(tmp_path, {"a": "g", "b": "h"}, []).double_grants


def test_the_judge_sees_work_under_a_lease_that_is_over(tmp_path: Path) -> None:
    write(tmp_path, "a", {"what": "ask"}, {"what": "granted", "epoch": 7}, {}, {"what": "begin", "epoch": 7})
    (tmp_path / "records" / "a.jsonl").write_text(
        "\n".join(
            json.dumps({"at": at, "pid": 1, "what": "begin", "epoch": epoch})
            for at, epoch in ((1, 6), (3, 8), (5, 7))
        )
    )
    assert len(judge(tmp_path, {"a": "g"}, []).double_grants) == 1


def test_the_judge_sees_two_inside_and_wrong_state(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a",
        {"what": "overlap", "epoch": 7, "other": "b"},
        {"what": "wrong_state", "epoch": 7},
        {"what": "faulted", "why": "gave up"},
    )
    verdict = judge(tmp_path, {"a": "g"}, [])
    assert (len(verdict.double_grants), len(verdict.lost_states)) == (1, 2)


def test_the_judge_excuses_who_was_stopped_and_bounds_waits(tmp_path: Path) -> None:
    stopped = Fault(kind="job_stopped", target="a", group="g", begun=0.5, ended=1.5)
    write(
        tmp_path,
        "a",
        {"what": "ask"},
        {"what": "faulted", "why": "no answer"},
        {"what": "ask"},
        {"what": "granted", "epoch": 1},
    )
    verdict = judge(tmp_path, {"a": "g"}, [stopped])
    assert (verdict.given_up, verdict.lost_states) == (1, [])
    assert verdict.waits[0].bound > verdict.waits[0].seconds == 1.0
    assert verdict.too_long == []


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_short_soak_keeps_what_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [*RUN, "--minutes", "0.5", "--seed", "1", "--json", str(out)]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    found = json.loads(out.read_text())
    assert (found["lost_states"], found["double_grants"], found["waits_beyond_their_bound"]) == (0, 0, 0)
    assert found["handoffs"] > 0
    assert found["faults"]


@pytest.mark.faults
def test_an_interrupted_soak_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    soak = subprocess.Popen(
        [*RUN, "--minutes", "5"], env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert soak.stderr is not None
    with soak.stderr:
        assert soak.stderr.readline().startswith("seed")
        soak.send_signal(signal.SIGINT)
        assert "nothing is left behind" in soak.stderr.read()
    assert soak.wait(60) == 130
    assert list(tmp_path.iterdir()) == []
    ours = [  # the folder is in the command line of every server
        pid for pid in os.listdir("/proc") if pid.isdigit() and _names(int(pid), str(tmp_path))
    ]
    assert ours == []


def _names(pid: int, text: str) -> bool:
    try:
        return pid != os.getpid() and text.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
