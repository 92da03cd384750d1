"""A job on the virtual clock: its loops go through their stretches, ask, compute, yield, and remember.

A closed job has one loop. A buffered one has a second that makes batches: a ``Maker`` if that takes no
accelerators of ours, else another ``Loop``.
"""

import math
from typing import TYPE_CHECKING

from coslice.core import events as ev
from coslice.core.ids import Epoch, Incarnation, JobId, RequestId, SessionId
from coslice.simulate.solo import Solo, alone
from coslice.simulate.spec import UNCHANGED, Job, Pass, Scale, groups_of, seconds

if TYPE_CHECKING:
    from coslice.simulate.engine import Engine
    from coslice.simulate.lock import Lock


class Run:
    """All that happens to one job."""

    __slots__ = (
        "arrival",
        "busy",
        "ends",
        "engine",
        "groups",
        "incarnation",
        "left",
        "loops",
        "made",
        "maker",
        "name",
        "registered",
        "running",
        "spec",
        "starts",
        "waits",
        "whole",
    )  # fmt: skip

    def __init__(self, engine: "Engine", spec: Job) -> None:
        self.engine, self.spec = engine, spec
        self.name, self.arrival, self.groups = JobId(spec.name), spec.arrival, groups_of(spec)
        self.starts, self.incarnation = 0, Incarnation("")
        self.ends: list[float] = []
        """When each step was finished."""
        self.waits: list[float] = []
        self.busy: dict[str, float] = {}
        """Seconds of computing within the window of the figures, by group."""
        self.left = self.running = False
        self.registered: set[str] = set()
        self.made, self.whole = 0, int(spec.staleness)
        self.loops = [Loop(self, spec.loop, "main")]
        self.maker: Maker | Loop | None = None
        if any(part.group for one in spec.produce for part in one):
            self.maker = Loop(self, spec.produce, "produce")
            self.loops.append(self.maker)
        elif spec.produce:
            self.maker = Maker(self)

    def start(self) -> None:
        """The job's processes begin, at first or again after a crash."""
        self.starts += 1
        self.running = True
        self.incarnation = Incarnation(f"{self.name}-{self.starts}")
        self.registered.clear()
        for loop in self.loops:
            speakers = self.engine.loops
            speakers.pop(loop.session, None)
            loop.session = SessionId(f"{self.name}/{self.starts}/{loop.name}")
            speakers[loop.session] = loop
            loop.go_on()
        if isinstance(self.maker, Maker):
            self.maker.go_on()

    def die(self) -> None:
        """Every process is gone at once; its streams break, and its agents see it exit."""
        self._stop(ev.SessionLost)

    def leave(self) -> None:
        """The training is done."""
        self.left = True
        self._stop(ev.SessionClosed)

    def _stop(self, how: type[ev.SessionLost] | type[ev.SessionClosed]) -> None:
        engine, old = self.engine, self.incarnation
        self.running, self.incarnation = False, Incarnation("")
        if isinstance(self.maker, Maker):
            self.maker.stop()
        for loop in self.loops:
            loop.stop()
            for group in self.groups:
                engine.locks[group].post(how(at=engine.now, session=loop.session))
        for name in sorted(self.registered):
            for node in engine.locks[name].nodes.values():
                node.gone(self.name, old)

    def alone(self) -> Solo:
        """The steps that it finished (one at least), as they would have gone alone."""
        passes, maker = self.loops[0].scales, self.maker
        return alone(
            self.spec,
            max(1, len(self.ends)),
            passes=passes,
            batches=maker.scales if maker is not None else (),
        )

    # ── batches ──

    def may_begin(self, loop: "Loop") -> bool:
        """May it begin another pass now?"""
        if self.maker is None:
            return True
        if loop is self.maker:
            return self.made - len(self.ends) <= self.whole
        return self.made > len(self.ends)

    def finished_pass(self, loop: "Loop") -> None:
        if loop is self.maker:
            self.batch_made()
            return
        self.ends.append(self.engine.now)
        if self.spec.steps and len(self.ends) >= self.spec.steps:
            self.leave()
            self.engine.left(self)
        elif self.maker is not None:
            self.maker.wake()

    def batch_made(self) -> None:
        self.made += 1
        self.loops[0].wake()


class Maker:
    """Makes batches on accelerators that nobody shares (``profile.cycle.Batches`` has the rule)."""

    __slots__ = ("done", "idle", "job", "part", "scales", "token")

    def __init__(self, job: Run) -> None:
        self.job, self.token, self.idle = job, 0, False
        self.part = job.spec.staleness - job.whole
        self.done = 0.0
        """The share of the present batch that is made."""
        self.scales: list[Scale] = []
        """Of every batch begun, if the job drifts."""

    def go_on(self) -> None:
        job = self.job
        ahead = job.made - len(job.ends) - job.whole
        share = 1.0 if ahead <= 0 else self.part if ahead == 1 else 0.0
        if share <= self.done:
            self.idle = True
            return
        make, scale = job.spec.produce[job.made % len(job.spec.produce)], UNCHANGED
        if job.spec.drift:
            if len(self.scales) <= job.made:
                self.scales.append(job.spec.scale(job.engine.now))
            scale = self.scales[job.made]
        self.token += 1
        job.engine.later(
            job.engine.now + (share - self.done) * seconds(make, scale), self._made, (self.token, share)
        )

    def _made(self, what: tuple[int, float]) -> None:
        token, share = what
        if token != self.token:
            return
        self.done = share
        if share == 1.0:
            self.done = 0.0
            self.job.batch_made()
        self.go_on()

    def wake(self) -> None:
        if self.idle:
            self.idle = False
            self.go_on()

    def stop(self) -> None:
        self.token += 1
        self.idle = False


