"""Admission in the simulator: the same wardens, fed by the locks of a simulation, obeyed at once.

Also says what came of it: how many of the steps after a re-planning kept their bound.
"""

import functools
from collections.abc import Sequence
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from coslice.admission.arrange import arrange
from coslice.admission.model import Actions, Code, Decision, Enter, Refuse, Rules, Wait
from coslice.admission.warden import Warden
from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import Group
from coslice.core.ids import JobId
from coslice.core.outcome import Step
from coslice.profile.model import Profile
from coslice.simulate.engine import Engine
from coslice.simulate.jobs import Run
from coslice.simulate.lock import Lock
from coslice.simulate.report import rolling

REPLANNED = frozenset({Code.REORDERED, Code.QUEUED, Code.REFUSED, Code.EVICTED, Code.LIFTED, Code.KEPT})


class JobBound(Struct, frozen=True, kw_only=True):
    """Rolling means of the slowdown over ten steps, of one job. Waits at the door are told apart."""

    windows: int
    """After the re-planning."""
    within: float
    """Share of them within the bound."""
    worst: float
    windows_all: int
    """Over the whole simulation, but for its start."""
    within_all: float
    queued_s: float
    dismissed: bool


class AdmissionReport(Struct, frozen=True, kw_only=True):
    mode: str
    max_slowdown: float
    replanned_at: float
    """Seconds: the first verdict after a drift; 0: none, and then everything counts."""
    within: float
    """Share of all jobs' rolling means after the re-planning that are within the bound."""
    windows: int
    within_all: float
    jobs: dict[str, JobBound]
    decisions: tuple[Decision, ...]
    policy: dict[str, str]
    """At the end, of each group."""


