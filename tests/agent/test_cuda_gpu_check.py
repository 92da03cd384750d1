"""benchmarks/gpu_check.py runs to its end on the fakes, and finds every byte where it was."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from agent.cuda_world import libraries

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.mark.cuda
def test_the_check_runs_to_its_end(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    libraries(tmp_path_factory)  # skips where the fakes cannot be built
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--fakes", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    rows = [*found["whole_process"], *found["in_process"]]
    assert len(rows) == 6
    assert all(row["bit_equal"] for row in [*rows, found["two_jobs"]])
    assert all(row["warm_left_on_device"] == 0 for row in found["whole_process"])
    assert found["left_out"] == []
