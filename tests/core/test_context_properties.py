"""Random histories of one node against a device that keeps the truth.

The device knows where every process's state really is and how much room there is. A restore without room
for all that the job ever used, or onto a device whose last eviction failed, fails the test at once.
"""

from dataclasses import dataclass, field

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.context import Holdings, NodeRules, facts, find, next_deadline, restarted, resume, step
from coslice.core.events import ContextState
from coslice.core.holdings import Live, Lost, Saved, occupies, taken
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, MemberId, NodeId, OpId
from coslice.core.invariants_node import violations_of_step
from coslice.core.outcome import Rejected

MIB = 1 << 20
BUDGET = 100 * MIB
JOBS = tuple(JobId(j) for j in ("a", "b", "c"))
SIZES = st.integers(0, 60).map(lambda n: n * MIB)


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

    def total(self) -> int:
        left = sum(n for pid, n in self.residual.items() if pid in self.alive and self.alive[pid].parked)
        return sum(self.used(j) for j in JOBS) + left

    def check_room(self, job: JobId) -> None:
        own = sum(n for pid, n in self.residual.items() if pid in self.alive and self.alive[pid].job == job)
        need = max(self.appetite.get(job, 0), sum(p.bytes for p in self.of(job)))
        beside = self.total() - self.used(job) - own
        assert beside + need <= BUDGET, f"restore of {job} poisons it: {need} beside {beside}"


