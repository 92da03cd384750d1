"""One start of one job in one group, as its turns show it: its cycles alone and as they went, and whether it
has changed. Pure; fed by ``watch``. It can be saved, and goes on from there with its next whole cycle."""

import itertools
import math
from collections import deque
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from coslice.admission.drift import DriftTest, SavedTest
from coslice.core.ids import Incarnation, JobId
from coslice.profile.cycle import cycles
from coslice.profile.holds import Hold, alone, batch_made_in, begins_cycle, computed, pool_of
from coslice.profile.model import Pool, Profile, Source, brief_pool, quantile

KEEP = 64
"""Cycles kept of a job, the latest."""
KNOWN = 3
"""As many whole cycles and a job's profile is taken for what it does. The first, with all that is compiled
and loaded in it, never counts: nobody knows when its off-time began."""
SCATTER = 8
"""How batches scatter counts once so many cycles of everybody were seen. The mean of fewer is so uncertain
that both together would keep jobs apart that fit."""
ROLLING = 10
PHASES = 64
"""Names of phases that are told apart; all others count as the last of them."""


class Cycle(Struct, frozen=True, array_like=True):
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


class SavedTrail(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A ``Trail`` but for the cycle that was going on."""

    job: JobId
    incarnation: Incarnation
    declared: Pool | None = None
    cycles: tuple[Cycle, ...] = ()
    seen: int = 0
    drifts: int = 0
    before: tuple[float, float] | None = None
    makes: tuple[float, ...] = ()
    order: tuple[str, ...] = ()
    test: SavedTest


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

    def save(self, last: int = KEEP) -> SavedTrail:
        """With its last cycles, so many at most."""
        return SavedTrail(
            job=self.job,
            incarnation=self.incarnation,
            declared=None if self.declared is None else brief_pool(self.declared, cycles=last),
            cycles=tuple(self.cycles)[-last:],
            seen=self.seen,
            drifts=self.drifts,
            before=self.before,
            makes=tuple(self._makes)[-last:],
            order=tuple(self._order),
            test=self._test.save(),
        )

    @classmethod
    def restored(cls, saved: SavedTrail) -> "Trail":
        trail = cls(saved.job, saved.incarnation, saved.declared)
        trail.cycles.extend(saved.cycles)
        trail.seen, trail.drifts, trail.before = saved.seen, saved.drifts, saved.before
        trail._makes.extend(saved.makes)
        trail._order = list(saved.order)
        trail._test = DriftTest.restored(saved.test)
        return trail

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

    def pool(self, name: str = "pool", *, scatter: bool = True) -> Pool | None:
        """What it does, as measured; before that as declared. ``scatter``: with batches that take their time
        each; else all take the same."""
        if len(self.cycles) < KNOWN:
            return self.declared
        some = list(self.cycles)
        makes = itertools.cycle(self._made() if scatter else [self._make()])
        befores = [some[-1], *some]  # it goes round, as ``profile.cycle`` plays it
        holds = [
            alone(cycle.holds, next(makes), computed(before.holds), self.staleness)
            for cycle, before in zip(some, befores, strict=False)
        ]
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

    @property
    def measured_well(self) -> bool:
        return len(self.cycles) >= SCATTER or len(self.cycles) < KNOWN

    @property
    def error(self) -> float:
        """Standard error of its mean on-time ÷ that; 0 for what was declared."""
        count = len(self.cycles)
        if count < KNOWN:
            return 0.0
        times = [cycle.on for cycle in self.cycles]
        mean = _mean(times)
        spread = math.sqrt(sum((time - mean) ** 2 for time in times) / (count - 1))
        return spread / math.sqrt(count) / mean if mean > 0 else 0.0

    def profile(self, *, scatter: bool = True) -> Profile | None:
        pool = self.pool(scatter=scatter)
        if pool is None:
            return None
        return Profile(name=self.job, pools=(pool,), source=Source(kind="journal"))

    def turn(self, hold: Hold, *, asked: float, ended: float) -> bool:
        """It yielded. True: that made clear that a cycle was over before it, and it has changed."""
        if hold.phase not in self._order and len(self._order) >= PHASES:
            hold = replace(hold, phase=self._order[-1])
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
        played = alone(holds, self._make(), computed(holds), self.staleness)
        cycle = Cycle(holds, sum([hold.on + hold.off for hold in played]), end - before - queued)
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
        if self._test.moved[1]:  # else its batches are made as before, and we may see few of them from now on
            self._makes = deque(list(self._makes)[-since:], maxlen=KEEP)
        self.drifts += 1
        return True

    # ── buffered jobs ──

    def _note_batch(self, hold: Hold, asked: float) -> None:
        if not self.staleness or not self._pending or hold.phase != self._order[0]:
            return
        first = self._pending[0]
        made = batch_made_in(first.hold, hold, asked - first.asked, self.staleness)
        if made is not None:
            self._makes.append(made)

    def _make(self) -> float:
        """Seconds that a batch takes to make: measured, else declared."""
        made = self._made()
        return quantile(made, 0.5) if self._makes else sum(made) / len(made)

    def _made(self) -> list[float]:
        """The latest batches, each in its seconds: measured, else declared. How they scatter matters as well:
        that is what a job waits for alone, and with others does not."""
        if self._makes:
            return list(self._makes)
        if self.declared is None or not self.staleness:
            return [0.0]
        return [cycle.make for cycle in cycles(self.declared, max(1, len(self.declared.period.samples)))]

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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
