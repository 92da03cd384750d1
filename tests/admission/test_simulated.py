"""Admission on the virtual clock: newcomers, drift, what is done about it, and that the bound holds after
it."""

import pytest

from coslice.admission.arrange import Question, arrange
from coslice.admission.model import Code, Rules
from coslice.admission.outlook import Player, outlook
from coslice.admission.simulated import Admission, AdmissionReport
from coslice.core.ids import JobId
from coslice.plan.predict import predict
from coslice.plan.units import unit_of
from coslice.profile.given import given_profile
from coslice.profile.model import Profile
from coslice.profile.options import ReadOptions
from coslice.simulate.run import simulate
from coslice.simulate.spec import Drift, Job, Pool, Scenario, alternating, whole_swap


def says(name: str, on: float, off: float, staleness: float = 0.0) -> Profile:
    return given_profile(name, busy=on, period=on + off, options=ReadOptions(staleness=staleness))


def play(
    *jobs: Job,
    mode: str = "enforce",
    until: float = 12_000.0,
    swap_s: float = 8.0,
    declared: dict[str, Profile] | None = None,
    policy: str = "fair_share",
    **rules: float,
) -> AdmissionReport:
    gate = Admission(Rules(mode=mode, **rules), declared=declared)
    scenario = Scenario(
        pools=(Pool(name="pool"),),
        jobs=jobs,
        cost=whole_swap(swap_s),
        policy=policy,
        until=until,
        warmup=200.0,
    )
    simulate(scenario, gate=gate, judge=True)
    return gate.report()


def codes(told: AdmissionReport, job: str = "") -> list[Code]:
    return [one.code for one in told.decisions if job in ("", one.job)]


# ── drift ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("part", ["all", "on"])
def test_after_a_drift_the_bound_holds_again(part: str) -> None:
    """The phases of one job grow by half in the middle of the run; nothing is done about it with ``warn``."""
    jobs = (
        alternating("math", 40.0, 60.0, drift=(Drift(5000.0, 1.5, part),)),
        alternating("code", 40.0, 60.0),
    )
    minded = play(*jobs)
    assert minded.replanned_at > 5000
    assert minded.windows > 20
    assert minded.within >= 0.99
    warned = play(*jobs, mode="warn")
    assert warned.within < 0.9  # it was needed
    assert Code.WARNED in codes(warned)
    assert not warned.jobs["code"].queued_s


def test_a_drift_that_hurts_nobody_changes_nothing() -> None:
    told = play(
        alternating("math", 5.0, 95.0, drift=(Drift(5000.0, 1.3, "off"),)),
        alternating("code", 5.0, 95.0),
        swap_s=1.0,
        until=8000.0,
    )
    assert Code.DRIFTED in codes(told)
    assert told.within >= 0.99
    assert {job.queued_s for job in told.jobs.values()} == {0.0}
    assert told.policy == {"pool": "fair_share"}


def test_who_is_queued_comes_back_when_there_is_room() -> None:
    told = play(
        alternating("math", 40.0, 60.0, drift=(Drift(3000.0, 1.5),), steps=40),
        alternating("code", 40.0, 60.0),
        until=9000.0,
    )
    assert codes(told, "code")[-2:] == [Code.QUEUED, Code.LIFTED]
    assert 0 < told.jobs["code"].queued_s < 3000
    assert not told.jobs["code"].dismissed
    assert told.within >= 0.99


def test_nobody_is_queued_for_ever() -> None:
    told = play(
        alternating("math", 40.0, 60.0, drift=(Drift(3000.0, 1.5),)),
        alternating("code", 40.0, 60.0),
        queue_limit=500.0,
        until=6000.0,
    )
    assert codes(told, "code")[-2:] == [Code.QUEUED, Code.EVICTED]
    assert told.jobs["code"].dismissed
    assert told.jobs["code"].queued_s <= 500
    assert "Use another group" in told.decisions[-1].text


def test_another_order_is_tried_before_anybody_has_to_go_and_taken_back_when_it_is_not_needed() -> None:
    """First come, first served, b would wait for both others in a row: 1.7 times as long as alone."""
    jobs = {"a": (44.0, 76.0), "b": (9.0, 71.0), "c": (66.0, 334.0)}
    told = play(
        alternating("a", *jobs["a"]),
        alternating("b", *jobs["b"]),
        alternating("c", *jobs["c"], arrival=1000.0, steps=5),
        declared={name: says(name, *times) for name, times in jobs.items()},
        policy="fifo",
        max_slowdown=1.6,
        swap_s=2.0,
        until=5000.0,
    )
    assert not any(job.dismissed for job in told.jobs.values())
    reordered = [one for one in told.decisions if one.code is Code.REORDERED]
    assert [one.at < 1500 for one in reordered] == [True, False]
    assert "with the policy" in reordered[0].text
    assert told.policy == {"pool": "fifo"}
    assert told.within_all >= 0.99


# ── newcomers ──────────────────────────────────────────────────────────────


