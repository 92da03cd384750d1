"""What the lock sees of a job is what the job does alone, whoever shares with it. Judged in the simulator,
which knows both."""

import random

import pytest

from coslice.admission.trail import KNOWN
from coslice.admission.watch import Watch
from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import Group, Held
from coslice.core.ids import Incarnation, JobId, NodeId
from coslice.core.outcome import Step
from coslice.profile.cycle import cycles
from coslice.profile.given import given_profile
from coslice.profile.model import Pool
from coslice.profile.options import ReadOptions
from coslice.simulate import spec
from coslice.simulate.engine import Engine
from coslice.simulate.from_profile import job_of
from coslice.simulate.lock import Lock
from coslice.simulate.report import report
from coslice.simulate.spec import Drift, Job, Scenario, Stretch, alternating, whole_swap


class Onlooker:
    """A gate that lets everybody pass and only looks."""

    def __init__(self) -> None:
        self.watch = Watch()

    def start(self, engine: Engine) -> None:
        pass

    def asks(self, lock: Lock, event: ev.AcquireRequested) -> bool:
        return True

    def heard(self, lock: Lock, event: ev.GroupEvent, step: Step[Group, fx.GroupEffect]) -> None:
        self.watch.heard(event, step.effects, step.state)


def watched(
    *jobs: Job,
    policy: str = "fair_share",
    swap_s: float = 4.0,
    until: float = 8000.0,
    declared: Pool | None = None,
) -> tuple[Watch, Engine]:
    """``declared``: what job a says that it does."""
    gate = Onlooker()
    if declared is not None:
        gate.watch.expect(JobId("a"), Incarnation("a-1"), declared)
    scenario = Scenario(
        pools=(spec.Pool(name="pool"),), jobs=jobs, cost=whole_swap(swap_s), policy=policy, until=until
    )
    engine = Engine(scenario, gate=gate)
    engine.run()
    return gate.watch, engine


@pytest.mark.parametrize("seed", range(6))
def test_waits_and_swaps_are_not_taken_for_the_job(seed: int) -> None:
    dice = random.Random(seed)
    jobs = []
    for name in "abc"[: dice.randint(2, 3)]:
        loop = tuple(
            (
                Stretch(dice.uniform(20, 90), "", "generate"),
                Stretch(dice.uniform(5, 40), "pool", "train"),
                *(
                    (Stretch(7.0, "", "reward"), Stretch(dice.uniform(1, 9), "pool", "save"))
                    if seed % 2
                    else ()
                ),
            )
            for _ in range(5)
        )
        jobs.append(Job(name=name, loop=loop))
    swap = dice.choice([0.0, 4.0])
    watch, _ = watched(*jobs, policy=dice.choice(["fifo", "shortest", "reservation"]), swap_s=swap)
    assert watch.swap_s == pytest.approx(swap, abs=1e-6)
    for job in jobs:
        trail = watch.trails[JobId(job.name)]
        assert trail.seen > 20
        shapes = [(sum(p.seconds for p in one if p.group), sum(p.seconds for p in one)) for one in job.loop]
        for cycle in trail.cycles:
            nearest = min(shapes, key=lambda shape: abs(shape[0] - cycle.on))
            assert (cycle.on, cycle.alone) == pytest.approx(nearest, abs=1e-6)
            assert cycle.shared >= cycle.alone - 1e-6


def test_the_slowdown_is_the_simulators() -> None:
    watch, engine = watched(alternating("a", 40.0, 60.0), alternating("b", 40.0, 60.0))
    told = report(engine, policy="fair_share")
    for run in engine.runs.values():
        rolling = watch.trails[run.name].rolling()
        assert rolling == pytest.approx(told.jobs[run.name].slowdown, rel=0.01)
        assert rolling > 1.03  # it is slowed down, and it shows


@pytest.mark.parametrize("staleness", [0.5, 1.0, 4.0])
def test_how_long_a_buffered_job_makes_a_batch_shows_although_it_waits_for_others(staleness: float) -> None:
    """Its waits for batches get shorter when it waits for its turn; what a batch takes stays what it is."""
    made = Job(
        name="a",
        loop=((Stretch(40.0, "pool", "train"),),),
        produce=((Stretch(70.0, "", "make"),),),
        staleness=staleness,
    )
    other = alternating("b", 15.0, 200.0)
    declared = given_profile("a", busy=30.0, period=55.0, options=ReadOptions(staleness=staleness)).pools[0]
    watch, engine = watched(made, other, declared=declared)
    trail = watch.trails[JobId("a")]
    pool = trail.pool()
    assert pool is not None
    assert pool.staleness == staleness
    assert {round(cycle.make, 6) for cycle in cycles(pool, 8)} == {70.0}
    solo = engine.runs[JobId("a")].alone().ends
    assert pool.period.mean == pytest.approx((solo[-1] - solo[5]) / (len(solo) - 6), rel=1e-6)
    assert trail.drifts == 1  # it is not what it declared, and that is noticed


