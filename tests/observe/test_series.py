"""However many jobs and groups come and go, the number of series stays bounded."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from coslice.core import events as ev
from coslice.core import group as core
from coslice.core.effects import Grant, MakeResident
from coslice.core.group_state import Group
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, NodeId, RequestId, SessionId
from coslice.core.policy import policy_named
from coslice.observe.metric import MAX_GROUPS, MAX_JOBS, OTHER, Names, Readings, Source
from coslice.orchestrator import metrics
from coslice.orchestrator.job_meter import OF_JOBS, JobMeter, Turns, of_jobs
from coslice.orchestrator.metrics import Meter, Pushed

NODE = NodeId("n0")
FIFO = policy_named("fifo")
FIXED = (metrics.HANDOVER.name, metrics.TURN.name)
"""One set of series for the whole process, whatever happens."""


class Lock:
    """The real lock machine of one group and its meter, in virtual time; its node answers at once."""

    def __init__(self, name: str, pushed: Pushed) -> None:
        self.state: Group = core.new_group(GroupId(name), nodes=[NODE])
        self.meter = Meter(GroupId(name), self.state, pushed)
        self.now = self.took = 0.0
        self.hear(ev.NodeAttached(at=0.0, node=NODE, epoch=Epoch(0), facts=ev.NodeFacts()))

    def hear(self, event: ev.GroupEvent) -> None:
        step = core.step(self.state, event, FIFO)
        self.state = step.state
        self.meter.heard(event, step, event.at + self.took)
        for effect in step.effects:
            if isinstance(effect, MakeResident):
                self.hear(ev.OpSucceeded(at=self.now, op=effect.op, node=NODE, restored=True))
            elif isinstance(effect, Grant):
                self.hear(ev.GrantConfirmed(at=self.now, request=effect.request))

    def ask(self, job: str, *, at: float) -> None:
        self.now = at
        self.hear(
            ev.AcquireRequested(
                at=at,
                job=JobId(job),
                incarnation=Incarnation(job),
                session=SessionId(job),
                request=RequestId(f"{job}/{at}"),
            )
        )

    def give(self, job: str, *, at: float) -> None:
        self.now = at
        self.hear(
            ev.LeaseYielded(at=at, job=JobId(job), session=SessionId(job), epoch=self.state.occupancy.epoch)
        )

    def leave(self, job: str, *, at: float) -> None:
        self.now = at
        self.hear(ev.SessionClosed(at=at, session=SessionId(job)))


class Scraped:
    """Counts the series of a process with these locks."""

    def __init__(self, locks: list[Lock], pushed: Pushed, registry: CollectorRegistry) -> None:
        self._locks, self._pushed, self._registry = locks, pushed, registry
        self._readings = Readings()
        self._readings.sources = [
            Source(metrics.OF_GROUPS, self._groups, metrics.of_groups),
            Source(metrics.COUNTED, self._pushed.take, metrics.of_counts),
            Source(OF_JOBS, self._jobs, of_jobs),
        ]

    def _groups(self) -> metrics.Taken:
        return metrics.Taken(tuple(lock.state for lock in self._locks), self._locks[0].now)

    def _jobs(self) -> Turns:
        self._pushed.jobs.prune({lock.state.id: lock.state for lock in self._locks})
        return self._pushed.jobs.take()

    def series(self) -> int:
        families = (*self._readings.collect(), *self._registry.collect())
        return sum(len(family.samples) for family in families if family.name not in FIXED)


def test_ten_thousand_short_jobs_leave_no_series_behind() -> None:
    registry = CollectorRegistry()
    pushed = Pushed(registry)
    lock = Lock("train", pushed)
    scraped = Scraped([lock], pushed, registry)
    counts = []
    for number in range(10_000):
        job, at = f"job-{number}", float(number)
        lock.ask(job, at=at)
        lock.give(job, at=at + 0.5)
        lock.leave(job, at=at + 0.6)
        if number % 500 == 499:
            counts.append(scraped.series())
    print(f"series after 10,000 short jobs: {counts[-1]}, at most {max(counts)}")
    assert lock.state.swaps > 0
    assert counts[-1] == counts[0], "the series of the first 500 jobs and of all 10,000"
    assert max(counts) < 150


def test_jobs_that_are_there_at_once_share_a_name_beyond_the_limit() -> None:
    registry = CollectorRegistry()
    pushed = Pushed(registry)
    locks = [Lock(f"g{number}", pushed) for number in range(50)]
    for lock in locks:
        for number in range(10):
            lock.ask(f"job-{number}", at=1.0)
            lock.give(f"job-{number}", at=2.0)
    pushed.jobs.prune({lock.state.id: lock.state for lock in locks})
    found = of_jobs(pushed.jobs.take())
    turns = {labels: value for metric, labels, value in found if metric.name == "coslice_job_turns_total"}
    own = [labels for labels in turns if labels[1] != OTHER]
    assert len(own) == MAX_JOBS
    assert sum(turns.values()) == 500, "nobody's turns are lost"
    assert len(turns) <= MAX_JOBS + len(locks)


def test_a_job_that_is_named_as_the_others_are_is_told_once() -> None:
    pushed = Pushed(CollectorRegistry())
    pushed.jobs = JobMeter(limit=1)
    lock = Lock("g", pushed)
    for number, job in enumerate((OTHER, "beyond")):
        lock.ask(job, at=float(number))
        lock.give(job, at=number + 0.5)
    told = [(metric.name, labels) for metric, labels, _ in of_jobs(pushed.jobs.take())]
    assert sorted(told) == sorted(set(told))


def test_a_job_that_ends_makes_room_for_the_next() -> None:
    registry = CollectorRegistry()
    pushed = Pushed(registry)
    pushed.jobs = JobMeter(limit=1)
    lock = Lock("train", pushed)
    for number in range(3):
        lock.ask(f"job-{number}", at=float(number))
        lock.give(f"job-{number}", at=number + 0.5)
        named = {labels[1] for _, labels, _ in of_jobs(pushed.jobs.take())}
        assert f"job-{number}" in named
        lock.leave(f"job-{number}", at=number + 0.6)
        pushed.jobs.prune({lock.state.id: lock.state})


def test_groups_beyond_the_limit_share_a_name_and_a_deleted_one_makes_room() -> None:
    registry = CollectorRegistry()
    pushed = Pushed(registry)
    for number in range(MAX_GROUPS + 20):
        Lock(f"g{number}", pushed)
    names = {s.labels["group"] for f in registry.collect() for s in f.samples if "group" in s.labels}
    assert len(names) == MAX_GROUPS + 1
    assert OTHER in names


def test_a_deleted_group_takes_its_series_with_it() -> None:
    registry = CollectorRegistry()
    pushed = Pushed(registry)
    counts, decisions = [], []
    for number in range(20):
        lock = Lock(f"g{number}", pushed)
        lock.ask("job", at=1.0)
        lock.give("job", at=2.0)
        lock.meter.close()
        taken = tuple(metrics.of_counts(pushed.take()))
        counts.append(sum(len(family.samples) for family in registry.collect()) + len(taken))
        decisions.append(sum(value for metric, _, value in taken if metric is metrics.DECISIONS))
    assert counts[-1] == counts[0]
    assert decisions == [decisions[0] * n for n in range(1, 21)], "a counter never falls"


def test_groups_may_go_on_while_their_counts_are_read() -> None:
    pushed = Pushed(CollectorRegistry())
    locks = [Lock(f"g{number}", pushed) for number in range(2)]
    for lock in locks:
        lock.ask("a", at=1.0)
        lock.give("a", at=2.0)
    counts, jobs = metrics.of_counts(pushed.take()), of_jobs(pushed.jobs.take())
    first, own = next(counts), next(jobs)
    locks[0].leave("a", at=3.0)  # for reasons that were not counted before
    locks[1].meter.close()
    decided = {labels[0]: value for metric, labels, value in (first, *counts) if metric is metrics.DECISIONS}
    assert decided["queued"] == 2, "what a group counted that is gone is counted once"
    assert {labels[0] for _, labels, _ in (own, *jobs)} == {"g0", "g1"}


def test_a_name_given_up_is_free_again() -> None:
    names = Names(1)
    assert (names("a"), names("b"), names("a")) == ("a", OTHER, "a")
    assert not names.give_up("b")
    assert names.give_up("a")
    assert names("b") == "b"


def cycle(lock: Lock, pushed: Pushed, *, hold: float, away: float, rounds: int) -> Iterator[None]:
    """Job a holds and is away; job b takes the device at once when a gives it up, for as long."""
    at = 0.0
    for _ in range(rounds):
        lock.ask("a", at=at)
        yield
        lock.give("a", at=at + hold)
        at += hold + away


def test_a_job_alone_is_not_slowed_down() -> None:
    pushed = Pushed(CollectorRegistry())
    lock = Lock("train", pushed)
    for _ in cycle(lock, pushed, hold=4.0, away=6.0, rounds=10):
        pass
    assert slowdowns(pushed) == {"a": pytest.approx(1.0)}


def test_the_estimate_is_the_cycle_with_its_wait_over_the_cycle_without() -> None:
    """Each holds 6 s and is away 4 s: two of them need 12 s a cycle where one needs 10 s."""
    pushed = Pushed(CollectorRegistry())
    lock = Lock("train", pushed)
    lock.ask("a", at=0.0)
    lock.ask("b", at=0.0)
    at = 6.0
    for holder, other in 20 * (("a", "b"), ("b", "a")):
        lock.give(holder, at=at)  # the other waits already, and begins now
        lock.ask(holder, at=at + 4.0)
        at += 6.0
        assert lock.state.occupancy.job == other
    assert slowdowns(pushed) == {"a": pytest.approx(1.2, abs=0.02), "b": pytest.approx(1.2, abs=0.02)}


def slowdowns(pushed: Pushed) -> dict[str, float]:
    return {
        labels[1]: v for m, labels, v in of_jobs(pushed.jobs.take()) if m.name == "coslice_job_slowdown_ratio"
    }


def test_a_repeated_request_is_not_a_second_grant() -> None:
    registry = CollectorRegistry()
    pushed = Pushed(registry)
    lock = Lock("train", pushed)
    lock.ask("a", at=1.0)
    asked = ev.AcquireRequested(
        at=2.0,
        job=JobId("a"),
        incarnation=Incarnation("a"),
        session=SessionId("a"),
        request=RequestId("a/1.0"),
    )
    for at in (2.0, 3.0):
        lock.hear(replace(asked, at=at))
    assert registry.get_sample_value("coslice_acquire_wait_seconds_count", {"group": "train"}) == 1


def test_a_hand_over_is_timed_from_its_yield_to_what_its_grant_is_saved_at() -> None:
    registry = CollectorRegistry()
    lock = Lock("train", Pushed(registry))

    def timed() -> tuple[float | None, float | None]:
        return tuple(
            registry.get_sample_value(f"coslice_handover_seconds_{each}") for each in ("count", "sum")
        )

    lock.ask("a", at=1.0)
    lock.give("a", at=2.0)
    assert timed() == (0, 0), "nobody waited"
    lock.ask("a", at=3.0)
    lock.ask("b", at=4.0)
    lock.took = 0.25
    lock.give("a", at=5.0)
    assert timed() == (1, 0.25)
    assert registry.get_sample_value("coslice_turn_seconds_sum", {"said": "yield"}) == 0.25
