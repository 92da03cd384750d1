"""The simulator against arithmetic and against itself, every invariant checked on the way."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coslice.core.policy import NAMES
from coslice.errors import ConfigError
from coslice.profile.cycle import cycles, solo_seconds
from coslice.profile.given import given_profile
from coslice.profile.model import Durations, Phase, Profile, make_pool
from coslice.profile.options import ReadOptions
from coslice.simulate.day import Part, run_part, scenario
from coslice.simulate.from_profile import job_of
from coslice.simulate.run import simulate
from coslice.simulate.solo import alone
from coslice.simulate.spec import (
    GIB,
    Drift,
    Faults,
    Job,
    Pool,
    Scenario,
    Stretch,
    SwapCost,
    alternating,
    whole_swap,
)

POOL = Pool(name="pool")


def pair(on: float, off: float, *more: Job, **scenario: object) -> Scenario:
    jobs = (alternating("a", on, off), alternating("b", on, off), *more)
    return replace(Scenario(pools=(POOL,), jobs=jobs, until=10_000.0), **scenario)


def test_two_jobs_that_fit_into_each_others_waits_lose_nothing() -> None:
    report = simulate(pair(40.0, 60.0, warmup=500.0), judge=True)
    assert report.useful_duty == pytest.approx(0.8, abs=0.01)
    assert report.duty_bound == pytest.approx(0.8, abs=0.01)
    assert report.slowdown == pytest.approx({"a": 1.0, "b": 1.0})


@pytest.mark.parametrize(
    ("on", "off", "swap"), [(40, 60, 5), (40, 60, 12), (60, 40, 0), (60, 40, 8), (90, 10, 1)]
)
def test_equal_jobs_have_the_period_of_the_cyclic_formula(on: float, off: float, swap: float) -> None:
    """T = max(on + off + swap, Σ (on + swap)): who comes back pays its own swap; the device can be full."""
    report = simulate(pair(on, off, warmup=1000.0, cost=whole_swap(swap)), judge=True)
    period = max(on + off + swap, 2 * (on + swap))
    for job in report.jobs.values():
        assert job.step_s == pytest.approx(period, rel=0.01)
    assert report.useful_duty == pytest.approx(2 * on / period, rel=0.02)
    assert report.groups["pool"].swap_duty == pytest.approx(2 * swap / period, abs=0.01)


def test_a_swap_of_bytes_takes_size_over_rate_and_the_way_in_overlaps_the_way_out() -> None:
    def swaps(overlap: float) -> float:
        cost = SwapCost(out_rate=GIB / 4, in_rate=GIB / 2, overlap=overlap)
        report = simulate(pair(50.0, 0.0, cost=cost), judge=True)
        return report.groups["pool"].swap_duty * report.window_s / report.swaps

    assert swaps(0.0) == pytest.approx(6.0, rel=0.02)
    assert swaps(1.0) == pytest.approx(4.0, rel=0.02)  # the way out hides the shorter way in


def test_who_fits_beside_the_other_stays_and_nothing_moves() -> None:
    jobs = tuple(alternating(name, 40.0, 60.0, bytes=GIB, need=GIB) for name in "ab")
    small = Scenario(pools=(replace(POOL, device=GIB * 3 // 2),), jobs=jobs, cost=whole_swap(5), until=5000.0)
    large = replace(small, pools=(replace(POOL, device=3 * GIB),))
    assert simulate(small, judge=True).swaps > 50
    assert simulate(large, judge=True).swaps == 0


def test_a_host_without_room_is_not_passed_over_in_silence() -> None:
    """The third job's state has no place; the agent refuses it, and the report shows its restarts."""
    jobs = tuple(alternating(name, 10.0, 10.0, bytes=GIB) for name in "abc")
    scenario = Scenario(pools=(replace(POOL, host=GIB),), jobs=jobs, until=3000.0)
    report = simulate(scenario, judge=True)
    assert max(job.starts for job in report.jobs.values()) > 1


