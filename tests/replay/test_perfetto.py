"""The trace for Perfetto says what the page says, and a simulation can be drawn like a live run."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from replay import sample

from coslice.errors import ConfigError
from coslice.replay.model import build
from coslice.replay.perfetto import render_perfetto
from coslice.runtime.journal import read_journal
from coslice.simulate.run import simulate
from coslice.simulate.spec import Pool, Scenario, alternating, whole_swap


def trace(journal: Path) -> list[dict[str, Any]]:
    out = journal.with_suffix(".trace.json")
    render_perfetto(journal, out)
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    return events


def test_every_interval_is_a_slice_on_the_thread_of_its_job(tmp_path: Path) -> None:
    events = trace(sample.write(tmp_path / "journal.jsonl"))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X" and e["cat"] != "off"]
    found = sorted((names[e["pid"], e["tid"]], e["cat"], e["ts"] / 1e6, e["dur"] / 1e6) for e in slices)
    assert found == [
        ("job-a", "held", 0.0, 2.0),
        ("job-a", "held", 6.0, 2.0),
        ("job-a", "waiting", 4.0, 2.0),
        ("job-b", "held", 3.0, 2.0),
        ("job-b", "waiting", 1.0, 2.0),
        ("swaps", "swapping", 2.0, 1.0),
        ("swaps", "swapping", 5.0, 1.0),
    ]
    held = next(e for e in slices if e["cat"] == "held")
    assert held["name"] == "train"
    swap = next(e for e in slices if e["cat"] == "swapping")
    assert swap["args"]["bytes"] == 3 * sample.MIB
    counters = [(e["ts"] / 1e6, e["args"]["jobs"]) for e in events if e["ph"] == "C"]
    assert counters == [(1.0, 1), (2.0, 0), (4.0, 1), (5.0, 0)]
    decisions = [e for e in events if e["ph"] == "i"]
    assert decisions[0]["args"]["text"] == "at 100.0"


def test_slices_of_one_thread_never_overlap(tmp_path: Path) -> None:
    """Perfetto drops what is not properly nested."""
    events = trace(sample.write(tmp_path / "journal.jsonl", torn=True))
    slices = [e for e in events if e["ph"] == "X"]
    for thread in {(e["pid"], e["tid"]) for e in slices}:
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == thread)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(mine))


def test_a_rotated_journal_is_told_whole(tmp_path: Path) -> None:
    whole = sample.write(tmp_path / "whole.jsonl")
    header, *lines = whole.read_text().splitlines(keepends=True)
    half = len(lines) // 2
    (tmp_path / "journal.jsonl.1").write_text(header + "".join(lines[:half]))
    (tmp_path / "journal.jsonl").write_text(header + "".join(lines[half:]))
    assert trace(tmp_path / "journal.jsonl") == trace(whole)


def test_a_simulation_writes_the_journal_of_a_live_run(tmp_path: Path) -> None:
    jobs = (alternating("a", 20.0, 30.0), alternating("b", 25.0, 40.0))
    scenario = Scenario(pools=(Pool(name="pool"),), jobs=jobs, cost=whole_swap(2), until=1000.0)
    report = simulate(scenario, journal=tmp_path / "journal.jsonl")
    content = read_journal(tmp_path / "journal.jsonl")
    (group,) = build(content.header, content.records, torn=content.torn).groups
    held = sum(i.end - i.begin for i in group.intervals if i.kind == "held")
    assert held / 1000.0 == pytest.approx(report.useful_duty, abs=0.01)
    swaps = [i for i in group.intervals if i.kind == "swapping" and i.bytes]
    assert len(swaps) == report.swaps
    assert {round(i.end - i.begin, 6) for i in swaps} <= {1.0, 2.0}
    slices = [e for e in trace(tmp_path / "journal.jsonl") if e["ph"] == "X" and e["cat"] == "held"]
    assert sum(e["dur"] for e in slices) / 1e6 == pytest.approx(held)


def test_a_file_that_is_no_journal_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    foreign = tmp_path / "notes.txt"
    foreign.write_text("hello\n")
    with pytest.raises(ConfigError, match="journal"):
        render_perfetto(foreign, tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
