"""benchmarks/gpu_check.py runs to its end on the fakes, and finds every byte where it was."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from agent.cuda_world import libraries

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.mark.cuda
@pytest.mark.timeout(300)  # it starts 12 programs, most of which import torch
def test_the_check_runs_to_its_end(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    libraries(tmp_path_factory)  # skips where the fakes cannot be built
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--fakes", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    rows = [*found["whole_process"], *found["in_process"]]
    assert len(rows) == 6
    assert all(row["bit_equal"] for row in [*rows, found["two_jobs"]])
    assert all(row["warm_left_on_device"] == 0 for row in found["whole_process"])
    assert found["left_out"] == []


@pytest.mark.cuda
@pytest.mark.parametrize(("device", "host", "rate"), [(139, 120, 5.0), (80, 2000, 20.0), (24, 32, 0.5)])
def test_the_two_jobs_fit_into_host_memory_and_time(device: int, host: int, rate: float) -> None:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    rates = {"warm_out_gb_s": rate, "warm_in_gb_s": rate}
    size = check.turns_size(device * check.GIB, host * check.GIB, rates)
    assert check.GIB < size <= 0.6 * device * check.GIB
    assert 2 * 1.1 * size < host * check.GIB
    assert 2 * check.TURNS * 2 * size / (rate * 1e9) < check.FOR_TURNS
