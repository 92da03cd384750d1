"""One node around real holdings, for tests: processes, a device that keeps the truth, a backend with faults.

The device knows where every process's state really is and how much room there is. A restore without room for
all that the job ever used, or onto a device whose last eviction failed, fails the test at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.context import Holdings, NodeRules, facts, find, next_deadline, restarted, resume, step
from coslice.core.events import ContextState
from coslice.core.holdings import Live, Lost, Saved, fits_beside, need_of, occupies, others, taken
from coslice.core.ids import GroupId, Incarnation, JobId, MemberId, NodeId, OpId
from coslice.core.invariants_node import violations_of_step
from coslice.core.outcome import Rejected

MIB = 1 << 20
BUDGET = 100 * MIB
FAULTS = ("fails", "half", "busy", "lost", "no_room", "silent")


@dataclass
class Process:
    pid: int
    job: JobId
    incarnation: Incarnation
    bytes: int
    parked: bool = False

    @property
    def member(self) -> MemberId:
        return MemberId(f"{self.job}/{self.incarnation}/{self.pid}/{self.pid}")


@dataclass
class Device:
    """The truth: living processes, and where the state of each is."""

    alive: dict[int, Process] = field(default_factory=dict)
    extra: dict[JobId, int] = field(default_factory=dict)
    appetite: dict[JobId, int] = field(default_factory=dict)
    """The most a job was ever measured to use in its present start."""
    residual: dict[int, int] = field(default_factory=dict)

    def of(self, job: JobId) -> list[Process]:
        return [p for p in self.alive.values() if p.job == job]

    def used(self, job: JobId) -> int:
        here = [p.bytes for p in self.of(job) if not p.parked]
        return sum(here) + (self.extra.get(job, 0) if here else 0)

    def need(self, job: JobId) -> int:
        return max(self.appetite.get(job, 0), sum(p.bytes for p in self.of(job)))

    def left(self, *, but: JobId | None = None) -> int:
        return sum(n for pid, n in self.residual.items() if pid in self.alive and self._leaves(pid, but))

    def _leaves(self, pid: int, but: JobId | None) -> bool:
        return self.alive[pid].parked and self.alive[pid].job != but

    def total(self, *, but: JobId | None = None) -> int:
        """Bytes on the device, of all jobs or of all but one."""
        jobs = {p.job for p in self.alive.values()} - {but}
        return sum(self.used(j) for j in jobs) + self.left(but=but)

    def check_room(self, job: JobId) -> None:
        beside, need = self.total(but=job), self.need(job)
        assert beside + need <= BUDGET, f"a restore of {job} poisons it: {need} beside {beside}"


class NodeWorld:
    def __init__(
        self, name: str, rules: NodeRules, *, said: Callable[[fx.NodeEffect], None] = lambda _: None
    ) -> None:
        self.name = NodeId(name)
        self.holdings = Holdings(group=GroupId("g"), node=self.name, device_budget=BUDGET, rules=rules)
        self.device = Device()
        self.at = 0.0
        self.pids = 0
        self.asked: fx.RunSnapshot | fx.RunRestore | None = None
        self.members_asked: tuple[MemberId, ...] = ()
        self.kills: list[JobId] = []
        self.news: list[ev.NodeEvent] = []
        """What the agent will learn of processes, in any order."""
        self.answers: list[ev.NodeEvent] = []
        self.reports: dict[OpId, fx.ReportDone | fx.ReportFailed] = {}
        self._said = said

    # ── the machine under test, and what its effects do ──

    def tick(self) -> float:
        self.at += 0.25
        return self.at

    def hear(self, event: ev.NodeEvent) -> bool:
        before = self.holdings
        try:
            taken = step(before, event)
        except Rejected:
            assert self.holdings == before
            return False
        assert step(before, event) == taken, "same state and event, same outcome"
        assert violations_of_step(before, event, taken) == []
        self.holdings = taken.state
        self.carry_out(taken.effects)
        return True

    def carry_out(self, effects: tuple[fx.NodeEffect, ...]) -> None:
        for effect in effects:
            match effect:
                case fx.RunSnapshot(job=job) | fx.RunRestore(job=job):
                    self.asked = effect
                    context = find(self.holdings, job)
                    assert context is not None
                    self.members_asked = tuple(m.id for m in context.members)
                    if isinstance(effect, fx.RunRestore):
                        self.device.check_room(job)
                case fx.KillJob(job=job):
                    self.kills.append(job)
                case fx.ReportDone() | fx.ReportFailed():
                    assert self.reports.setdefault(effect.op, effect) == effect, "one answer to one command"
                case fx.FreeBuffers(job=job):
                    context = find(self.holdings, job)
                    assert context is None or not isinstance(context.place, Saved) or context.members
                case fx.PushFacts():
                    pass
            self._said(effect)

    # ── processes ──

    def begin(self, job: JobId, size: int, *, parked: bool, start: Incarnation) -> Process | None:
        """A process of the job comes up and registers; None if it cannot."""
        if not self.device.of(job):
            self.device.extra[job] = self.device.appetite[job] = 0
        self.pids += 1
        process = Process(self.pids, job, start, size, parked)
        self.device.alive[process.pid] = process
        if not self.register(process):
            del self.device.alive[process.pid]
            return None
        return process

    def register(self, process: Process) -> bool:
        return self.hear(
            ev.MemberRegistered(
                at=self.tick(),
                job=process.job,
                incarnation=process.incarnation,
                member=process.member,
                pid=process.pid,
                start_time=process.pid,
                bytes=process.bytes,
                parked=process.parked,
            )
        )

    def reconnect(self, process: Process) -> None:
        found = find(self.holdings, process.job)
        if found is None or not isinstance(
            found.place, Lost
        ):  # a lost process does not claim to have its state
            self.register(process)

    def room(self) -> int:
        """What may be allocated. A half-moved job may yet come in as a whole, so its room is left free."""
        half = [c for c in self.holdings.contexts if c.place != Live() and occupies(c)]
        coming = sum(max(0, taken(self.holdings, c) - self.device.used(c.job)) for c in half)
        return BUDGET - self.device.total() - coming

    def fits(self, job: JobId, size: int) -> bool:
        """Would the agent let a process without the lock keep that much on the device?"""
        held = self.holdings
        beside = others(held, job)
        need = max(size + sum(p.bytes for p in self.device.of(job)), need_of(held, job, 0))
        return held.running is None and fits_beside(held, job, need, beside) and size <= self.room()

    def grow(self, job: JobId, size: int) -> None:
        """The job uses more for a while, as far as the device allows, and is measured."""
        self.device.extra[job] = max(0, min(size, self.device.extra[job] + self.room()))
        use = self.device.used(job)
        self.device.appetite[job] = max(use, self.device.appetite[job])
        self.hear(ev.UsageMeasured(at=self.tick(), job=job, bytes=use))

    def bury(self, pid: int) -> None:
        process = self.device.alive.pop(pid)
        self.news.append(ev.MemberGone(at=0.0, job=process.job, member=process.member, reason="it exited"))

    def learn(self, index: int = 0) -> None:
        self.hear(replace(self.news.pop(index), at=self.tick()))

    def finish_kill(self) -> None:
        job = self.kills.pop()
        dead = self.device.of(job)
        for process in dead:
            self.bury(process.pid)
        if dead:
            start = dead[0].incarnation
            self.news.append(ev.JobKilled(at=0.0, job=job, reason="killed", incarnation=start))

    def unseen(self) -> list[Process]:
        silent = {m.id for c in self.holdings.contexts for m in c.members if not m.seen}
        return [p for p in self.device.alive.values() if p.member in silent]

    # ── the backend ──

    def backend(self, how: str = "ok", *, left: int = 0) -> None:
        """It comes to an end with what it was asked last; ``left`` MiB stay on the device of each process."""
        effect, self.asked = self.asked, None
        assert effect is not None
        there = [p for p in self.device.of(effect.job) if p.member in self.members_asked]
        if isinstance(effect, fx.RunSnapshot):
            self._snapshot(effect, there, how, left * MIB)
        else:
            self._restore(effect, there, how)

    def _snapshot(self, effect: fx.RunSnapshot, there: list[Process], how: str, left: int) -> None:
        names = {"job": effect.job, "op": effect.op, "attempt": effect.attempt}
        moved = there if how == "ok" else there[:1] if how in ("half", "silent") else []
        for process in moved:
            process.parked = True
            self.device.residual[process.pid] = left if how == "ok" else 0
        if how == "ok" and there:
            if all(p.parked for p in self.device.of(effect.job)):
                self.device.extra[effect.job] = 0
            size, stays = sum(p.bytes for p in moved), left * len(moved)
            self._answer(
                ev.SnapshotSucceeded(at=self.tick(), bytes=size, residual=stays, seconds=0.1, **names)
            )
        elif how != "silent":
            busy, no_room = how == "busy", how == "no_room"
            self._answer(ev.SnapshotFailed(at=self.tick(), reason=how, busy=busy, no_room=no_room, **names))

    def _restore(self, effect: fx.RunRestore, there: list[Process], how: str) -> None:
        names = {"job": effect.job, "op": effect.op, "attempt": effect.attempt}
        self.device.check_room(effect.job)
        for process in there if how == "ok" else there[:1] if how in ("half", "silent") else []:
            process.parked = False
        if how == "ok" and there:
            size = sum(p.bytes for p in there)
            self._answer(ev.RestoreSucceeded(at=self.tick(), bytes=size, seconds=0.1, **names))
        elif how != "silent":
            self._answer(ev.RestoreFailed(at=self.tick(), reason=how, lost=how == "lost", **names))

    def _answer(self, event: ev.NodeEvent) -> None:
        self.answers.append(event)
        self.hear(event)

    # ── time, and the agent's own death ──

    def wake(self) -> None:
        self.at = max(self.at, next_deadline(self.holdings) or 0.0)
        self.hear(ev.DeadlinePassed(at=self.at))

    def restart(self) -> None:
        """The agent comes back from its store on a new clock, finds who died, and waits for the others."""
        stored = msgspec.json.decode(msgspec.json.encode(self.holdings), type=Holdings)
        assert stored == self.holdings
        self.at, self.asked, self.kills = 0.0, None, []
        self.answers.clear()
        self.holdings = restarted(stored, self.at)
        self.carry_out(resume(self.holdings))
        alive = {p.member for p in self.device.alive.values()}
        told = {e.member for e in self.news if isinstance(e, ev.MemberGone)}
        self.news = [e for e in self.news if not isinstance(e, ev.JobKilled)]
        for context in self.holdings.contexts:
            for member in context.members:
                if member.id not in alive | told:
                    self.news.append(ev.MemberGone(at=0.0, job=context.job, member=member.id, reason="gone"))

    def settle_one(self) -> bool:
        """One thing that happens by itself when nothing fails; False if there is none."""
        if self.asked is not None:
            self.backend()
        elif self.kills:
            self.finish_kill()
        elif self.news:
            self.learn()
        elif unseen := self.unseen():
            self.register(unseen[0])
        elif self.holdings.running is not None:
            self.wake()
        else:
            return False
        return True

    # ── what must be true ──

    def check(self) -> None:
        assert self.device.total() <= BUDGET
        said = {c.job: c.state for c in facts(self.holdings).contexts}
        for context in self.holdings.contexts:
            known = {m.id for m in context.members}
            mine = [p for p in self.device.of(context.job) if p.member in known]
            if said[context.job] is ContextState.LIVE:
                assert not any(p.parked for p in mine), "it may be granted without a command"
            if said[context.job] is ContextState.SAVED:
                assert all(p.parked for p in mine)
        known = {m.id for c in self.holdings.contexts for m in c.members}
        for process in self.device.alive.values():
            if process.member not in known:
                found = find(self.holdings, process.job)
                assert found is not None
                assert isinstance(found.place, Lost), f"{process.member} is forgotten without a word"
