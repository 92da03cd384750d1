"""What admission remembers goes into a store and comes back: nobody can tell by what it decides."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from admission.test_simulated import codes, says

from coslice.admission.arrange import arrange
from coslice.admission.books import LEAST_CYCLES, SAVED_CYCLES, Saved
from coslice.admission.model import Code, Enter, Refuse, Rules, State, Wait
from coslice.admission.simulated import Admission
from coslice.admission.trail import KNOWN, PHASES
from coslice.admission.warden import Warden
from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group import new_group
from coslice.core.group_state import Group, JobRecord
from coslice.core.ids import GroupId, Incarnation, JobId, RequestId, SessionId
from coslice.core.outcome import Step
from coslice.orchestrator.admission_store import CODEC
from coslice.profile.holds import Hold
from coslice.profile.model import Profile
from coslice.simulate.lock import Lock
from coslice.simulate.run import simulate
from coslice.simulate.spec import Drift, Job, Pool, Scenario, alternating, whole_swap

RECORDED = Path(__file__).parent.parent / "store" / "data" / "admission-1.json"
"""Of schema 1: ``old`` is queued, ``new`` was refused, ``gone`` has left, admission set the policy."""


def through_a_store(saved: Saved) -> Saved:
    return msgspec.json.decode(msgspec.json.encode(saved), type=Saved)


class Restarting(Admission):
    """At each of these times the warden's memory is all that is left of it."""

    def __init__(self, rules: Rules, *at: float, declared: dict[str, Profile] | None = None) -> None:
        super().__init__(rules, declared=declared)
        self.at, self.restarts = list(at), 0

    def heard(self, lock: Lock, event: ev.GroupEvent, step: Step[Group, fx.GroupEffect]) -> None:
        super().heard(lock, event, step)
        if self.at and event.at >= self.at[0] and isinstance(event, ev.LeaseYielded):
            self.at.pop(0)
            self.restarts += 1
            old = self.wardens[lock.name]
            saved = old.books.save(event.at)
            fresh = Warden(self.rules, configured=old.books.configured, policy=step.state.policy)
            actions = fresh.resume(through_a_store(saved), step.state, at=event.at, ago=0.0)
            assert not actions.events
            assert fresh.books.save(event.at) == saved
            self.wardens[lock.name] = fresh
            self._judge_soon(lock)


def play(*jobs: Job, restarts: tuple[float, ...] = (), **rules: float) -> Restarting:
    gate = Restarting(Rules(mode="enforce", **rules), *restarts)
    scenario = Scenario(
        pools=(Pool(name="pool"),), jobs=jobs, cost=whole_swap(8.0), policy="fair_share", until=4500.0,
        warmup=200.0,
    )  # fmt: skip
    simulate(scenario, gate=gate)
    assert gate.restarts == len(restarts)
    return gate


def test_restarts_change_no_verdict() -> None:
    """Before a drift, in the middle of finding it, with a job queued for it, and after that."""
    jobs = (
        alternating("math", 40.0, 60.0, drift=(Drift(2000.0, 1.5),), steps=30),
        alternating("code", 40.0, 60.0),
    )
    plain, restarted = play(*jobs), play(*jobs, restarts=(1500.0, 2300.0, 3200.0))
    for told in (plain.report(), restarted.report()):
        assert Code.DRIFTED in codes(told, "math")
        moved = [code for code in codes(told, "code") if code in (Code.PROBATION, Code.QUEUED, Code.LIFTED)]
        assert moved == [Code.PROBATION, Code.QUEUED, Code.LIFTED]
        assert told.within >= 0.99
    before = [[one for one in gate.report().decisions if one.at < 2000.0] for gate in (plain, restarted)]
    assert before[0] == before[1]


# ── by hand ────────────────────────────────────────────────────────────────


def ask(job: str, *, at: float = 0.0, incarnation: str = "one", phase: str = "") -> ev.AcquireRequested:
    return ev.AcquireRequested(
        at=at, request=RequestId(f"{job}/{at}"), job=JobId(job), incarnation=Incarnation(incarnation),
        session=SessionId(job), phase=phase,
    )  # fmt: skip


def lock_of(*jobs: str, policy: str = "") -> Group:
    records = tuple(
        JobRecord(job=JobId(job), incarnation=Incarnation("one"), sessions=(SessionId(job),)) for job in jobs
    )
    return msgspec.structs.replace(new_group(GroupId("pool")), jobs=records, policy=policy)


def member(warden: Warden, job: str, group: Group, *, on: float = 60.0, off: float = 40.0) -> None:
    """It declares that, asks, and is known to the lock from then on."""
    warden.asks(ask(job), says(job, on, off).pools[0])
    warden.heard(ev.GrantConfirmed(at=1.0, request=RequestId(f"{job}/0.0")), (), group)


def judged(warden: Warden, at: float = 2.0) -> Any:
    question = warden.question()
    assert question is not None
    return warden.answered(question, arrange(question), at)


