"""One group on one imagined node: its real holdings, and the processes and moves around them.

It does what the agent's shell does (registrations, moves, kills, reports, coming back from the store), and
checks after every step that what the machine says is true of the device. It does not know the orchestrator:
what it wants to say is in ``out``.
"""

from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.context import Holdings, NodeRules, facts, find, next_deadline, restarted, resume, step
from coslice.core.events import ContextState
from coslice.core.holdings import Live, Lost, fits_beside, need_of, occupies, others, taken
from coslice.core.ids import GroupId, Incarnation, JobId, MemberId, NodeId
from coslice.core.invariants_node import violations_of_step
from coslice.core.outcome import Rejected, Step
from coslice.proof.device import MIB, Device, Process, Violation
from coslice.proof.story import Story
from coslice.proof.wire import Said

Move = fx.RunSnapshot | fx.RunRestore
NodeStep = Step[Holdings, fx.NodeEffect]
Watch = Callable[[Holdings, ev.NodeEvent, NodeStep], None]
SHOWN = ("a process is here", ContextState.LIVE)


class Served:
    """One group on one node."""

    __slots__ = (
        "_facts",
        "asked",
        "asked_of",
        "at",
        "device",
        "divisible",
        "due",
        "group",
        "holdings",
        "kills",
        "late",
        "name",
        "news",
        "out",
        "pids",
        "story",
        "whole",
    )

    def __init__(
        self,
        group: GroupId,
        node: NodeId,
        rules: NodeRules,
        capacity: int,
        story: Story,
        divisible: frozenset[JobId] = frozenset(),
        whole: frozenset[JobId] = frozenset(),
    ) -> None:
        """``divisible``: jobs that can move a part of their state; ``whole``: that can be frozen."""
        self.divisible, self.whole = divisible, whole
        self.group, self.story, self.name = group, story, f"{node}/{group}"
        self.holdings = Holdings(group=group, node=node, device_budget=capacity, rules=rules)
        self._facts = (self.holdings, facts(self.holdings))
        self.device = Device(capacity)
        self.at = 0.0
        self.due: float | None = None
        self.asked: Move | None = None
        self.asked_of: tuple[MemberId, ...] = ()
        self.late: tuple[Move, tuple[MemberId, ...]] | None = None
        """A move that nobody waits for any more, and that may come to its end all the same."""
        self.kills: list[JobId] = []
        self.news: list[ev.NodeEvent] = []
        """What the agent will learn of processes, in any order."""
        self.out: list[Said] = []
        self.pids = 0

    def copy(self) -> "Served":
        new = Served.__new__(Served)
        for name in Served.__slots__:
            setattr(new, name, getattr(self, name))
        new.device = self.device.copy()
        new.kills, new.news, new.out = self.kills.copy(), self.news.copy(), self.out.copy()
        return new

    def facts(self) -> ev.NodeFacts:
        """The machine's word on what is here."""
        if self._facts[0] is not self.holdings:
            self._facts = (self.holdings, facts(self.holdings))
        return self._facts[1]

    # ── the machine, and what its effects do ──

    def hear(self, event: ev.NodeEvent, *, done: int = 1_000_000) -> bool:
        """Step, save, and carry out the first ``done`` effects. False if the machine refused the event."""
        before = self.holdings
        try:
            taken = step(before, event)
        except Rejected as refusal:
            reason = fx.Reason(fx.ReasonCode.REFUSED, str(refusal))
            self.story.heard(self.at, self.name, event, (), (reason,))
            return False
        self.story.heard(self.at, self.name, event, taken.effects, taken.reasons)
        found = violations_of_step(before, event, taken)
        if found:
            raise Violation(f"{self.name}: {'; '.join(found)}")
        if taken.state.ended is not before.ended:
            self._check_ended(taken.state)
        self.holdings = taken.state
        self.due = next_deadline(self.holdings)
        self.carry_out(taken.effects[:done])
        return True

    def carry_out(self, effects: Iterable[fx.NodeEffect]) -> None:
        for effect in effects:
            match effect:
                case fx.RunSnapshot() | fx.RunRestore():
                    self._ask(effect)
                case fx.KillJob(job=job):
                    self.kills.append(job)
                case fx.ReportDone() | fx.ReportFailed():
                    self._report(effect)
                case fx.FreeBuffers():
                    self._free(effect)
                case fx.PushFacts():
                    said = ev.NodeReported(at=0.0, node=self.holdings.node, facts=self.facts())
                    self.out.append(Said(self.group, said))

    def _ask(self, effect: Move) -> None:
        if self.asked is not None:
            self.late = (self.asked, self.asked_of)
        context = find(self.holdings, effect.job)
        assert context is not None
        self.asked, self.asked_of = effect, tuple(m.id for m in context.members)
        if isinstance(effect, fx.RunRestore):
            self.device.check_room(effect.job, self.name)

    def _report(self, effect: fx.ReportDone | fx.ReportFailed) -> None:
        now, node = self.facts(), self.holdings.node
        if isinstance(effect, fx.ReportDone):
            done = ev.OpSucceeded(
                at=0.0,
                op=effect.op,
                node=node,
                restored=effect.restored,
                bytes_in=effect.bytes_in,
                bytes_out=effect.bytes_out,
                reason=effect.reason,
                facts=now,
            )
            self.out.append(Said(self.group, done))
            return
        failed = ev.OpFailed(
            at=0.0,
            op=effect.op,
            node=node,
            culprit=effect.culprit,
            reason=effect.reason,
            stuck=effect.stuck,
            pid=effect.pid,
            facts=now,
        )
        self.out.append(Said(self.group, failed))

    def _free(self, effect: fx.FreeBuffers) -> None:
        context = find(self.holdings, effect.job)
        for process in self.device.free_buffers(effect.members):
            if process.lost or context is None:
                continue
            if not isinstance(context.place, Lost) and any(m.id == process.member for m in context.members):
                raise Violation(f"6: {self.name} throws the saved state of {process.member} away")

    # ── processes ──

    def begin(
        self, job: JobId, size: int, *, parked: bool, start: Incarnation, own: int = 0
    ) -> Process | None:
        """A process of the job comes up and registers; None if it cannot. ``own``: the pid of a client."""
        if not self.device.of(job):
            self.device.extra[job] = self.device.appetite[job] = 0
        pid = own
        if not own:
            self.pids += 1
            pid = self.pids
        member = MemberId(f"{job}/{start}/{pid}/{pid}")
        process = Process(pid, job, start, size, member)
        if parked:
            self.device.move_out(process)
        self.device.alive[process.pid] = process
        self._ends_of_older(job, start)
        if not self.register(process):
            del self.device.alive[process.pid]
            return None
        return process

    def _ends_of_older(self, job: JobId, start: Incarnation) -> None:
        """An agent refuses another start while a process of the last one is not known to have ended, and
        hears of the end of those it killed in one moment."""
        for news in [e for e in self.news if isinstance(e, ev.MemberGone | ev.JobKilled) and e.job == job]:
            context = find(self.holdings, job)
            if isinstance(news, ev.JobKilled) or (context is not None and context.incarnation != start):
                self.learn(self.news.index(news))

    def register(self, process: Process) -> bool:
        """Says where its state is, once it has done whatever it was told before."""
        if self.late is not None and self.late[0].job == process.job:
            self.late = None
        whole = process.job in self.whole  # then it registers no bytes: what it has is measured
        taken = self.hear(
            ev.MemberRegistered(
                at=self.at,
                job=process.job,
                incarnation=process.incarnation,
                member=process.member,
                pid=process.pid,
                start_time=process.pid,
                bytes=0 if whole else process.bytes,
                parked=process.parked,
                part=process.away > 0,
                divisible=process.job in self.divisible and not whole,
                whole=whole,
            )
        )
        if taken and whole and not process.parked:
            self.hear(ev.UsageMeasured(at=self.at, job=process.job, bytes=self.device.used(process.job)))
        return taken

    def unseen(self) -> list[Process]:
        silent = {m.id for c in self.holdings.contexts for m in c.members if not m.seen}
        return [p for p in self.device.alive.values() if p.member in silent] if silent else []

    def room(self) -> int:
        """What may be allocated. A half-moved job may yet come in as a whole, so its room is left free."""
        half = [c for c in self.holdings.contexts if c.place != Live() and occupies(c)]
        coming = sum(max(0, taken(self.holdings, c) - self.device.used(c.job)) for c in half)
        return self.device.capacity - self.device.total() - coming

    def fits(self, job: JobId, size: int) -> bool:
        """Would the agent let a process without the lock keep that much on the device?"""
        held = self.holdings
        need = max(size + sum(p.bytes for p in self.device.of(job)), need_of(held, job, 0))
        return (
            held.running is None and fits_beside(held, job, need, others(held, job)) and size <= self.room()
        )

    def grow(self, job: JobId, size: int) -> None:
        """The job uses more for a while, as far as the device allows, and is measured."""
        device = self.device
        device.extra[job] = max(0, min(size, device.extra.get(job, 0) + self.room()))
        use = device.used(job)
        device.appetite[job] = max(use, device.appetite.get(job, 0))
        self.hear(ev.UsageMeasured(at=self.at, job=job, bytes=use))

    def own(self) -> list[Process]:
        """The clients' own processes."""
        return [p for p in self.device.alive.values() if p.own]

    def bury(self, pid: int, reason: str = "it exited") -> None:
        process = self.device.alive.pop(pid)
        self.device.residual.pop(pid, None)
        self.news.append(ev.MemberGone(at=0.0, job=process.job, member=process.member, reason=reason))

    def learn(self, index: int = 0) -> None:
        self.hear(replace(self.news.pop(index), at=self.at))

    def killed(self, job: JobId, reason: str) -> bool:
        """Its processes die by the agent's hand; what the agent learns of that comes in any order."""
        dead = self.device.of(job)
        for process in dead:
            self.bury(process.pid, reason)
        start = dead[0].incarnation if dead else Incarnation("")
        news = ev.JobKilled(at=self.at, job=job, reason=reason, incarnation=start)
        if dead:
            self.news.append(news)
        else:  # nobody to wait for
            self.hear(news)
        return bool(dead)

    # ── moves ──

    def finish(self, how: str = "ok", *, leaves: int = 0, inside: bool = False) -> None:
        """The move asked for last ends. ``inside``: the job's own code runs, so its state stays where it is.

        ``half`` and ``silent`` move some processes; ``silent`` is never answered. ``lying``: the process
        says that it is done and has freed nothing, which the agent sees by measuring.
        """
        effect, self.asked = self.asked, None
        assert effect is not None
        there = [p for p in self.device.of(effect.job) if p.member in self.asked_of]
        if isinstance(effect, fx.RunSnapshot):
            self._snapshot(effect, there, "busy" if inside else how, leaves)
        else:
            self._restore(effect, there, how)

    def finish_late(self, count: int, *, inside: bool) -> None:
        """A move that nobody waits for ends for the first ``count`` processes."""
        assert self.late is not None
        (effect, members), self.late = self.late, None
        there = [p for p in self.device.of(effect.job) if p.member in members][:count]
        if isinstance(effect, fx.RunSnapshot):
            self._move_out([] if inside else there, effect.least)
        else:
            self._move_in(there)

    def _snapshot(self, effect: fx.RunSnapshot, there: list[Process], how: str, leaves: int) -> None:
        op, job, attempt, device = effect.op, effect.job, effect.attempt, self.device
        moving = there if how == "ok" else there[:1] if how in ("half", "silent") else []
        size = self._move_out(moving, effect.least, leaves=leaves if how == "ok" else 0)
        if all(p.parked or p.away for p in device.of(job)):
            device.extra[job] = 0
        if how == "ok" and there:
            residual = sum(device.residual.get(p.pid, 0) if p.parked else p.bytes - p.away for p in there)
            done = ev.SnapshotSucceeded(
                at=self.at,
                job=job,
                op=op,
                attempt=attempt,
                bytes=size,
                residual=residual,
                seconds=0.1,
                partly=any(p.away for p in there),
            )
            self.hear(done)
        elif how != "silent":
            busy, no_room = how == "busy", how == "no_room"
            self.hear(
                ev.SnapshotFailed(
                    at=self.at, job=job, op=op, attempt=attempt, reason=how, busy=busy, no_room=no_room
                )
            )

    def _move_out(self, processes: list[Process], least: int, *, leaves: int = 0) -> int:
        """All of it, or its share of ``least`` from each process. Returns the bytes that moved."""
        before = sum(p.away for p in processes)
        total = sum(p.bytes - p.away for p in processes if not p.parked)
        if not least or least >= total:
            for process in processes:
                self.device.move_out(process, leaves=leaves)
            return sum(p.bytes for p in processes) - before
        for process in processes:
            share = -(-least * (process.bytes - process.away) // total)
            self.device.move_part_out(process, share)
        return sum(p.away or p.bytes for p in processes) - before

    def _restore(self, effect: fx.RunRestore, there: list[Process], how: str) -> None:
        op, job, attempt = effect.op, effect.job, effect.attempt
        size = sum(p.away or p.bytes for p in there)
        self._move_in(there if how == "ok" else there[:1] if how in ("half", "silent") else [])
        if how == "ok" and there:
            self.hear(
                ev.RestoreSucceeded(at=self.at, job=job, op=op, attempt=attempt, bytes=size, seconds=0.1)
            )
        elif how != "silent":
            lost = how == "lost"
            if lost:
                for process in there:
                    process.lost = True
            self.hear(ev.RestoreFailed(at=self.at, job=job, op=op, attempt=attempt, reason=how, lost=lost))

    def _move_in(self, processes: list[Process]) -> None:
        for process in processes:
            self.device.move_in(process, self.name)

    # ── time, death and return of the agent ──

    def wake(self) -> None:
        """``DeadlinePassed`` is due."""
        self.hear(ev.DeadlinePassed(at=self.at))
        if self.due is not None and self.due <= self.at:
            raise Violation(f"8: {self.name} has nothing to do at its deadline {self.due:.2f}")

    def crash(self) -> None:
        if self.asked is not None:
            self.late = (self.asked, self.asked_of)
        self.asked = None
        self.kills.clear()
        self.out.clear()

    def restart(self) -> None:
        """The agent is back from its store, on a new clock. Who died meanwhile, it finds out."""
        stored = msgspec.json.decode(msgspec.json.encode(self.holdings), type=Holdings)
        if stored != self.holdings:
            raise Violation(f"6: {self.name} does not come back from its store as it was")
        self.holdings = restarted(stored, self.at)
        self.due = next_deadline(self.holdings)
        self.carry_out(resume(self.holdings))
        self.news = [e for e in self.news if isinstance(e, ev.MemberGone)]
        told = {e.member for e in self.news if isinstance(e, ev.MemberGone)}
        alive = {p.member for p in self.device.alive.values()} | told
        for context in self.holdings.contexts:
            for member in context.members:
                if member.id not in alive:
                    gone = ev.MemberGone(at=0.0, job=context.job, member=member.id, reason="gone")
                    self.news.append(gone)

    # ── what must be true ──

    def check(self) -> None:
        device, total = self.device, self.device.total()
        if total > device.capacity:
            raise Violation(f"3: {self.name} uses {total // MIB} of {device.capacity // MIB} MiB")
        said = {c.job: c.state for c in self.facts().contexts}
        known: dict[MemberId, ContextState] = {}
        for context in self.holdings.contexts:
            for member in context.members:
                known[member.id] = said[context.job]
        for process in device.alive.values():
            self._check_process(process, known.get(process.member), said.get(process.job))

    def _check_ended(self, after: Holdings) -> None:
        for end in after.ended:
            if end.pid in self.device.alive:
                raise Violation(f"1: {self.name} says that process {end.pid} of {end.job} ended: it lives")

    def _check_process(self, process: Process, state: ContextState | None, said: ContextState | None) -> None:
        if state is ContextState.LIVE and (process.parked or process.away):
            raise Violation(f"2: {self.name} says {process.job} is loaded; {process.pid} is in host memory")
        if state is ContextState.SAVED and not process.parked:
            raise Violation(f"4: {self.name} says {process.job} is saved; {process.pid} is on the device")
        if state is None and said is not ContextState.LOST and not process.lost:
            raise Violation(f"6: {self.name} has forgotten {process.member} without a word")
        if (process.parked or process.away) and process.kept != process.content and not process.lost:
            reported = state is ContextState.LOST or (state is None and said is ContextState.LOST)
            if not reported:
                raise Violation(f"6: the state of {process.member} on {self.name} is nowhere, not even lost")