def test_messages_and_hand_overs_take_their_time() -> None:
    cost = SwapCost(handoff_s=0.5, message_s=0.25)
    report = simulate(pair(10.0, 0.0, cost=cost, warmup=100.0), judge=True)
    assert report.jobs["a"].step_s == pytest.approx(2 * (10.0 + 0.5 + 2 * 0.25), rel=0.01)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    staleness=st.one_of(st.integers(0, 4).map(float), st.floats(0.0, 3.0)),
    times=st.lists(
        st.tuples(st.floats(0.5, 60), st.floats(0.5, 60), st.floats(0.0, 20)), min_size=1, max_size=12
    ),
)
def test_a_buffered_job_alone_is_as_the_profile_says(
    staleness: float, times: list[tuple[float, float, float]]
) -> None:
    """Three ways to the same times: the engine, ``alone``, and the profile's own unrolling."""
    waits, trains, syncs = zip(*times, strict=True)

    def phase(name: str, on: bool, values: tuple[float, ...], **more: object) -> Phase:
        part = Durations(mean=sum(values) / len(values), count=len(values), samples=values)
        return replace(Phase(name=name, on=on, duration=part), **more)

    buffered: dict[str, object] = {"coupling": "buffered", "staleness": staleness} if staleness else {}
    phases = [
        phase("gen", False, waits, **buffered),
        phase("train", True, trains),
        phase("sync", True, syncs),
    ]
    profile = Profile(name="job", pools=(make_pool("trainer", phases),))
    count = len(times) * -(-15 // len(times))  # whole rounds of the record
    job = replace(job_of(profile), steps=count)
    said = solo_seconds(profile.pools[0], cycles(profile.pools[0], count))
    assert alone(job, count).ends == pytest.approx(said)
    report = simulate(Scenario(pools=(POOL,), jobs=(job,)), judge=True)
    assert report.window_s == pytest.approx(said[-1])
    assert report.slowdown["job"] == pytest.approx(1.0)


def test_batches_that_lie_ready_make_up_for_a_wait() -> None:
    """Closed, the job loses what it waits for its turn; buffered, most of it is won back."""
    read = {staleness: ReadOptions(staleness=staleness) for staleness in (0.0, 4.0)}
    slowdown = {}
    for staleness, options in read.items():
        jobs = [
            job_of(given_profile(name, busy=busy, period=period, options=options))
            for name, busy, period in (("a", 170.0, 430.0), ("b", 281.0, 619.0))
        ]
        scenario = Scenario(pools=(POOL,), jobs=tuple(jobs), cost=whole_swap(10), until=200_000.0)
        report = simulate(replace(scenario, warmup=5000.0))
        slowdown[staleness] = max(report.slowdown.values())
        print(report.useful_duty, report.slowdown)
    assert slowdown[0.0] > 1.1
    assert slowdown[4.0] < 1.03


def test_two_pools_of_one_job_are_locked_apart() -> None:
    """Two on-policy jobs that share samplers and trainers: while one samples the other trains."""

    def job(name: str) -> Job:
        return Job(name=name, loop=((Stretch(60.0, "samplers", "gen"), Stretch(60.0, "trainers", "train")),))

    pools = (Pool(name="samplers"), Pool(name="trainers"))
    report = simulate(
        Scenario(pools=pools, jobs=(job("a"), job("b")), until=20_000.0, warmup=1000.0), judge=True
    )
    assert report.slowdown == pytest.approx({"a": 1.0, "b": 1.0}, rel=0.01)
    assert [pool.useful_duty for pool in report.groups.values()] == pytest.approx([1.0, 1.0], abs=0.01)
    assert report.gpu_hours_per_step == pytest.approx(report.gpu_hours_per_step_solo / 2, rel=0.02)


def test_a_sampler_that_waits_for_its_group_delays_the_batches() -> None:
    job = Job(
        name="a", loop=((Stretch(10.0, "trainers"),),), produce=((Stretch(30.0, "samplers"),),), staleness=1.0
    )
    other = alternating("b", 30.0, 0.0, group="samplers")
    pools = (Pool(name="samplers"), Pool(name="trainers"))
    alone_ = simulate(Scenario(pools=pools, jobs=(job,), until=10_000.0, warmup=500.0), judge=True)
    both = simulate(Scenario(pools=pools, jobs=(job, other), until=10_000.0, warmup=500.0), judge=True)
    assert alone_.jobs["a"].step_s == pytest.approx(30.0, rel=0.01)
    assert both.jobs["a"].step_s == pytest.approx(60.0, rel=0.01)
    assert both.slowdown["a"] == pytest.approx(2.0, rel=0.01)


def test_jobs_come_and_go() -> None:
    jobs = (
        alternating("a", 10.0, 0.0, steps=100),
        alternating("b", 10.0, 0.0, arrival=500.0, steps=20),
    )
    report = simulate(Scenario(pools=(POOL,), jobs=jobs), judge=True)
    assert report.window_s == pytest.approx(1200.0, abs=1.0)
    assert {name: job.steps for name, job in report.jobs.items()} == {"a": 100, "b": 20}
    assert report.slowdown["b"] == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("policy", NAMES)
def test_whatever_fails_everybody_finishes_and_the_same_seed_gives_the_same_run(policy: str) -> None:
    dice = random.Random(policy)
    jobs = tuple(
        alternating(f"j{i}", dice.uniform(5, 40), dice.uniform(0, 60), arrival=dice.uniform(0, 300), steps=12)
        for i in range(4)
    )
    scenario = Scenario(
        pools=(replace(POOL, nodes=2),),
        jobs=jobs,
        cost=SwapCost(out_s=1, in_s=1, handoff_s=0.01, message_s=0.01),
        policy=policy,
        faults=Faults(crashes=4.0, outages=6.0, outage_s=70.0, failed_moves=0.05),
        seed=3,
    )
    report = simulate(scenario, judge=True)
    assert {job.steps for job in report.jobs.values()} == {12}
    assert sum(job.starts for job in report.jobs.values()) > len(jobs)
    again = simulate(scenario)
    assert again.slowdown == report.slowdown
    assert again.core_steps == report.core_steps
    other = simulate(replace(scenario, seed=4))
    assert other.slowdown != report.slowdown


def test_a_lease_that_overruns_is_taken_away_and_the_job_goes_on() -> None:
    jobs = (alternating("long", 500.0, 10.0), alternating("short", 10.0, 10.0))
    scenario = Scenario(pools=(POOL,), jobs=jobs, max_hold=100.0, until=5000.0)
    report = simulate(scenario, judge=True)
    assert report.jobs["short"].wait.max <= 101.0
    assert "long" not in report.jobs  # it never gets through a step, and is not said to have
    warned = simulate(replace(scenario, on_overrun="warn"), judge=True)
    assert warned.jobs["long"].steps >= 8


@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        (
            Scenario(pools=(POOL,), jobs=(alternating("a", 1, 1, group="other"),), until=9),
            "needs group 'other'",
        ),
        (Scenario(pools=(POOL,), jobs=(alternating("a", 1, 1),)), "never leaves"),
        (Scenario(pools=(POOL,), jobs=(alternating("a", -1, 5),), until=9), "durations"),
        (Scenario(pools=(POOL,), jobs=(alternating("a", 0, 0),), until=9), "takes no time"),
        (
            Scenario(pools=(POOL,), jobs=(Job(name="a", loop=((Stretch(1.0),),)),), until=9),
            "nothing to share",
        ),
        (Scenario(pools=(POOL,), jobs=(alternating("a", 1, 1),) * 2, until=9), "one name: a"),
    ],
)
def test_what_cannot_be_simulated_is_refused(scenario: Scenario, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        simulate(scenario)


@pytest.mark.parametrize("part", ["all", "on", "off"])
@pytest.mark.parametrize("staleness", [0.0, 0.5, 2.0])
def test_a_job_that_drifts_alone_is_slowed_down_by_nobody(part: str, staleness: float) -> None:
    """Solo times drift with the job: a slowdown compares like with like, before and after."""
    job = alternating("a", 40.0, 60.0, drift=(Drift(1000.0, 1.5, part),))
    if staleness:
        job = replace(
            job,
            loop=((Stretch(40.0, "pool", "train"),),),
            produce=((Stretch(70.0, "", "make"),),),
            staleness=staleness,
        )
    report = simulate(Scenario(pools=(Pool(name="pool"),), jobs=(job,), until=5000.0))
    told = report.jobs["a"]
    assert told.slowdown == pytest.approx(1.0, abs=1e-6)
    assert told.worst10 == pytest.approx(1.0, abs=1e-6)
    steady = replace(job, drift=())
    before = simulate(Scenario(pools=(Pool(name="pool"),), jobs=(steady,), until=5000.0))
    assert (told.steps < before.jobs["a"].steps) or (staleness and part == "on")


def test_a_job_that_ends_no_whole_step_within_the_window_has_no_figures() -> None:
    slow = Job(name="a", loop=((Stretch(400.0, "pool"),), (Stretch(9000.0, "pool"),)))
    report = simulate(Scenario(pools=(POOL,), jobs=(slow,), until=1000.0, warmup=500.0))
    assert report.jobs == {}
    assert report.slowdown == {}


def test_slices_of_a_day_add_up_to_the_day_played_as_a_whole() -> None:
    part = Part(nodes=3, jobs=12, seed=4, seconds=16 * 3600.0)
    whole = simulate(scenario(part))
    told = [run_part(replace(part, slice=k, of=2)) for k in range(2)]
    assert [one.groups for one in told] == [2, 1]
    assert sum(one.core_steps for one in told) == whole.core_steps > 500
    assert sum(one.swaps for one in told) == whole.swaps
    useful = sum(one.useful_s for one in told) / (3 * part.seconds)
    assert useful == pytest.approx(whole.useful_duty)
    assert sum(one.jobs for one in told) == whole.slowdown_spread.count
    assert sum(one.slowdowns for one in told) / whole.slowdown_spread.count == pytest.approx(
        whole.slowdown_spread.mean
    )
