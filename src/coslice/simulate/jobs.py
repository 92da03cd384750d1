"""A job on the virtual clock: its loops go through their phases, ask, compute, yield, and remember."""

from typing import TYPE_CHECKING

from coslice.core import events as ev
from coslice.core.ids import Epoch, Incarnation, JobId, RequestId, SessionId
from coslice.simulate.spec import Job, Phase

if TYPE_CHECKING:
    from coslice.simulate.engine import Engine
    from coslice.simulate.lock import Lock


class Run:
    """All that happens to one job."""

    __slots__ = (
        "arrival",
        "begun",
        "busy",
        "ends",
        "engine",
        "incarnation",
        "left",
        "loops",
        "made",
        "name",
        "need",
        "registered",
        "size",
        "spec",
        "starts",
        "taken",
        "waits",
    )  # fmt: skip

    def __init__(self, engine: "Engine", spec: Job) -> None:
        self.engine, self.spec = engine, spec
        self.name, self.size, self.need = JobId(spec.name), spec.bytes, spec.need
        self.starts = 0
        self.incarnation = Incarnation("")
        self.arrival = spec.arrival
        self.ends: list[float] = []
        self.waits: list[float] = []
        self.busy: dict[str, float] = {}
        """Seconds of computing within the window of the figures, by group."""
        self.made = self.taken = 0
        self.left = False
        self.registered: set[str] = set()
        main = Loop(self, spec.loop, "main")
        self.loops = (main, Loop(self, spec.produce, "produce")) if spec.produce else (main,)

    def start(self) -> None:
        """The job's processes begin, at first or again after a crash."""
        self.starts += 1
        self.incarnation = Incarnation(f"{self.name}-{self.starts}")
        self.registered.clear()
        for loop in self.loops:
            loop.session = SessionId(f"{self.name}/{self.starts}/{loop.name}")
            loop.next_phase()

    def die(self) -> None:
        """Every process is gone at once; its streams break, and its agents see it exit."""
        engine = self.engine
        self.incarnation, old = Incarnation(""), self.incarnation
        for loop in self.loops:
            loop.stop()
            for lock in engine.locks_of(self.spec):
                lock.post(ev.SessionLost(at=engine.now, session=loop.session))
        self._leave_nodes(old)

    def leave(self) -> None:
        """The training is done."""
        engine = self.engine
        self.left = True
        for loop in self.loops:
            loop.stop()
            for lock in engine.locks_of(self.spec):
                lock.post(ev.SessionClosed(at=engine.now, session=loop.session))
        self._leave_nodes(self.incarnation)

    def _leave_nodes(self, incarnation: Incarnation) -> None:
        for name in sorted(self.registered):
            for node in self.engine.locks[name].nodes.values():
                node.gone(self.name, incarnation)

    # ── batches ──

    def may_make(self) -> bool:
        return self.made - self.taken < self.spec.ahead

    def finished_pass(self, loop: "Loop") -> None:
        if loop is not self.loops[0]:
            self.made += 1
            self.loops[0].wake()
            return
        self.ends.append(self.engine.now)
        if self.spec.steps and len(self.ends) >= self.spec.steps:
            self.leave()
            self.engine.left(self)


class Loop:
    """One process of a job. ``token`` changes whenever what it waits for is no longer wanted."""

    __slots__ = ("asked", "began", "count", "epoch", "idle", "index", "job", "lock", "mid", "name", "phases",
                 "session", "step", "token")  # fmt: skip

    def __init__(self, job: Run, phases: tuple[Phase, ...], name: str) -> None:
        self.job, self.phases, self.name = job, phases, name
        self.session = SessionId("")
        self.index = self.step = self.count = self.token = 0
        self.asked = self.began = 0.0
        self.epoch: Epoch | None = None
        self.lock: Lock | None = None
        self.idle = False
        """Waits for a batch, or for room for one."""
        self.mid = False
        """Within a pass."""

    def next_phase(self) -> None:
        job, engine = self.job, self.job.engine
        if not self.mid and len(job.loops) == 2:
            if self is job.loops[0]:
                if job.made <= job.taken:
                    self.idle = True
                    return
                job.taken += 1
                job.loops[1].wake()
            elif not job.may_make():
                self.idle = True
                return
        self.mid = True
        phase = self.phases[self.index]
        if not phase.group:
            self._run(phase)
            return
        self.lock = engine.locks[phase.group]
        self.asked = engine.now
        self.count += 1
        self.lock.post(
            ev.AcquireRequested(
                at=engine.now,
                job=job.name,
                incarnation=job.incarnation,
                session=self.session,
                request=RequestId(f"{self.session}/{self.count}"),
                need=job.need,
                phase=phase.name,
            )
        )

    def wake(self) -> None:
        if self.idle:
            self.idle = False
            self.next_phase()

    def granted(self, lock: "Lock", request: RequestId, epoch: Epoch) -> None:
        job, engine = self.job, self.job.engine
        self.epoch = epoch
        if engine.now >= engine.scenario.warmup:
            job.waits.append(engine.now - self.asked)
        lock.post(ev.GrantConfirmed(at=engine.now, request=request))
        if lock.name not in job.registered:
            job.registered.add(lock.name)
            for node in lock.nodes.values():
                node.register(job.name, job.incarnation, job.size, job.need)
        self._run(self.phases[self.index])

    def _run(self, phase: Phase) -> None:
        engine = self.job.engine
        self.began = engine.now
        self.token += 1
        seconds = phase.seconds[self.step % len(phase.seconds)]
        engine.later(engine.now + seconds, self._done, self.token)

    def _done(self, token: int) -> None:
        if token != self.token:
            return
        job, engine = self.job, self.job.engine
        lock, epoch = self.lock, self.epoch
        if lock is not None and epoch is not None:
            self._computed(lock)
            self.lock, self.epoch = None, None
            lock.post(ev.LeaseYielded(at=engine.now, job=job.name, session=self.session, epoch=epoch))
        self.index += 1
        if self.index == len(self.phases):
            self.index = 0
            self.step += 1
            self.mid = False
            job.finished_pass(self)
        if not job.left and self.token == token:
            self.next_phase()

    def _computed(self, lock: "Lock") -> None:
        engine = self.job.engine
        seconds = engine.now - max(self.began, engine.scenario.warmup)
        if seconds > 0:
            self.job.busy[lock.name] = self.job.busy.get(lock.name, 0.0) + seconds
            lock.busy_s += seconds

    def stop(self) -> None:
        """Whatever it did is cut off; the present pass begins again when it is started."""
        if self.epoch is not None and self.lock is not None:
            self._computed(self.lock)
        if self.mid and self is self.job.loops[0] and len(self.job.loops) == 2:
            self.job.taken -= 1
        self.token += 1
        self.index, self.lock, self.epoch, self.idle, self.mid = 0, None, None, False, False

    def interrupted(self) -> None:
        """The lease was taken away: what was computed is lost, the phase is asked for again."""
        self.token += 1
        self.lock, self.epoch = None, None
        self.next_phase()

    def close(self) -> None:
        """The end of the simulation."""
        if self.epoch is not None and self.lock is not None:
            self._computed(self.lock)
