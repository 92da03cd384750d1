"""What the lock of one group hears, as cycles of its jobs: how each would go alone, and how it went.

Fed with every event and what the core made of it, in the same place as the journal, so that nothing is
measured twice. Waits and swaps do not count into a job's own time, nor does a wait at the door because
admission queued it. Decides nothing; a few dictionary accesses an event."""

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from coslice.admission.drift import DriftTest
from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import Group, Held, Occupancy, Swapping, waiting
from coslice.core.ids import Epoch, Incarnation, JobId
from coslice.profile.cycle import cycles
from coslice.profile.holds import Hold, begins_cycle, pool_of
from coslice.profile.model import Pool, Profile, Source, quantile

KEEP = 64
"""Cycles kept of a job, the latest."""
KNOWN = 3
"""As many whole cycles and a job's profile is taken for what it does. The first, with all that is compiled
and loaded in it, never counts: nobody knows when its off-time began."""
ROLLING = 10
WAITED = 0.02
"""Of a cycle: a shorter off-time is no wait for a batch."""
SWAPS = 16


class Cycle(Struct, frozen=True):
    """One pass through a job's phases."""

    holds: tuple[Hold, ...]
    alone: float
    """Seconds that it takes without others."""
    shared: float
    """Seconds that it took, from the end of the cycle before; without those that it was queued."""

    @property
    def on(self) -> float:
        return sum(hold.on for hold in self.holds)

    @property
    def off(self) -> float:
        return sum(hold.off for hold in self.holds)


class _Turn(Struct, frozen=True):
    hold: Hold
    asked: float
    ended: float
    queued: float
    """Seconds of the wait before it that admission is to blame for."""