def test_who_was_refused_stays_refused_until_the_rules_change() -> None:
    rules = Rules(mode="enforce", max_slowdown=1.1)
    warden = Warden(rules, configured="fifo")
    group = lock_of("old")
    member(warden, "old", group)
    assert isinstance(warden.asks(ask("new"), says("new", 60.0, 40.0).pools[0]), Wait)
    refused = judged(warden).refuse
    saved = through_a_store(warden.books.save(3.0))
    again = Warden(rules, configured="fifo")
    assert again.resume(saved, group, at=100.0, ago=5.0).events == ()
    assert again.asks(ask("new")) == Refuse(refused[0][1])
    assert isinstance(again.asks(ask("new", incarnation="two"), says("new", 1.0, 999.0).pools[0]), Wait)
    assert any("refuses new" in line for line in again.lines("new", 100.0))
    assert "6.0 s ago: admission, refused" in again.lines("new", 100.0)[-1]  # 1 s before it was saved
    wider = Warden(Rules(mode="enforce", max_slowdown=3.0), configured="fifo")
    wider.resume(saved, group, at=100.0, ago=5.0)
    assert isinstance(wider.asks(ask("new"), says("new", 60.0, 40.0).pools[0]), Wait)  # asked anew
    off = Warden(Rules(mode="warn", max_slowdown=1.1), configured="fifo")
    off.resume(saved, group, at=100.0, ago=5.0)
    assert isinstance(off.asks(ask("new")), Enter)


def test_a_value_of_this_schema_is_read_by_every_later_version() -> None:
    kept = CODEC.decode(RECORDED.read_bytes())
    warden = Warden(Rules(mode="enforce"), configured="fifo", policy="reservation")
    warden.resume(kept.saved, lock_of("old", policy="reservation"), at=50.0, ago=4.0)
    (told,) = warden.members(50.0)
    assert (told.job, told.state, told.cycles, told.queued_s) == ("old", State.QUEUED, 1, 6.0)
    assert isinstance(warden.asks(ask("new")), Refuse)
    assert (warden.books.ours, warden.books.operator) == ("reservation", "shortest")
    assert warden.watch.swap_s == 8.0
    assert warden.question() is not None


def test_what_was_decided_and_not_carried_out_is_carried_out() -> None:
    """Killed between the saving of a verdict and the lock's hearing of it."""
    warden = Warden(Rules(mode="enforce"), configured="fifo", policy="shortest")
    group = lock_of("old", policy="shortest")
    member(warden, "old", group)
    warden.books.before, warden.books.ours = "shortest", "reservation"
    saved = through_a_store(warden.books.save(3.0))

    def resumed(now: str) -> tuple[list[str], str]:
        again = Warden(Rules(mode="enforce"), configured="fifo", policy=now)
        actions = again.resume(saved, lock_of("old", policy=now), at=9.0, ago=0.0)
        return [
            event.policy for event in actions.events if isinstance(event, ev.PolicySet)
        ], again.books.policy

    assert resumed("shortest") == (["reservation"], "reservation")
    assert resumed("reservation") == ([], "reservation")
    assert resumed("priority") == ([], "priority")  # an operator set it since


def test_a_queued_members_time_goes_on_while_nobody_runs() -> None:
    warden = Warden(Rules(mode="enforce", queue_limit=100.0), configured="fifo")
    group = lock_of("old", "late")
    member(warden, "old", lock_of("old"), on=5.0, off=95.0)
    member(warden, "late", group, on=5.0, off=95.0)
    judged(warden)
    seat = warden.books.seats[JobId("late")]
    seat.state, seat.queued_at = State.QUEUED, 10.0
    saved = through_a_store(warden.books.save(30.0))
    again = Warden(Rules(mode="enforce", queue_limit=100.0), configured="fifo")
    again.resume(saved, group, at=7000.0, ago=15.0)
    assert isinstance(again.asks(ask("late", at=7001.0)), Wait)
    assert again.deadline == pytest.approx(7000.0 - 15.0 - 20.0 + 100.0)
    off = Warden(Rules(mode="warn"), configured="fifo")
    off.resume(saved, group, at=7000.0, ago=15.0)
    assert isinstance(off.asks(ask("late", at=7001.0)), Enter)  # nobody waits at a door that is open


def test_what_is_saved_is_bounded_however_many_jobs_there_are() -> None:
    warden = Warden(Rules(mode="warn"), configured="fifo")
    jobs = [f"job-{number}" for number in range(140)]
    group = lock_of(*jobs)
    for job in jobs:
        warden.asks(ask(job))
    warden.heard(ev.GrantConfirmed(at=1.0, request=RequestId("none")), (), group)
    for job in jobs:
        trail = warden.watch.trails[JobId(job)]
        for at in range(60):
            turn(trail, at, phase=f"phase-{at % 2}")
        assert len(trail.cycles) > LEAST_CYCLES
    saved = warden.books.save(2.0)
    assert sum(len(trail.cycles) for trail in saved.trails) == SAVED_CYCLES
    assert len(saved.seats) == len(saved.trails) == SAVED_CYCLES // LEAST_CYCLES
    assert len(msgspec.json.encode(saved)) < 400_000


def test_a_job_with_a_name_for_every_turn_is_kept_within_bounds() -> None:
    warden = Warden(Rules(mode="warn"), configured="fifo")
    trail = warden.watch.expect(JobId("a"), Incarnation("one"))
    for at in range(5 * PHASES):
        turn(trail, at, phase=f"step-{at}")
    assert len(trail.cycles) >= KNOWN
    assert len(trail.save().order) == PHASES


def turn(trail: Any, at: int, *, phase: str) -> None:
    trail.turn(Hold(phase, 6.0 if at else -1.0, 4.0), asked=10.0 * at + 6.0, ended=10.0 * at + 10.0)
