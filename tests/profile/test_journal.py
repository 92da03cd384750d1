"""A journal of several jobs: what each did with the accelerators, without what sharing made it wait."""

from pathlib import Path

import pytest

from coslice.errors import ConfigError
from coslice.profile.options import ReadOptions
from coslice.profile.read import read_profiles
from coslice.simulate.run import simulate
from coslice.simulate.spec import Job, Pool, Scenario, Stretch, alternating, whole_swap


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
    assert pool.period.mean == pytest.approx(27.0, rel=0.01)
    assert pool.duty == pytest.approx(20.0 / 27.0, rel=0.01)


def test_steps_at_the_start_may_be_left_out(tmp_path: Path) -> None:
    path = run(tmp_path, alternating("a", 20.0, 30.0), until=500.0)
    (all_of_it,) = read_profiles(path)
    (later,) = read_profiles(path, ReadOptions(skip_first=5))
    assert later.pools[0].busy.count < all_of_it.pools[0].busy.count


def test_a_journal_without_a_cycle(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to profile"):
        read_profiles(run(tmp_path, alternating("a", 20.0, 30.0), until=40.0))
