"""A job that shares its trainer's and its sampler's accelerators: what both groups do to it at once."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from coslice.plan import together
from coslice.plan.batch import Table
from coslice.plan.cluster import Cluster
from coslice.plan.planner import plan, units_of
from coslice.plan.policy import choose
from coslice.plan.settle import keep_job_bounds
from coslice.plan.tell import tell
from coslice.plan.together import keep_together
from coslice.profile.model import Durations, Phase, Pool, Profile, make_pool
from coslice.simulate.from_profile import job_of
from coslice.simulate.run import simulate
from coslice.simulate.spec import Pool as Lock
from coslice.simulate.spec import Scenario, whole_swap

SWAP_S = 5.0


def trainer(on: float, off: float, staleness: float = 0.0) -> Pool:
    wait = Phase(
        name="gen",
        phase="generate",
        on=False,
        duration=Durations(mean=off),
        coupling="buffered" if staleness else "closed",
        staleness=staleness,
    )
    return make_pool("trainer", [wait, Phase(name="train", on=True, duration=Durations(mean=on))])


def sampler(on: float, off: float) -> Pool:
    busy = Phase(name="active", phase="generate", on=True, duration=Durations(mean=on))
    return make_pool("sampler", [busy, Phase(name="idle", on=False, duration=Durations(mean=off))])


JOBS = [
    Profile(name="both", pools=(trainer(60, 340), sampler(70, 330))),
    Profile(name="a", pools=(trainer(110, 410),)),
    Profile(name="b", pools=(trainer(60, 270),)),
]
GROUPS = [(0, 2), (1, 3)]


def table(bound: float, profiles: Sequence[Profile] = JOBS) -> Table:
    return Table(units_of(profiles, Cluster(swap_s=SWAP_S), bound))


def jointly(profiles: Sequence[Profile] = JOBS) -> dict[str, float]:
    where = ({"trainer": "t", "sampler": "s"}, {"trainer": "t"}, {"trainer": "s"})
    jobs = tuple(job_of(profile, groups=groups) for profile, groups in zip(profiles, where, strict=True))
    locks = (Lock(name="t"), Lock(name="s"))
    until = 100_000.0
    return simulate(
        Scenario(pools=locks, jobs=jobs, cost=whole_swap(SWAP_S), until=until, warmup=5000.0)
    ).slowdown


@pytest.mark.parametrize("staleness", [0.0, 2.0])
def test_its_slowdown_is_what_the_core_shows_for_both_groups_at_once(staleness: float) -> None:
    """Nor does it meet the others when they were predicted to meet, be it buffered."""
    both = Profile(name="both", pools=(trainer(60, 340, staleness), sampler(70, 330)))
    jobs = [both, *JOBS[1:]]
    groups, slow = keep_together(table(1.5, jobs), GROUPS, {profile.name: profile for profile in jobs})
    assert groups == GROUPS
    assert slow == {name: pytest.approx(value, rel=0.01) for name, value in jointly(jobs).items()}


def test_a_bound_that_both_groups_break_together_is_kept() -> None:
    """1.03 x by the sum of its waits in each, and 1.31 x in fact."""
    assert keep_job_bounds(table(1.1), GROUPS) == GROUPS
    assert jointly()["both"] > 1.3
    groups, _ = keep_together(table(1.1), GROUPS, {profile.name: profile for profile in JOBS})
    assert sorted(unit for group in groups for unit in group) == [0, 1, 2, 3]
    assert len([group for group in groups if len(group) > 1]) < 2


def test_who_cannot_be_played_any_more_shares_in_one_group_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "MOST_PLAYS", 0)
    groups, _ = keep_together(table(1.5), GROUPS, {profile.name: profile for profile in JOBS})
    assert len([group for group in groups if len(group) > 1]) == 1


def test_groups_that_were_played_together_keep_the_policy_that_they_were_played_under() -> None:
    jobs = [*JOBS, Profile(name="c", pools=(trainer(10, 300),))]
    units = units_of(jobs, Cluster(swap_s=SWAP_S), 1.5)
    for groups, policies in (
        ([(0, 2, 4), (1,), (3,)], ["fair_share", "", ""]),
        ([(0, 2, 4), (1, 3)], ["fifo", ""]),
    ):
        told = tell(Table(units), groups)
        assert [chosen.policy for chosen in choose(jobs, units, groups, told)] == policies


def test_a_plan_tells_what_was_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one the groups do less to it than both at once."""
    sizes = ((8, 2), (8,), (2,))
    jobs = [
        replace(
            profile,
            pools=tuple(replace(pool, accelerators=n) for pool, n in zip(profile.pools, each, strict=True)),
        )
        for profile, each in zip(JOBS, sizes, strict=True)
    ]
    made = plan(jobs, cluster=Cluster(swap_s=SWAP_S), max_slowdown=1.5)
    assert made.groups == (("both", "a"), ("both", "b"))
    monkeypatch.setattr(together, "MOST_POOLS", 0)
    summed = plan(jobs, cluster=Cluster(swap_s=SWAP_S), max_slowdown=1.5)
    assert made.slowdown["both"] == pytest.approx(jointly()["both"], rel=0.01)
    assert made.slowdown["both"] > summed.slowdown["both"]
    assert not made.notes
    assert any("added up, not played at once" in note and "both" in note for note in summed.notes)


def test_a_buffered_job_on_both_kinds_of_accelerators_is_the_job_of_its_profile() -> None:
    """The sampler is busy for a part of what a batch takes: taken for all of it, the job was simulated at
    more than twice its pace."""
    profile = Profile(name="x", pools=(trainer(100, 300, staleness=2.0), sampler(150, 250)))
    job = job_of(profile, groups={"trainer": "t", "sampler": "s"})
    told = simulate(
        Scenario(pools=(Lock(name="t"), Lock(name="s")), jobs=(replace(job, steps=50),), cost=whole_swap(0.0))
    )
    assert told.jobs["x"].step_s == pytest.approx(400.0, rel=0.02)
