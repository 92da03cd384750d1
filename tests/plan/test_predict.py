"""The predictors: known cases by hand, the two against each other, and both against the core's simulation."""

import itertools

import numpy as np
import plan_jobs
import pytest

from coslice.plan.batch import Table, predict_many
from coslice.plan.predict import Played, predict
from coslice.simulate.from_profile import job_of
from coslice.simulate.run import simulate
from coslice.simulate.spec import Pool, Scenario, whole_swap


def test_alternating_jobs_wait_for_their_own_swap_only() -> None:
    # 40 + 40 of 100. Swaps are made when a job asks, so closed jobs are 8 s later in every cycle.
    seen = predict(plan_jobs.units([plan_jobs.job("a", 40, 100), plan_jobs.job("b", 40, 100)], swap_s=8))
    assert seen.slowdown == pytest.approx((1.08, 1.08))
    assert seen.useful_duty == pytest.approx(80 / 108, abs=0.005)
    assert seen.order == (0, 1)
    free = predict(plan_jobs.units([plan_jobs.job("a", 40, 100), plan_jobs.job("b", 40, 100)], swap_s=0))
    assert free.slowdown == pytest.approx((1.0, 1.0))


def test_a_swap_too_many_stretches_the_cycle() -> None:
    # Σ(b + s) = 2 · (40 + 20) = 120 > 100: the cycle becomes 120.
    seen = predict(plan_jobs.units([plan_jobs.job("a", 40, 100), plan_jobs.job("b", 40, 100)], swap_s=20))
    assert seen.slowdown == pytest.approx((1.2, 1.2))
    assert seen.swap_duty == pytest.approx(40 / 120, abs=0.01)


def test_a_short_closed_job_waits_for_a_long_turn() -> None:
    short, long = plan_jobs.job("short", 25, 85), plan_jobs.job("long", 216, 343)
    seen = predict(plan_jobs.units([short, long], swap_s=2))
    assert seen.slowdown[0] > 1.8
    assert seen.slowdown[1] < 1.1


def test_buffered_jobs_make_up_for_a_wait() -> None:
    closed = predict(plan_jobs.units([plan_jobs.job("a", 198, 430), plan_jobs.job("b", 281, 619)]))
    buffered = predict(plan_jobs.units([plan_jobs.job("a", 198, 430, 8), plan_jobs.job("b", 281, 619, 8)]))
    assert max(buffered.slowdown) < 1.01
    assert buffered.useful_duty > 0.91
    assert max(closed.slowdown) > 1.1


def test_many_at_once_are_the_same_as_one_by_one() -> None:
    units = plan_jobs.units(plan_jobs.drawn(12, 3))
    table = Table(units)
    groups = np.array(
        [[0, 1, -1, -1], [2, 3, 4, -1], [5, 6, 7, 8], [9, -1, -1, -1], [10, 11, 0, -1], [1, 4, 7, 10]]
    )
    starts = np.where(groups >= 0, groups * 13.0, 0.0)
    seen = predict_many(table, groups, turns=300, starts=starts)
    for row, group in enumerate(groups):
        members = [int(number) for number in group if number >= 0]
        one = predict([units[m] for m in members], turns=300, starts=[m * 13.0 for m in members])
        width = len(members)
        assert seen.slowdown[row, :width] == pytest.approx(one.slowdown, rel=1e-9)
        assert seen.held[row, :width] == pytest.approx(one.held, rel=1e-9)
        assert seen.swap[row] == pytest.approx(one.swap_duty, rel=1e-9, abs=1e-12)
        assert not seen.slowdown[row, width:].any()


@pytest.mark.parametrize("seed", range(6))
def test_the_core_agrees(seed: int) -> None:
    """The same jobs through ``core.step`` on the simulator's clock."""
    profiles = plan_jobs.drawn(2 + seed % 2, seed)
    units = plan_jobs.units(profiles)
    until = 60 * max(unit.period for unit in units)
    report = simulate(
        Scenario(
            pools=(Pool(name="pool", device=60 << 30),),
            jobs=tuple(job_of(profile) for profile in profiles),
            cost=whole_swap(10.0),
            until=until,
            warmup=until / 10,
        )
    )
    played: list[Played] = []
    predict(units, turns=5000, record=played)
    turns = next(number for number, turn in enumerate(played) if turn.end >= until)
    seen = predict(units, turns=turns)
    assert seen.useful_duty == pytest.approx(report.useful_duty, abs=0.01)
    for unit, slowdown in zip(units, seen.slowdown, strict=True):
        assert slowdown == pytest.approx(report.slowdown[unit.job], rel=0.02)


def test_every_turn_is_recorded_and_none_overlap() -> None:
    units = plan_jobs.units(plan_jobs.drawn(3, 5))
    played: list[Played] = []
    predict(units, turns=200, record=played)
    assert len(played) == 200
    for before, after in itertools.pairwise(played):
        assert after.start - after.swap >= before.end - 1e-9
        assert (after.swap > 0) == (after.unit != before.unit)