class Admission:
    """A ``simulate.gate.Gate``. ``declared``: profiles that jobs bring along, by name."""

    def __init__(self, rules: Rules, *, declared: dict[str, Profile] | None = None) -> None:
        self.rules, self._declared = rules, dict(declared or {})
        self.wardens: dict[str, Warden] = {}
        self._at_door: dict[tuple[str, JobId], list[ev.AcquireRequested]] = {}
        self.waits: dict[JobId, list[tuple[float, float]]] = {}
        """Of each job, from when to when it waited at a door."""
        self.dismissed: set[JobId] = set()
        self._judging = False
        self.replanned_at = 0.0
        self._engine: Engine

    def start(self, engine: Engine) -> None:
        self._engine = engine
        self.wardens = {
            name: Warden(
                self.rules,
                configured=lock.pool.policy or engine.scenario.policy,
                told=functools.partial(self._told, name),
            )
            for name, lock in engine.locks.items()
        }

    def _told(self, group: str, decision: Decision) -> None:
        """Into the journal, as live."""
        if self._engine.journal is not None:
            said = {"group": group, "job": decision.job, "code": decision.code, "text": decision.text}
            self._engine.journal.line({"t": decision.at, "admission": said})

    def asks(self, lock: Lock, event: ev.AcquireRequested) -> bool:
        profile = self._declared.get(event.job)
        declared = profile.pools[0] if profile is not None else None
        warden = self.wardens[lock.name]
        answer = warden.asks(event, declared)
        match answer:
            case Enter():
                return True
            case Wait():
                self._at_door.setdefault((lock.name, event.job), []).append(event)
            case Refuse():
                self._dismiss(event.job)
            case _:
                assert_never(answer)
        self._judge_soon(lock)
        return False

    def heard(self, lock: Lock, event: ev.GroupEvent, step: Step[Group, fx.GroupEffect]) -> None:
        self.wardens[lock.name].heard(event, step.effects, step.state)
        self._judge_soon(lock)

    def _judge_soon(self, lock: Lock) -> None:
        """A verdict follows from what has happened; it comes after it, as it does live."""
        if not self._judging:
            self._judging = True
            self._engine.later(self._engine.now, self._judge, lock)

    def _judge(self, lock: Lock) -> None:
        self._judging = False
        warden, now = self.wardens[lock.name], self._engine.now
        while (question := warden.question()) is not None:
            self._carry_out(lock, warden.answered(question, arrange(question), now))
            if not self.replanned_at and any(one.code is Code.DRIFTED for one in warden.decisions):
                self.replanned_at = now
        if (deadline := warden.deadline) is not None:
            self._engine.later(deadline, self._passed, lock)

    def _passed(self, lock: Lock) -> None:
        warden = self.wardens[lock.name]
        if warden.deadline is not None and warden.deadline <= self._engine.now:
            self._carry_out(lock, warden.passed(self._engine.now))

    def _carry_out(self, lock: Lock, actions: Actions) -> None:
        now = self._engine.now
        for event in actions.events:
            lock.post(event)
        for job in actions.enter:
            for ask in self._leave_door(lock, job):
                if self._engine.still_asks(ask):
                    lock.post(replace(ask, at=now))
        for job, _ in actions.refuse:
            self._leave_door(lock, job)
            self._dismiss(job)

    def _leave_door(self, lock: Lock, job: JobId) -> list[ev.AcquireRequested]:
        asks = self._at_door.pop((lock.name, job), [])
        if asks:
            self.waits.setdefault(job, []).append((asks[0].at, self._engine.now))
        return asks

    def _dismiss(self, job: JobId) -> None:
        self.dismissed.add(job)
        self._engine.later(self._engine.now, lambda _: self._engine.dismiss(job), None)

    # ── what came of it ────────────────────────────────────────────────────

    def report(self) -> AdmissionReport:
        engine = self._engine
        for (name, job), asks in self._at_door.items():
            if asks and name in engine.locks:
                self.waits.setdefault(job, []).append((asks[0].at, engine.now))
        since = self.replanned_at
        jobs = {run.spec.name: self._job(run, since) for run in engine.runs.values()}
        windows = sum(job.windows for job in jobs.values())
        everything = sum(job.windows_all for job in jobs.values())
        kept = sum(job.within * job.windows for job in jobs.values())
        kept_all = sum(job.within_all * job.windows_all for job in jobs.values())
        decisions = [one for warden in self.wardens.values() for one in warden.decisions]
        return AdmissionReport(
            mode=self.rules.mode,
            max_slowdown=self.rules.max_slowdown,
            replanned_at=since,
            within=kept / windows if windows else 1.0,
            windows=windows,
            within_all=kept_all / everything if everything else 1.0,
            jobs=jobs,
            decisions=tuple(sorted(decisions, key=lambda one: one.at)),
            policy={name: lock.state.policy or lock.policy.name for name, lock in engine.locks.items()},
        )

    def _job(self, run: Run, since: float) -> JobBound:
        waits = self.waits.get(run.name, [])
        warmup = self._engine.scenario.warmup
        all_means, means = self._means(run, warmup, waits), self._means(run, max(since, warmup), waits)
        bound = self.rules.max_slowdown + 1e-6
        return JobBound(
            windows=len(means),
            within=sum(mean <= bound for mean in means) / len(means) if means else 1.0,
            worst=max(means, default=0.0),
            windows_all=len(all_means),
            within_all=sum(mean <= bound for mean in all_means) / len(all_means) if all_means else 1.0,
            queued_s=sum(end - begin for begin, end in waits),
            dismissed=run.name in self.dismissed,
        )

    @staticmethod
    def _means(run: Run, since: float, waits: Sequence[tuple[float, float]]) -> list[float]:
        """Of steps that began at ``since`` or later."""
        ends, solo = [run.arrival, *run.ends], [0.0, *run.alone().ends]
        first = next((k for k, end in enumerate(ends) if end >= since), len(ends))
        if len(ends) - first < 2:
            return []
        here = [end - _before(waits, end) for end in ends[first:]]
        return rolling(here, solo[first : len(ends)])


def _before(waits: Sequence[tuple[float, float]], at: float) -> float:
    """Seconds of these waits that were over at ``at``. (No step ends while its job waits at the door.)"""
    return sum(end - begin for begin, end in waits if end <= at)
