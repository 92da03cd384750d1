"""The demo as a user runs it: real jobs, a real ``coslice up``, real files; only shorter."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    # One at a time: two of them would take each other's accelerator core.
    pytest.mark.xdist_group("demo"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the demo needs two cores"),
]


def _demo(folder: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "coslice.cli.main", "demo", "--quick", "--steps", "4", *flags]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COSLICE_")}
    environment["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir()
    return subprocess.Popen(
        [*command, "--out", str(folder / "out"), "--json", str(folder / "figures.json")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _our_processes(folder: Path) -> list[int]:
    """Processes whose temporary files go to our folder."""
    mark, found = f"TMPDIR={folder / 'tmp'}".encode(), []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    # Unix sockets need short paths.
    with tempfile.TemporaryDirectory(prefix="cd-") as name:
        yield Path(name)
        assert _our_processes(Path(name)) == [], "no process is left"
        assert list((Path(name) / "tmp").iterdir()) == [], "no temporary file is left"


def test_two_jobs_share_a_memory_that_holds_one_and_no_bit_changes(folder: Path) -> None:
    process = _demo(folder)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["state_identical"] is True
    assert figures["swaps"] > 0
    assert figures["bytes_moved"] > figures["swaps"] * 2**20
    assert 0 < figures["peak_device_bytes"] <= figures["device_budget_bytes"]
    assert figures["device_budget_bytes"] < 2 * figures["calibration"]["need_bytes"]
    assert set(figures["solo_duty"]) == set(figures["slowdown"]) == {"job-a", "job-b"}
    lines = [json.loads(line) for line in (folder / "out" / "journal.jsonl").read_text().splitlines()]
    assert {line["solo"]["job"] for line in lines if "solo" in line} == {"job-a", "job-b"}
    assert lines[-1]["summary"]["useful_duty"] == figures["useful_duty"]
    assert "<html" in (folder / "out" / "replay.html").read_text()


@pytest.mark.demo
def test_a_memory_that_holds_both_moves_nothing_and_says_why(folder: Path) -> None:
    process = _demo(folder, "--memory", "256MiB")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["swaps"] == 0
    assert figures["bytes_moved"] == 0
    assert figures["state_identical"] is True
    assert any("fit" in reason for reason in figures["unmoved_because"]), figures["unmoved_because"]
    assert "nothing was moved, because" in output


@pytest.mark.parametrize(
    ("signum", "stage"),
    [
        (signal.SIGINT, "calibrating"),
        pytest.param(signal.SIGINT, "job-a alone", marks=pytest.mark.demo),
        pytest.param(signal.SIGTERM, "together", marks=pytest.mark.demo),
        pytest.param(signal.SIGHUP, "calibrating", marks=pytest.mark.demo),
    ],
)
def test_interrupted_in_the_middle_it_leaves_nothing(
    folder: Path, signum: signal.Signals, stage: str
) -> None:
    process = _demo(folder)
    assert process.stdout is not None
    for line in process.stdout:
        if stage in line:
            break
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("size", "says"),
    [
        ("12 parsecs", "not a size"),
        pytest.param("20MiB", "not enough for one job", marks=pytest.mark.demo),
    ],
)
def test_a_memory_that_cannot_be_is_refused_with_the_figures(folder: Path, size: str, says: str) -> None:
    process = _demo(folder, "--memory", size)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert says in output
    assert "Traceback" not in output
