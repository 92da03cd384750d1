"""Real logs, where they are at hand: means against the raw lines, read here in another way.

They are other people's data and not in the repository. Set COSLICE_LOGS to a folder that holds ``traces``
(step files) and ``logs`` (veRL logs, utilisation records).
"""

import json
import os
import re
from pathlib import Path

import pytest

from coslice.profile.model import Profile
from coslice.profile.read import read_profiles

ROOT = Path(os.environ.get("COSLICE_LOGS") or Path(__file__).parents[3] / "shared")
STEPS = sorted((ROOT / "traces").glob("*.jsonl"))
VERL = sorted((ROOT / "logs").glob("verl*.log"))
RECORDS = sorted((ROOT / "logs").glob("*.csv"))
pytestmark = pytest.mark.skipif(
    not STEPS and not VERL, reason=f"no real logs in {ROOT} (COSLICE_LOGS names a folder)"
)


def read(path: Path) -> Profile:
    (profile,) = read_profiles(path)
    source = profile.source
    assert source.used + sum(source.skipped.values()) == source.read
    return profile


def check(profile: Profile, raw: dict[str, list[float]]) -> None:
    pool = profile.pools[0]
    named = {phase.name: phase for phase in pool.phases}
    for name, values in raw.items():
        if name == "step":
            assert pool.period.mean == pytest.approx(sum(values) / len(values), rel=0.005)
        else:
            assert named[name].mean == pytest.approx(sum(values) / len(values), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("path", STEPS, ids=lambda path: path.stem)
def test_step_files(path: Path) -> None:
    raw: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        for key, value in json.loads(line).items():
            if key.endswith("_s"):
                raw.setdefault(key[:-2], []).append(value)
    check(read(path), raw)


@pytest.mark.parametrize("path", VERL, ids=lambda path: path.stem)
def test_verl_logs(path: Path) -> None:
    raw: dict[str, list[float]] = {}
    for line in path.read_text().splitlines():
        for key, value in re.findall(r" - (?:timing_s/)+([a-z_]+):([\d.e+-]+)", line):
            raw.setdefault(key, []).append(float(value))
    profile = read(path)
    assert profile.pools[0].period.count == len(raw["step"])
    check(profile, raw)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_utilization_records(path: Path) -> None:
    profile = read(path)
    rows = [line.split(",") for line in path.read_text().splitlines()[1:]]
    for pool in profile.pools:
        device = pool.label.removeprefix("gpu")
        own = [float(row[2]) for row in rows if row[1] == device]
        own = own[len(own) // 5 :]
        share = sum(value > 5 for value in own) / len(own)
        # Blocks are whole cycles, gaps joined: near the share of busy samples, not equal to it.
        assert pool.duty == pytest.approx(share, abs=0.1)