class NodeMachine(RuleBasedStateMachine):
    rules_of_node = NodeRules(retries=1, stuck_grace=10.0)

    def __init__(self) -> None:
        super().__init__()
        self.device = Device()
        self.holdings = Holdings(
            group=GroupId("g"), node=NodeId("n"), device_budget=BUDGET, rules=self.rules_of_node
        )
        self.at = 0.0
        self.pids = 0
        self.epoch = 0
        self.commands: list[ev.MakeResidentCommanded] = []
        self.asked: fx.RunSnapshot | fx.RunRestore | None = None
        self.members_asked: tuple[MemberId, ...] = ()
        self.kills: list[JobId] = []
        self.news: list[ev.NodeEvent] = []
        self.answers: list[ev.NodeEvent] = []
        self.reports: dict[OpId, fx.ReportDone | fx.ReportFailed] = {}
        self.calm = False

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

    # ── processes ──

    @rule(job=st.sampled_from(JOBS), size=SIZES, parked=st.booleans())
    def begins(self, job: JobId, size: int, parked: bool) -> None:
        quiet = self.holdings.running is None
        if not parked and (not quiet or size > self.room()):
            return  # a real device would refuse, and nobody allocates during a swap
        others = self.device.of(job)
        if len(others) > 1 or (others and any(p.parked != parked for p in others)):
            return
        self.pids += 1
        start = others[0].incarnation if others else Incarnation(f"i{self.pids}")
        process = Process(self.pids, job, start, size, parked)
        if not others:
            self.device.extra[job] = self.device.appetite[job] = 0
        self.device.alive[process.pid] = process
        if not self.register(process):
            del self.device.alive[process.pid]

    def room(self) -> int:
        """What may be allocated. A half-moved job may yet come in as a whole, so its room is left free."""
        half = [c for c in self.holdings.contexts if c.place != Live() and occupies(c)]
        coming = sum(max(0, taken(self.holdings, c) - self.device.used(c.job)) for c in half)
        return BUDGET - self.device.total() - coming

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

    @precondition(lambda self: self.device.alive)
    @rule(data=st.data())
    def reconnects(self, data: st.DataObject) -> None:
        context_of = self.device.alive[data.draw(st.sampled_from(sorted(self.device.alive)))]
        found = find(self.holdings, context_of.job)
        if found is not None and isinstance(found.place, Lost):
            return  # a process whose state was lost does not claim to have it
        self.register(context_of)

    @precondition(lambda self: self.device.alive)
    @rule(data=st.data())
    def dies(self, data: st.DataObject) -> None:
        self.bury(data.draw(st.sampled_from(sorted(self.device.alive))))

    def bury(self, pid: int) -> None:
        process = self.device.alive.pop(pid)
        self.news.append(ev.MemberGone(at=0.0, job=process.job, member=process.member, reason="it exited"))

    @precondition(lambda self: self.holdings.running is None)
    @rule(job=st.sampled_from(JOBS), size=SIZES)
    def grows(self, job: JobId, size: int) -> None:
        """A job uses more for a while, as far as the device allows, and is measured."""
        if ContextState.LIVE not in (c.state for c in facts(self.holdings).contexts if c.job == job):
            return  # only who may hold the lock computes
        self.device.extra[job] = max(0, min(size, self.device.extra[job] + self.room()))
        use = self.device.used(job)
        self.device.appetite[job] = max(use, self.device.appetite[job])
        self.hear(ev.UsageMeasured(at=self.tick(), job=job, bytes=use))

    @precondition(lambda self: self.news)
    @rule(data=st.data())
    def news_arrives(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.news) - 1))
        self.hear(msgspec.structs.replace(self.news.pop(index), at=self.tick()))

    @precondition(lambda self: self.kills)
    @rule()
    def kill_takes_effect(self) -> None:
        job = self.kills.pop()
        dead = self.device.of(job)
        for process in dead:
            self.bury(process.pid)
        if dead:
            start = dead[0].incarnation
            self.news.append(ev.JobKilled(at=0.0, job=job, reason="killed", incarnation=start))

    # ── commands ──

    @rule(job=st.sampled_from(JOBS), need=SIZES)
    def command(self, job: JobId, need: int) -> None:
        self.epoch += 1
        op = OpId(f"g/{self.epoch}/n")
        event = ev.MakeResidentCommanded(at=self.tick(), op=op, epoch=Epoch(self.epoch), job=job, need=need)
        self.commands.append(event)
        self.hear(event)

    @precondition(lambda self: self.commands)
    @rule(data=st.data())
    def command_again(self, data: st.DataObject) -> None:
        """The wire repeats an old command, or a new one."""
        old = data.draw(st.sampled_from(self.commands))
        self.hear(msgspec.structs.replace(old, at=self.tick()))

    @rule(job=st.sampled_from(JOBS))
    def forget(self, job: JobId) -> None:
        self.hear(ev.JobForgotten(at=self.tick(), job=job))

    # ── the backend ──

    @precondition(lambda self: self.asked is not None)
    @rule(
        how=st.sampled_from(["ok", "ok", "fails", "half", "busy", "lost", "no_room", "silent"]),
        data=st.data(),
    )
    def backend(self, how: str, data: st.DataObject) -> None:
        effect, self.asked = self.asked, None
        assert effect is not None
        there = [p for p in self.device.of(effect.job) if p.member in self.members_asked]
        if isinstance(effect, fx.RunSnapshot):
            self.snapshot(effect, there, how, data.draw(st.integers(0, 3)))
        else:
            self.restore(effect, there, how)

    def snapshot(self, effect: fx.RunSnapshot, there: list[Process], how: str, left: int) -> None:
        job, op, attempt = effect.job, effect.op, effect.attempt
        moved = there if how == "ok" else there[:1] if how in ("half", "silent") else []
        for process in moved:
            process.parked = True
            self.device.residual[process.pid] = left * MIB if how == "ok" else 0
        if how == "silent":
            return
        if how == "ok" and there:
            self.device.extra[job] = (
                0 if all(p.parked for p in self.device.of(job)) else self.device.extra[job]
            )
            self.answer(
                ev.SnapshotSucceeded(
                    at=self.tick(),
                    job=job,
                    op=op,
                    bytes=sum(p.bytes for p in moved),
                    residual=left * MIB * len(moved),
                    seconds=0.1,
                    attempt=attempt,
                )
            )
        else:
            busy, no_room = how == "busy", how == "no_room"
            self.answer(
                ev.SnapshotFailed(
                    at=self.tick(), job=job, op=op, reason=how, busy=busy, no_room=no_room, attempt=attempt
                )
            )

    def restore(self, effect: fx.RunRestore, there: list[Process], how: str) -> None:
        job, op, attempt = effect.job, effect.op, effect.attempt
        self.device.check_room(job)
        for process in there if how == "ok" else there[:1] if how in ("half", "silent") else []:
            process.parked = False
            assert self.device.total() <= BUDGET
        if how == "silent":
            return
        if how == "ok" and there:
            size = sum(p.bytes for p in there)
            self.answer(
                ev.RestoreSucceeded(at=self.tick(), job=job, op=op, bytes=size, seconds=0.1, attempt=attempt)
            )
        else:
            lost = how == "lost"
            self.answer(
                ev.RestoreFailed(at=self.tick(), job=job, op=op, reason=how, lost=lost, attempt=attempt)
            )

    def answer(self, event: ev.NodeEvent) -> None:
        self.answers.append(event)
        self.hear(event)

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def answer_again(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(self.answers))
        before = self.holdings
        self.hear(msgspec.structs.replace(old, at=self.tick()))
        assert self.holdings == before, "an answer counts once"

    # ── time, and the agent's own death ──

    @rule()
    def deadline(self) -> None:
        self.at = max(self.at, next_deadline(self.holdings) or 0.0)
        self.hear(ev.DeadlinePassed(at=self.at))

    @rule()
    def agent_restarts(self) -> None:
        """It comes back from its store on a new clock, finds who died meanwhile, and waits for the others."""
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

    # ── what must be true ──

    @invariant()
    def device_is_never_over_its_budget(self) -> None:
        assert self.device.total() <= BUDGET

    @invariant()
    def belief_agrees_with_the_truth(self) -> None:
        said = {c.job: c.state for c in facts(self.holdings).contexts}
        for context in self.holdings.contexts:
            known = {m.id for m in context.members}
            mine = [p for p in self.device.of(context.job) if p.member in known]
            if said[context.job] is ContextState.LIVE:
                assert not any(p.parked for p in mine), "it may be granted without a command"
            if said[context.job] is ContextState.SAVED:
                assert all(p.parked for p in mine)

    @invariant()
    def every_saved_state_is_kept_or_reported_lost(self) -> None:
        known = {m.id for c in self.holdings.contexts for m in c.members}
        for process in self.device.alive.values():
            if process.member not in known:
                found = find(self.holdings, process.job)
                assert found is not None
                assert isinstance(found.place, Lost), f"{process.member} is forgotten without a word"

    def teardown(self) -> None:
        """Once nothing fails any more, the last command is answered and nothing is left hanging."""
        for _ in range(200):
            if self.asked is not None:
                effect, self.asked = self.asked, None
                there = [p for p in self.device.of(effect.job) if p.member in self.members_asked]
                if isinstance(effect, fx.RunSnapshot):
                    self.snapshot(effect, there, "ok", 0)
                else:
                    self.restore(effect, there, "ok")
            elif self.kills:
                self.kill_takes_effect()
            elif self.news:
                self.hear(msgspec.structs.replace(self.news.pop(0), at=self.tick()))
            elif unseen := self.unseen():
                self.register(unseen[0])
            elif self.holdings.running is not None:
                self.deadline()
            else:
                break
        assert self.holdings.running is None, "the operation never ended"
        if self.commands:
            assert self.commands[-1].op in self.reports

    def unseen(self) -> list[Process]:
        silent = {m.id for c in self.holdings.contexts for m in c.members if not m.seen}
        return [p for p in self.device.alive.values() if p.member in silent]


class WaitingNodeMachine(NodeMachine):
    """The same with ``on_stuck: wait``: nobody is killed."""

    rules_of_node = NodeRules(retries=1, on_stuck="wait", room_wait=1.0)

    @invariant()
    def nobody_is_killed(self) -> None:
        assert not self.kills


SETTINGS = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)
TestNode = NodeMachine.TestCase
TestNode.settings = SETTINGS
TestWaitingNode = WaitingNodeMachine.TestCase
TestWaitingNode.settings = SETTINGS
