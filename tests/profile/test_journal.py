"""A journal of several jobs: what each did with the accelerators, without what sharing made it wait."""

from pathlib import Path

import pytest

from coslice.admission.model import Rules
from coslice.admission.simulated import Admission
from coslice.errors import ConfigError
from coslice.profile.options import ReadOptions
from coslice.profile.read import read_profiles
from coslice.simulate.run import simulate
from coslice.simulate.spec import Drift, Faults, Job, Pool, Scenario, Stretch, alternating, whole_swap


def run(tmp_path: Path, *jobs: Job, until: float = 2000.0) -> Path:
    """A journal as a live run writes it: from the core, on a virtual clock."""
    path = tmp_path / "journal.jsonl"
    simulate(Scenario(pools=(Pool(name="pool"),), jobs=jobs, cost=whole_swap(3.0), until=until), journal=path)
    return path


def test_waits_and_swaps_are_not_the_jobs(tmp_path: Path) -> None:
    path = run(tmp_path, alternating("a", 20.0, 30.0), alternating("b", 40.0, 10.0))
    found = {profile.name: profile for profile in read_profiles(path)}
    assert set(found) == {"a", "b"}
    for name, on, off in (("a", 20.0, 30.0), ("b", 40.0, 10.0)):
        (pool,) = found[name].pools
        assert pool.busy.mean == pytest.approx(on)
        assert pool.period.mean == pytest.approx(on + off)
        assert (pool.name, pool.role) == ("pool", "trainer")
        assert pool.state_bytes == 1 << 30


def test_several_phases_a_cycle(tmp_path: Path) -> None:
    loop = (
        (
            Stretch(8.0, "pool", "generate"),
            Stretch(5.0, "", "reward"),
            Stretch(12.0, "pool", "train"),
            Stretch(2.0, "", "log"),
        ),
    )
    (profile,) = read_profiles(run(tmp_path, Job(name="both", loop=loop)))
    (pool,) = profile.pools
    assert pool.role == "both"
    assert pool.period.mean == pytest.approx(27.0)  # the first cycle, of which no off-time is known, is out
    assert pool.duty == pytest.approx(20.0 / 27.0)


def test_steps_at_the_start_may_be_left_out(tmp_path: Path) -> None:
    path = run(tmp_path, alternating("a", 20.0, 30.0), until=500.0)
    (all_of_it,) = read_profiles(path)
    (later,) = read_profiles(path, ReadOptions(skip_first=5))
    assert later.pools[0].busy.count == all_of_it.pools[0].busy.count - 5


def test_a_buffered_job_is_as_it_would_be_alone(tmp_path: Path) -> None:
    """Batches go on being made while it waits for others: what it waits for them is less than alone."""
    make = ((Stretch(100.0, "", "make"),),)
    buffered = Job(name="buffered", loop=((Stretch(40.0, "pool", "train"),),), produce=make, staleness=4.0)
    path = run(tmp_path, buffered, alternating("long", 90.0, 130.0), until=20_000.0)
    seen = {profile.name: profile.pools[0] for profile in read_profiles(path)}["buffered"]
    assert seen.period.mean < 85.0  # as if it were closed
    told = {p.name: p for p in read_profiles(path, ReadOptions(staleness=4.0))}["buffered"].pools[0]
    assert told.period.mean == pytest.approx(100.0, rel=0.02)
    assert (told.busy.mean, told.coupling) == (pytest.approx(40.0), "buffered")


def test_of_batches_that_always_lay_ready_it_says_that_nobody_knows(tmp_path: Path) -> None:
    make = ((Stretch(1.0, "", "make"),),)
    fast = Job(name="fast", loop=((Stretch(40.0, "pool", "train"),),), produce=make, staleness=4.0)
    (profile,) = read_profiles(run(tmp_path, fast), ReadOptions(staleness=4.0))
    assert any("nobody knows how long" in note for note in profile.source.notes)


def test_turns_that_were_cut_off_are_no_cycles(tmp_path: Path) -> None:
    scenario = Scenario(
        pools=(Pool(name="pool"),),
        jobs=(alternating("a", 20.0, 30.0),),
        faults=Faults(crashes=20.0, restart_s=300.0),
        until=20_000.0,
        seed=1,
    )
    simulate(scenario, journal=(path := tmp_path / "journal.jsonl"))
    (profile,) = read_profiles(path)
    assert max(profile.pools[0].busy.samples) == min(profile.pools[0].busy.samples) == pytest.approx(20.0)
    assert profile.pools[0].period.mean == pytest.approx(50.0)
    assert any("did not end with a yield" in note for note in profile.source.notes)


def test_predecessors_are_read_too_and_damaged_lines_counted(tmp_path: Path) -> None:
    path = run(tmp_path, alternating("a", 20.0, 30.0))
    (whole,) = read_profiles(path)
    header, *lines = path.read_text().splitlines(keepends=True)
    half = len(lines) // 2
    damaged = ["\x00\n", '{"event": {"type": "LeaseYielded"}}\n', '{"t": "x", "group": "g", "event": 3}\n']
    (tmp_path / "journal.jsonl.1").write_text(header + "".join(lines[:half]))
    path.write_text(header + "".join(damaged + lines[half:]))
    (both,) = read_profiles(path)
    assert both.source.skipped["damaged lines"] == 3
    assert both.source.used + sum(both.source.skipped.values()) == both.source.read
    assert both.pools[0].busy.count >= whole.pools[0].busy.count - 2  # a restart may cut a cycle off


def test_a_journal_without_a_cycle(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to profile"):
        read_profiles(run(tmp_path, alternating("a", 20.0, 30.0), until=40.0))


def test_time_that_admission_keeps_a_job_waiting_is_not_the_jobs(tmp_path: Path) -> None:
    """Requests at the door are in no journal: taken for off-time, half an hour there was the job's own."""
    path = tmp_path / "journal.jsonl"
    drift = (Drift(3000.0, 1.5), Drift(5000.0, 1 / 1.5))
    jobs = (alternating("math", 40.0, 60.0, drift=drift), alternating("code", 40.0, 60.0))
    scenario = Scenario(pools=(Pool(name="pool"),), jobs=jobs, cost=whole_swap(8.0), until=12_000.0)
    seen = Admission(Rules(mode="enforce"))
    simulate(scenario, journal=path, gate=seen)
    codes = [one.code for one in seen.report().decisions]
    assert (codes.count("queued"), codes.count("lifted")) == (1, 1)
    found = {profile.name: profile for profile in read_profiles(path)}
    assert found["code"].pools[0].period.mean == pytest.approx(100.0)
    assert found["code"].source.skipped == {"admission lines": len(codes)}


def test_a_job_without_a_whole_cycle_is_told(tmp_path: Path) -> None:
    path = run(tmp_path, alternating("a", 20.0, 30.0), alternating("once", 20.0, 30.0, steps=1))
    (profile,) = read_profiles(path)
    assert "no whole cycle, and so no profile: once" in profile.source.notes