class Trail:
    """One incarnation of one job in this group. ``declared``: what it said that it would do."""

    def __init__(self, job: JobId, incarnation: Incarnation, declared: Pool | None = None) -> None:
        self.job, self.incarnation, self.declared = job, incarnation, declared
        self.staleness = declared.staleness if declared is not None else 0.0
        self.cycles: deque[Cycle] = deque(maxlen=KEEP)
        """Since the last drift."""
        self.seen = self.drifts = 0
        self.before: tuple[float, float] | None = None
        """(on, off) of a cycle before the last drift."""
        self.asked: tuple[float, str] | None = None
        self.left: float | None = None
        """When it yielded last."""
        self.at_door = False
        """Asked, and not let through to the lock yet."""
        self.queued = 0.0
        """Seconds at the door since it yielded last."""
        self._makes: deque[float] = deque(maxlen=KEEP)
        self._order: list[str] = []
        self._pending: list[_Turn] = []
        """Turns of the present cycle."""
        self._end: float | None = None
        """When the cycle before the present one ended."""
        self._test = self._fresh_test(declared)

    @property
    def known(self) -> bool:
        return len(self.cycles) >= KNOWN or self.declared is not None

    def rolling(self, last: int = ROLLING) -> float | None:
        """The slowdown over its last cycles; None before there are so many."""
        if len(self.cycles) < last:
            return None
        some = list(self.cycles)[-last:]
        alone = sum(cycle.alone for cycle in some)
        return sum(cycle.shared for cycle in some) / alone if alone > 0 else None

    def times(self) -> tuple[float, float]:
        """(on, off) of a cycle alone, on average; (0, 0): not known."""
        if len(self.cycles) >= KNOWN:
            on = _mean([cycle.on for cycle in self.cycles])
            return on, max(0.0, _mean([cycle.alone for cycle in self.cycles]) - on)
        pool = self.declared
        return (pool.busy.mean, pool.period.mean - pool.busy.mean) if pool is not None else (0.0, 0.0)

    def pool(self, name: str = "pool") -> Pool | None:
        """What it does, as measured; before that as declared."""
        if len(self.cycles) < KNOWN:
            return self.declared
        holds = [self._alone_holds(cycle.holds) for cycle in self.cycles]
        if not any(hold.on > 0 for cycle in holds for hold in cycle):
            return self.declared
        size = self.declared
        return pool_of(
            holds,
            name=name,
            staleness=self.staleness,
            accelerators=size.accelerators if size is not None else 0,
            nodes=size.nodes if size is not None else 1,
            state_bytes=size.state_bytes if size is not None else 0,
        )

    def profile(self) -> Profile | None:
        pool = self.pool()
        if pool is None:
            return None
        return Profile(name=self.job, pools=(pool,), source=Source(kind="journal"))

    def turn(self, hold: Hold, *, asked: float, ended: float) -> bool:
        """It yielded. True: that made clear that a cycle was over before it, and it has changed."""
        self._note_batch(hold, asked)
        drifted = False
        last = self._pending[-1].hold.phase if self._pending else None
        if begins_cycle(self._order, last, hold.phase) and self._pending:
            drifted = self._close()
        if hold.phase not in self._order:
            self._order.append(hold.phase)
        self._pending.append(_Turn(hold, asked, ended, self.queued))
        self.queued = 0.0
        return drifted

    def cut(self) -> None:
        """A turn ended in another way: the present cycle says nothing."""
        self._pending, self._end, self.left, self.queued = [], None, None, 0.0

    def _close(self) -> bool:
        pending, self._pending = self._pending, []
        before, end = self._end, pending[-1].ended
        self._end = end
        if before is None or any(turn.hold.off < 0 for turn in pending):
            return False
        holds = tuple([turn.hold for turn in pending])
        queued = sum([turn.queued for turn in pending])
        alone = sum([hold.on + hold.off for hold in self._alone_holds(holds)])
        cycle = Cycle(holds, alone, end - before - queued)
        self.cycles.append(cycle)
        self.seen += 1
        # A buffered job's wait for its batch depends on the others; how long one is made does not.
        off = self._make() if self.staleness else cycle.off
        since = self._test.see(cycle.on, off)
        if not since:
            return False
        kept = list(self.cycles)
        old = kept[:-since]
        if old:
            on = _mean([c.on for c in old])
            self.before = (on, max(0.0, _mean([c.alone for c in old]) - on))
        elif self.declared is not None:
            busy, period = self.declared.busy.mean, self.declared.period.mean
            self.before = (busy, period - busy)
        self.cycles = deque(kept[-since:], maxlen=KEEP)
        self._makes = deque(list(self._makes)[-since:], maxlen=KEEP)
        self.drifts += 1
        return True

    # ── buffered jobs ──

    def _note_batch(self, hold: Hold, asked: float) -> None:
        """A wait for a batch shows when it was complete. Who waited for the one before it as well knows how
        long it was made (``profile.cycle.Batches``): the gap, or less with a staleness below 1."""
        if not self.staleness or not self._pending or hold.phase != self._order[0]:
            return
        first = self._pending[0]
        gap = asked - first.asked
        if min(hold.off, first.hold.off) > WAITED * gap > 0:
            part = hold.off / (1.0 - self.staleness) if self.staleness < 1.0 else gap
            self._makes.append(min(part, gap))

    def _alone_holds(self, holds: tuple[Hold, ...]) -> tuple[Hold, ...]:
        """The same turns as the job would take them alone."""
        if not self.staleness or not holds:
            return holds
        make = self._make()
        first, rest = holds[0], holds[1:]
        busy = first.on + sum(hold.on + hold.off for hold in rest)
        wait = max(0.0, make - min(self.staleness * make, busy))
        return (Hold(first.phase, wait, first.on), *rest)

    def _make(self) -> float:
        """Seconds that a batch takes to make: measured, else declared."""
        if self._makes:
            return quantile(list(self._makes), 0.5)
        if self.declared is None:
            return 0.0
        made = cycles(self.declared, max(1, len(self.declared.period.samples)))
        return sum(cycle.make for cycle in made) / len(made)

    @staticmethod
    def _fresh_test(declared: Pool | None) -> DriftTest:
        if declared is None:
            return DriftTest()
        if declared.staleness:
            made = cycles(declared, max(1, len(declared.period.samples)))
            return DriftTest([(cycle.on, cycle.make) for cycle in made])
        times = zip(declared.busy.samples, declared.period.samples, strict=False)
        base = [(on, period - on) for on, period in times]
        if len(base) < 2:
            busy, period = declared.busy, declared.period
            base = [(busy.mean, period.mean - busy.mean)]
        return DriftTest(base)