class Loop:
    """One process of a job. ``token`` changes whenever what it waits for is no longer wanted."""

    __slots__ = (
        "asked",
        "began",
        "count",
        "epoch",
        "idle",
        "index",
        "job",
        "lock",
        "mid",
        "name",
        "parts",
        "passes",
        "scales",
        "session",
        "step",
        "token",
    )  # fmt: skip

    def __init__(self, job: Run, passes: tuple[Pass, ...], name: str) -> None:
        self.job, self.passes, self.name = job, passes, name
        self.parts = passes[0]
        """Of the present pass."""
        self.session = SessionId("")
        self.index = self.step = self.count = self.token = 0
        self.asked = self.began = 0.0
        self.epoch: Epoch | None = None
        self.lock: Lock | None = None
        """Whose lease it has, or has asked for."""
        self.idle = False
        """Waits for a batch, or for a step to be finished."""
        self.mid = False
        """Within a pass."""
        self.scales: list[Scale] = []
        """Of every pass begun, if the job drifts."""

    def go_on(self) -> None:
        job = self.job
        engine = job.engine
        if not self.mid:
            if job.maker is not None and not job.may_begin(self):
                self.idle = True
                return
            self.mid = True
        if job.spec.drift and len(self.scales) <= self.step:
            self.scales.append(job.spec.scale(engine.now))
        part = self.parts[self.index]
        if not part.group:
            self._run(part.seconds * (self.scales[self.step][1] if self.scales else 1.0))
            return
        self.lock, self.asked = engine.locks[part.group], engine.now
        self.count += 1
        if delay := engine.cost.message_s:
            engine.later(engine.now + delay, self._ask, self.token)
        else:
            self._ask(self.token)

    def _ask(self, token: int) -> None:
        job, lock = self.job, self.lock
        if token != self.token or lock is None:
            return  # it died on the way
        engine = job.engine
        event = ev.AcquireRequested(
            at=engine.now,
            job=job.name,
            incarnation=job.incarnation,
            session=self.session,
            request=self._request(),
            need=job.spec.need,
            phase=self.parts[self.index].name,
        )
        if engine.gate is None or engine.gate.asks(lock, event):
            lock.post(event)

    def _request(self) -> RequestId:
        return RequestId(f"{self.session}/{self.count}")

    @property
    def awaits(self) -> RequestId | None:
        """The request that it waits for; None while it does anything else."""
        return self._request() if self.lock is not None and self.epoch is None else None

    def wake(self) -> None:
        if self.idle:
            self.idle = False
            self.go_on()

    def granted(self, lock: "Lock", request: RequestId, epoch: Epoch) -> None:
        self.epoch, self.began = epoch, math.inf
        engine = self.job.engine
        if delay := engine.cost.message_s:
            engine.later(engine.now + delay, self._begin, (self.token, lock, request))
        else:
            self._begin((self.token, lock, request))

    def _begin(self, grant: tuple[int, "Lock", RequestId]) -> None:
        """The grant has arrived."""
        job = self.job
        engine = job.engine
        token, lock, request = grant
        if token != self.token:
            return
        if engine.now >= engine.scenario.warmup:
            job.waits.append(engine.now - self.asked)
        lock.post(ev.GrantConfirmed(at=engine.now, request=request))
        if lock.name not in job.registered:
            job.registered.add(lock.name)
            for node in lock.nodes.values():
                node.register(job.name, job.incarnation, job.spec.bytes, job.spec.need)
        self._run(self.parts[self.index].seconds * (self.scales[self.step][0] if self.scales else 1.0))

    def _run(self, length: float) -> None:
        engine = self.job.engine
        self.began = engine.now
        self.token += 1
        engine.later(engine.now + length, self._done, self.token)

    def _done(self, token: int) -> None:
        if token != self.token:
            return
        job = self.job
        lock, epoch = self.lock, self.epoch
        if lock is not None and epoch is not None:
            self.close()
            self.lock, self.epoch = None, None
            engine = job.engine
            if delay := engine.cost.message_s:
                engine.later(engine.now + delay, self._yield, (lock, self.session, epoch))
            else:
                self._yield((lock, self.session, epoch))
        self.index += 1
        if self.index == len(self.parts):
            self.index, self.mid = 0, False
            self.step += 1
            self.parts = self.passes[self.step % len(self.passes)]
            job.finished_pass(self)
        if job.running and self.token == token:
            self.go_on()

    def _yield(self, lease: tuple["Lock", SessionId, Epoch]) -> None:
        lock, session, epoch = lease
        lock.post(ev.LeaseYielded(at=self.job.engine.now, job=self.job.name, session=session, epoch=epoch))

    def close(self) -> None:
        """What it computed so far counts (within the window)."""
        if self.epoch is None or self.lock is None:
            return
        engine = self.job.engine
        begun, warm = self.began, engine.scenario.warmup
        spent = engine.now - (begun if begun > warm else warm)
        if spent > 0:
            self.job.busy[self.lock.name] = self.job.busy.get(self.lock.name, 0.0) + spent
            self.lock.busy_s += spent

    def stop(self) -> None:
        """Whatever it did is cut off; the present pass begins again when it is started again."""
        self.close()
        self.token += 1
        self.index, self.lock, self.epoch, self.idle, self.mid = 0, None, None, False, False

    def interrupted(self) -> None:
        """The lease was taken away: what was computed is lost, the stretch is asked for again."""
        self.token += 1
        self.lock, self.epoch = None, None
        self.go_on()