@pytest.mark.parametrize("staleness", [1.0, 4.0])
def test_how_batches_scatter_is_known_and_not_forgotten_when_the_turns_change(staleness: float) -> None:
    """It waits for them as long as its turns are short; with long ones nothing shows any more."""
    made = Job(
        name="a",
        loop=((Stretch(40.0, "pool", "train"),),),
        produce=tuple((Stretch(seconds, "", "make"),) for seconds in (90.0, 70.0, 80.0)),
        staleness=staleness,
        drift=(Drift(4000.0, 3.0, "on"),),
    )
    declared = given_profile("a", busy=40.0, period=80.0, options=ReadOptions(staleness=staleness)).pools[0]
    for until, on in ((3900.0, 40.0), (8000.0, 120.0)):
        watch, _ = watched(made, swap_s=0.0, until=until, declared=declared)
        trail = watch.trails[JobId("a")]
        assert trail.times()[0] == pytest.approx(on)
        assert {round(make) for make in trail._made()} == {90, 70, 80}
    before, _ = watched(made, swap_s=0.0, until=3900.0, declared=declared)
    trail = before.trails[JobId("a")]
    for scatter, told in ((True, {90, 70, 80}), (False, {80})):
        pool = trail.pool(scatter=scatter)
        assert pool is not None
        assert {round(cycle.make) for cycle in cycles(pool, 12)} == told


def test_a_turn_that_was_cut_off_says_nothing() -> None:
    watch = Watch()
    gate = Onlooker()
    gate.watch = watch
    scenario = Scenario(
        pools=(spec.Pool(name="pool"),),
        jobs=(alternating("a", 4000.0, 60.0), alternating("b", 40.0, 60.0)),
        until=40_000.0,
        max_hold=1000.0,
    )
    engine = Engine(scenario, gate=gate)
    engine.run()
    assert len(watch.trails[engine.runs["b"].name].cycles) >= KNOWN  # type: ignore[index]
    assert not watch.trails[engine.runs["a"].name].known  # type: ignore[index]


@pytest.mark.parametrize("told", [True, False])
def test_a_wait_for_maintenance_is_not_the_other_jobs_fault(told: bool) -> None:
    """A job that holds for long stands for the maintenance, of which the lock hears or not."""

    class Maintained(Onlooker):
        out = False

        def heard(self, lock: Lock, event: ev.GroupEvent, step: Step[Group, fx.GroupEffect]) -> None:
            super().heard(lock, event, step)
            on = step.state.occupancy
            out = isinstance(on, Held) and on.job.startswith("m")
            if told and out is not self.out:
                kind = ev.NodeDrained if out else ev.NodeUndrained
                self.watch.heard(kind(at=event.at, node=NodeId("n0")), (), step.state)
            self.out = out

    gate = Maintained()
    scenario = Scenario(
        pools=(spec.Pool(name="pool"),),
        jobs=(alternating("a", 40.0, 60.0), alternating("m", 5000.0, 2000.0)),
        until=20_000.0,
    )
    engine = Engine(scenario, gate=gate)
    engine.run()
    trail = gate.watch.trails[engine.runs["a"].name]  # type: ignore[index]
    assert len(trail.cycles) >= KNOWN
    worst = max(cycle.shared / cycle.alone for cycle in trail.cycles)
    assert (worst < 1.1) is told


def test_a_profile_of_what_was_seen_plays_like_the_job_itself() -> None:
    job = Job(
        name="a",
        loop=tuple((Stretch(50.0 + k, "", "generate"), Stretch(30.0 - k, "pool", "train")) for k in range(4)),
    )
    watch, engine = watched(job, alternating("b", 20.0, 80.0))
    profile = watch.trails[engine.runs["a"].name].profile()  # type: ignore[index]
    assert profile is not None
    back = job_of(profile)
    assert sorted({round(one[1].seconds, 6) for one in back.loop}) == [27.0, 28.0, 29.0, 30.0]
    assert {cycle.turns[0].phase for cycle in cycles(profile.pools[0], 4)} == {"train"}