class Watch:
    """One group."""

    def __init__(self) -> None:
        self.trails: dict[JobId, Trail] = {}
        self.swaps: deque[float] = deque(maxlen=SWAPS)
        """Seconds of the latest changes of hands."""
        self._held: tuple[JobId, Epoch, float] | None = None
        self._swap: tuple[Epoch, float] | None = None
        self._last: JobId | None = None
        self._seen: Occupancy | None = None

    @property
    def swap_s(self) -> float:
        """Seconds of a change of hands; 0: none was seen."""
        return quantile(list(self.swaps), 0.5) if self.swaps else 0.0

    def expect(self, job: JobId, incarnation: Incarnation, declared: Pool | None = None) -> Trail:
        """The trail of this start of the job, a fresh one if it is new."""
        trail = self.trails.get(job)
        if trail is None or trail.incarnation != incarnation:
            trail = self.trails[job] = Trail(job, incarnation, declared)
        return trail

    def asks(self, job: JobId, incarnation: Incarnation, at: float, phase: str) -> None:
        """It wants its next turn, whether or not it is let through to the lock."""
        trail = self.expect(job, incarnation)
        if trail.asked is None:
            trail.asked = (at, phase)

    def heard(
        self, event: ev.GroupEvent, effects: Sequence[fx.GroupEffect], group: Group
    ) -> tuple[JobId, bool] | None:
        """``group``: after the event. The job that ended a turn by it, and whether it has changed."""
        if isinstance(event, ev.AcquireRequested):
            self._heard_ask(event, effects, group)
        elif isinstance(event, ev.AcquireAbandoned):
            self._heard_gone(group)
        now, held = group.occupancy, self._held
        if now is self._seen:
            return None
        self._seen = now
        if held is not None and isinstance(now, Held) and now.epoch == held[1]:
            return None
        ended = None
        if held is not None:
            self._held = None
            ended = self._ended(held, event)
        if isinstance(now, Swapping):
            if self._swap is None or self._swap[0] != now.epoch:
                self._swap = (now.epoch, event.at)
        elif isinstance(now, Held):
            self._begun(now, event.at)
        else:
            self._swap = None
        return ended

    def _heard_ask(self, event: ev.AcquireRequested, effects: Sequence[fx.GroupEffect], group: Group) -> None:
        if any(isinstance(effect, fx.Refuse) and effect.request == event.request for effect in effects):
            return
        joins = self._held is not None and self._held[0] == event.job
        now = group.occupancy
        if joins and isinstance(now, Held) and any(h.request == event.request for h in now.holders):
            return  # another process of the holder
        self.asks(event.job, event.incarnation, event.at, event.phase)

    def _heard_gone(self, group: Group) -> None:
        here = {waiter.job for waiter in waiting(group)}
        if isinstance(group.occupancy, Held):
            here.add(group.occupancy.job)
        for trail in self.trails.values():
            if trail.asked is not None and not trail.at_door and trail.job not in here:
                trail.asked = None
                trail.cut()

    def _begun(self, held: Held, at: float) -> None:
        if self._last is not None and self._last != held.job:
            self.swaps.append(at - self._swap[1] if self._swap is not None else 0.0)
        self._swap, self._last = None, held.job
        self._held = (held.job, held.epoch, at)
        trail = self.expect(held.job, held.incarnation)
        if trail.asked is None:
            trail.asked = (at, held.phase)

    def _ended(self, held: tuple[JobId, Epoch, float], event: ev.GroupEvent) -> tuple[JobId, bool] | None:
        job, _, since = held
        trail = self.trails.get(job)
        if trail is None:
            return None
        asked, phase = trail.asked or (since, "")
        trail.asked = None
        if not isinstance(event, ev.LeaseYielded):
            trail.cut()
            return None
        off = max(0.0, asked - trail.left) if trail.left is not None else -1.0
        trail.left = event.at
        return job, trail.turn(Hold(phase, off, event.at - since), asked=asked, ended=event.at)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
