"""The policy that a plan asks for is one under which its figures hold, judged by the lock's own core."""

import plan_jobs
import pytest
from msgspec.structs import replace

from coslice.plan import policy
from coslice.plan.cluster import Cluster
from coslice.plan.groupsfile import format_groups
from coslice.plan.planner import plan
from coslice.plan.policy import choose
from coslice.plan.predict import predict
from coslice.plan.tell import Told
from coslice.simulate.from_profile import job_of
from coslice.simulate.run import simulate
from coslice.simulate.spec import Pool, Scenario, SwapCost, whole_swap

THREE = [plan_jobs.job("long", 60, 300), plan_jobs.job("mid", 30, 200, 1), plan_jobs.job("short", 10, 100, 2)]


def test_three_jobs_take_turns_by_a_policy_that_keeps_what_was_promised() -> None:
    made = plan(THREE, cluster=Cluster(swap_s=4.0), max_slowdown=1.3)
    (group,) = made.detail
    assert group.policy == "fair_share"
    seen = simulate(
        Scenario(
            pools=(Pool(name="pool"),),
            jobs=tuple(job_of(profile) for profile in THREE),
            cost=whole_swap(4.0),
            policy=group.policy,
            until=30_000.0,
            warmup=3000.0,
        )
    )
    for member in group.members:
        assert seen.slowdown[member.profile] <= 1.3
        assert seen.slowdown[member.profile] <= member.slowdown + 0.03  # of two starts, the worse is told
    assert 'policy = "fair_share"' in format_groups(made)


def test_where_the_default_breaks_a_bound_the_group_is_as_it_was_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    units = plan_jobs.units(THREE, swap_s=4.0, max_slowdown=1.3)
    seen = predict(units, turns=400)
    told = Told(seen.slowdown, tuple(unit.duty for unit in units), 0.0, (0, 1, 2))
    everybody = (0, 1, 2)
    (chosen,) = choose(THREE, units, [everybody], [told])
    assert (chosen.policy, max(chosen.told.slowdown) > 1.0) == ("fair_share", True)
    strict = [replace(unit, max_slowdown=1.0) for unit in units]
    (chosen,) = choose(THREE, strict, [everybody], [told])
    assert (chosen.policy, chosen.told) == ("fifo", told)
    assert [one.policy for one in choose(THREE, units, [(0, 1), (2,)], [told, told])] == ["", ""]  # no choice
    monkeypatch.setattr(policy, "MOST_GROUPS", 0)  # too many to be played
    (chosen,) = choose(THREE, units, [everybody], [told])
    assert (chosen.policy, chosen.told) == ("fifo", told)


def test_a_small_job_in_a_large_group_computes_on_its_own_part_only() -> None:
    sizes = (8, 8, 1)
    jobs = [
        plan_jobs.job(profile.name, profile.pools[0].busy.mean, profile.pools[0].period.mean, 1, size)
        for profile, size in zip(THREE, sizes, strict=True)
    ]
    made = plan(jobs, cluster=Cluster(swap_s=4.0), max_slowdown=1.3)
    (group,) = made.detail
    assert group.policy == "fair_share"
    assert group.useful_duty <= group.duty_bound
    for member, size in zip(group.members, sizes, strict=True):
        assert member.useful_duty == pytest.approx(member.duty_alone / member.slowdown * size / 8, rel=0.01)


def test_each_swap_takes_what_its_two_jobs_take_to_move() -> None:
    """Not what the largest of the group takes."""
    rate, states = 4 << 30, (1, 2, 40)
    jobs = [
        replace(profile, pools=(replace(profile.pools[0], state_bytes=gib << 30),))
        for profile, gib in zip(THREE, states, strict=True)
    ]
    made = plan(jobs, cluster=Cluster(swap_bandwidth=rate), max_slowdown=1.4)
    (group,) = made.detail
    assert group.policy == "fair_share"
    seen = simulate(
        Scenario(
            pools=(Pool(name="pool"),),
            jobs=tuple(job_of(profile) for profile in jobs),
            cost=SwapCost(out_rate=rate, in_rate=rate),
            policy=group.policy,
            until=30_000.0,
            warmup=3000.0,
        )
    )
    told = {member.profile: member.slowdown for member in group.members}
    assert told == {name: pytest.approx(slow, abs=0.03) for name, slow in seen.slowdown.items()}
