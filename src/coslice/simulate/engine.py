"""The clock: one heap of what is to happen, one inbox of events for the locks. Deterministic for a seed.

Called by ``simulate``. An event posted while a step is being carried out is heard after it, as by the driver.
"""

import random
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import GroupRules
from coslice.core.ids import JobId, SessionId
from coslice.runtime.journal import Journal
from coslice.simulate.gate import Gate
from coslice.simulate.jobs import Loop, Run
from coslice.simulate.lock import Lock
from coslice.simulate.spec import Scenario, check

Progress = Callable[[float], None]


class Engine:
    def __init__(
        self,
        scenario: Scenario,
        *,
        journal: Journal | None = None,
        judge: bool = False,
        gate: Gate | None = None,
    ) -> None:
        check(scenario)
        self.scenario, self.cost = scenario, scenario.cost
        self.journal, self.judge, self.gate = journal, judge, gate
        self.now = 0.0
        self.core_steps = self.node_steps = self.rejected = 0
        self.wall_s = 0.0
        self._dice = random.Random(scenario.seed)
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = 0
        self.inbox: deque[tuple[Lock, ev.GroupEvent]] = deque()
        self.draining = False
        self.stirred: list[Lock] = []
        """Locks that heard something since their deadlines were last looked at: once in an instant."""
        rules = GroupRules(max_hold=scenario.max_hold, on_overrun=scenario.on_overrun)
        self.locks = {pool.name: Lock(self, pool, scenario.policy, rules) for pool in scenario.pools}
        self.runs = {JobId(job.name): Run(self, job) for job in scenario.jobs}
        self.loops: dict[SessionId, Loop] = {}
        """Who speaks on which session, of the latest start of each job."""
        self._here = len(scenario.jobs)
        if gate is not None:
            gate.start(self)

    # ── time ──

    def later(self, at: float, act: Callable[[Any], None], what: Any) -> None:
        self._order = order = self._order + 1
        heappush(self._heap, (at, order, act, what))

    def run(self, progress: Progress | None = None) -> None:
        """To the end of the scenario. ``progress`` hears the virtual time about twice a second."""
        begun = time.perf_counter()
        until = self.scenario.until or float("inf")
        for lock in self.locks.values():
            for node in lock.nodes.values():
                node.attach()
        for run in self.runs.values():
            self.later(run.arrival, self._arrive, run)
        self._plan_faults()
        heap, stirred, said, count = self._heap, self.stirred, begun, 0
        while True:
            if stirred:
                for lock in stirred:
                    lock.arm()
                stirred.clear()
            if not heap or heap[0][0] > until or not self._here:
                break
            self.now, _, act, what = heappop(heap)
            act(what)
            if progress is not None:
                count += 1
                if not count % 4096 and time.perf_counter() - said > 0.5:
                    said = time.perf_counter()
                    progress(self.now)
        if self.scenario.until and self._here:
            self.now = self.scenario.until
        for run in self.runs.values():
            for loop in run.loops:
                loop.close()
        for lock in self.locks.values():
            lock.close()
        self.wall_s = time.perf_counter() - begun

    # ── jobs ──

    def _arrive(self, run: Run) -> None:
        if run.left or run.running:
            return
        run.start()

    def still_asks(self, event: ev.AcquireRequested) -> bool:
        """Does whoever sent this request still wait for its answer?"""
        loop = self._loop(event.session)
        return loop is not None and loop.awaits == event.request

    def dismiss(self, job: JobId) -> None:
        """It is not let in, and goes for good."""
        run = self.runs[job]
        if run.running:
            run.leave()
            self.left(run)

    def left(self, run: Run) -> None:
        self._here -= 1

    def granted(self, lock: Lock, grant: fx.Grant) -> None:
        loop = self._loop(grant.session)
        if loop is not None and loop.epoch is None:
            loop.granted(lock, grant.request, grant.epoch)

    def refused(self, refusal: fx.Refuse) -> None:
        """The job is started again, later."""
        loop = self._loop(refusal.session)
        if loop is not None:
            self.kill(loop.job.name)

    def lost(self, lock: Lock, lost: fx.LoseLease) -> None:
        loop = self._loop(lost.session)
        if loop is not None and loop.epoch == lost.epoch and loop.lock is lock:
            loop.interrupted()

    def _loop(self, session: SessionId) -> Loop | None:
        """Who speaks on that session now; a session of an earlier start has nobody."""
        loop = self.loops.get(session)
        return loop if loop is not None and loop.job.running else None

    # ── faults ──

    def fails(self) -> bool:
        share = self.scenario.faults.failed_moves
        return share > 0 and self._dice.random() < share

    def kill(self, job: JobId) -> None:
        run = self.runs[job]
        if run.running:
            run.die()
            self.later(self.now + self.scenario.faults.restart_s, self._arrive, run)

    def _plan_faults(self) -> None:
        faults = self.scenario.faults
        if faults.crashes:
            for run in self.runs.values():
                self.later(run.arrival + self._gap(faults.crashes), self._crash, run)
        if faults.outages:
            for lock in self.locks.values():
                for node in lock.nodes.values():
                    self.later(self._gap(faults.outages), self._outage, node)

    def _gap(self, per_hour: float) -> float:
        return self._dice.expovariate(per_hour / 3600)

    def _crash(self, run: Run) -> None:
        if not run.left:
            self.kill(run.name)
            self.later(self.now + self._gap(self.scenario.faults.crashes), self._crash, run)

    def _outage(self, node: Any) -> None:
        if node.attached:
            node.detach()
            self.later(self.now + self.scenario.faults.outage_s, lambda _: node.attach(), None)
        self.later(self.now + self._gap(self.scenario.faults.outages), self._outage, node)