def test_a_newcomer_that_declares_too_much_never_gets_a_turn() -> None:
    told = play(
        alternating("math", 60.0, 40.0),
        alternating("code", 60.0, 40.0, arrival=1000.0),
        declared={"math": says("math", 60.0, 40.0), "code": says("code", 60.0, 40.0)},
        until=5000.0,
    )
    assert told.jobs["code"].dismissed
    assert codes(told, "code") == [Code.REFUSED]
    assert told.jobs["math"].worst == pytest.approx(1.0)  # nobody noticed
    assert "code is not admitted beside math" in told.decisions[-1].text


def test_a_newcomer_that_declares_nothing_is_judged_by_its_first_cycles() -> None:
    told = play(
        alternating("math", 60.0, 40.0), alternating("code", 60.0, 40.0, arrival=1000.0), until=5000.0
    )
    assert codes(told, "code") == [Code.PROBATION, Code.REFUSED]
    assert told.jobs["code"].dismissed
    assert told.jobs["math"].windows_all > 20


def test_a_newcomer_that_fits_is_let_in_and_stays() -> None:
    told = play(
        alternating("math", 30.0, 70.0),
        alternating("code", 25.0, 75.0, arrival=1000.0),
        until=5000.0,
        swap_s=4.0,
    )
    assert codes(told, "code")[:2] == [Code.PROBATION, Code.ADMITTED]
    assert told.within == 1.0
    assert not told.jobs["code"].dismissed


def test_nobody_makes_room_for_a_newcomer() -> None:
    players = tuple(
        Player(job=JobId(name), profile=says(name, on, 100.0 - on), bound=1.1)
        for name, on in (("old", 45.0), ("older", 45.0), ("new", 5.0))
    )
    question = Question(players=players, newcomers=(JobId("new"),), policy="fifo", base="fifo", swap_s=8.0)
    plan = arrange(question)
    assert "new" in plan.drop  # whoever else has to go does not go for its sake


def both(on: float, **known: float) -> tuple[Player, ...]:
    pools = [says(name, on, 100.0 - on) for name in ("old", "late")]
    return tuple(Player(job=JobId(p.name), profile=p, bound=1.1, **known) for p in pools)


def test_nobody_is_queued_for_a_difference_that_few_cycles_cannot_show() -> None:
    def drop(**known: float) -> tuple[str, ...]:
        return arrange(Question(players=both(56.0, **known), policy="fifo", base="fifo", swap_s=0.0)).drop

    assert drop(error=0.08) == ("late",)
    assert drop(error=0.08, few=True) == ()
    assert drop(error=0.01, few=True) == ("late",)  # 1.11 x


def test_who_is_queued_comes_back_when_there_is_room_beyond_doubt() -> None:
    def drop(**known: float) -> tuple[str, ...]:
        question = Question(
            players=both(50.0, **known), queued=(JobId("late"),), policy="fifo", base="fifo", swap_s=0.0
        )
        return arrange(question).drop

    assert drop(error=0.3) == ("late",)
    assert drop(error=0.02) == ()


def test_nobody_makes_room_for_who_is_queued() -> None:
    """It came before the newest, which can stay and so does."""
    players = tuple(
        Player(job=JobId(name), profile=says(name, on, 100.0 - on), bound=1.1)
        for name, on in (("old", 40.0), ("queued", 35.0), ("newest", 40.0))
    )
    question = Question(players=players, queued=(JobId("queued"),), policy="fifo", base="fifo", swap_s=0.0)
    assert arrange(question).drop == ("queued",)


def test_a_prediction_is_the_planners() -> None:
    """Two ways to the same figures: the planner's arithmetic, and the lock's own core."""
    for on, off, staleness in ((40.0, 60.0, 0.0), (60.0, 190.0, 0.0), (30.0, 100.0, 2.0)):
        profiles = [says("a", 25.0, 75.0), says("b", on, off, staleness)]
        players = [Player(job=JobId(p.name), profile=p, bound=1.1) for p in profiles]
        seen = outlook(players, policy="fifo", swap_s=8.0)
        units = [unit_of(p, p.pools[0], max_slowdown=1.1, out_s=4.0, in_s=4.0) for p in profiles]
        told = predict(units, turns=400)
        for player, slowdown in zip(players, told.slowdown, strict=True):
            assert seen.slowdown[player.job] == pytest.approx(slowdown, rel=0.02)


def test_who_would_never_get_a_turn_does_not_fit() -> None:
    """However short the one is and however long the other: there is an answer."""
    profiles = [says("short", 0.4, 0.9), says("long", 900.0, 3600.0)]
    players = tuple(Player(job=JobId(p.name), profile=p, bound=1.25) for p in profiles)
    for policy in ("fifo", "reservation", "reservation:idle=0.5"):
        assert not outlook(players, policy=policy, swap_s=1.0).fits(players)
    plan = arrange(Question(players=players, policy="fifo", base="fifo", swap_s=1.0))
    assert plan.drop == ("long",)
