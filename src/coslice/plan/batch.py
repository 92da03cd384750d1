"""``predict`` for many groups at once, with numpy: the same turns in the same order, one per group and round.

Rounds cost the same for one group as for ten thousand, nearly; so the search asks in batches.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from coslice.plan.predict import WARMUP
from coslice.plan.units import Unit

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_AHEAD = 64
"""Batches ahead beyond which it makes no difference: no cycle waits for the one 64 before it."""


class Outcome(Struct, frozen=True):
    """Per group and member, padded like the groups that were asked for; padding has slowdown 0 and duty 0."""

    slowdown: Floats
    held: Floats
    swap: Floats
    """Of each group: share of time that changes of hands take."""


class Table:
    """All units' turns in flat arrays, looked up by unit and position."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.judged: dict[tuple[int, ...], tuple[Any, int]] = {}
        """What ``judge`` said of a group: its verdicts, and the row."""
        self.judged_finally: dict[tuple[int, ...], tuple[Any, int]] = {}
        turns = [turn for unit in units for turn in unit.turns]
        self.off = np.array([turn.off for turn in turns])
        self.on = np.array([turn.on for turn in turns])
        self.make = np.array([turn.make for turn in turns])
        self.first = np.array([turn.first for turn in turns])
        self.last = np.array([turn.last for turn in turns])
        self.length = np.array([len(unit.turns) for unit in units], dtype=np.int64)
        self.base = np.concatenate([[0], np.cumsum(self.length)[:-1]]).astype(np.int64)
        self.following = np.arange(1, len(turns) + 1)
        self.following[self.base + self.length - 1] = self.base
        self.solo = np.concatenate([[0.0, *unit.solo_ends] for unit in units])
        self.rounds = np.array([len(unit.solo_ends) for unit in units], dtype=np.int64)
        self.solo_base = np.concatenate([[0], np.cumsum(self.rounds + 1)[:-1]]).astype(np.int64)
        self.buffered = np.array([unit.buffered for unit in units])
        staleness = np.minimum([unit.staleness for unit in units], _AHEAD)
        self.whole = staleness.astype(np.int64)
        self.part = staleness - self.whole
        self.out_s = np.array([unit.out_s for unit in units])
        self.in_s = np.array([unit.in_s for unit in units])
        self.duty = np.array([unit.duty for unit in units])
        self.period = np.array([unit.period for unit in units])
        self.bound = np.array([unit.max_slowdown for unit in units])
        self.sized = np.array([unit.accelerators > 0 for unit in units])
        self.weight = np.array([float(unit.weight) for unit in units])

    def solo_at(self, unit: Ints, cycle: Ints) -> Floats:
        """When the unit's cycle of that number ends, alone; element by element."""
        rounds, rest = np.divmod(cycle, self.rounds[unit])
        whole = self.solo[self.solo_base[unit] + self.rounds[unit]]
        found: Floats = rounds * whole + self.solo[self.solo_base[unit] + rest]
        return found


def predict_many(
    table: Table, groups: Ints, *, turns: int, starts: Floats | None = None, until: Floats | None = None
) -> Outcome:
    """``groups``: shape (n, k), indices of units, -1 for nobody. ``starts``: the same shape, seconds.

    The first ``WARMUP`` of the turns do not count. With ``until`` figures are taken as ``coslice simulate``
    does, over the seconds from the end of the first cycle of the slowest to ``until`` (of each group).
    """
    present = groups >= 0
    unit = np.where(present, groups, 0)
    plays = _Plays(table, unit, present, np.zeros(groups.shape) if starts is None else starts)
    if until is None:
        for turn in range(turns):
            if turn == int(turns * WARMUP):
                plays.begun.take(plays, slice(None))
            plays.round()
        plays.over.take(plays, slice(None))
    else:
        begin = np.where(present, table.period[unit], 0.0).max(axis=1)
        begun, over = np.zeros(len(groups), dtype=bool), np.zeros(len(groups), dtype=bool)
        for _ in range(turns):
            plays.round()
            for reached, when, seen in ((begun, begin, plays.begun), (over, until, plays.over)):
                rows = np.nonzero((plays.free >= when) & ~reached)[0]
                if len(rows):
                    reached[rows] = True
                    seen.take(plays, rows)
            if over.all():
                break
        plays.over.take(plays, np.nonzero(~over)[0])
    slowdown, held = plays.slowdown(), plays.held()
    return Outcome(np.where(present, slowdown, 0.0), np.where(present, held, 0.0), plays.swapping())


class _Seen:
    """The figures of some groups at one moment of their play."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.cycles = np.zeros(shape, dtype=np.int64)
        self.end, self.busy = np.zeros(shape), np.zeros(shape)
        self.free, self.moving = np.zeros(shape[0]), np.zeros(shape[0])

    def take(self, plays: "_Plays", rows: Ints | slice) -> None:
        shape = plays.shape
        self.cycles[rows] = plays.cycles.reshape(shape)[rows]
        self.end[rows] = plays.end.reshape(shape)[rows]
        self.busy[rows] = plays.busy.reshape(shape)[rows]
        self.free[rows], self.moving[rows] = plays.free[rows], plays.moving[rows]


class _Plays:
    """All members of all groups; see ``predict._Play`` for what the state means. Arrays are flat: member k of
    group n of width w is at n · w + k. (A round is some twenty array operations: what it costs is calls.)"""

    def __init__(self, table: Table, unit: Ints, present: npt.NDArray[np.bool_], starts: Floats) -> None:
        self.table, self.shape = table, unit.shape
        self.row = np.arange(unit.shape[0]) * unit.shape[1]
        self.unit = flat = unit.ravel()
        self.out_s, self.in_s = table.out_s[flat], table.in_s[flat]
        self.place = table.base[flat]
        self.cycles = np.zeros(flat.shape, dtype=np.int64)
        self.busy = np.zeros(flat.shape)
        self.end = starts.astype(float).ravel()
        self.free, self.moving = np.zeros(unit.shape[0]), np.zeros(unit.shape[0])
        self.owner: Ints | None = None
        self.begun, self.over = _Seen(unit.shape), _Seen(unit.shape)
        self.simple = bool(table.last[table.first].all() and table.first.all())
        self.buffered = table.buffered[flat]
        self.waits = bool(self.buffered[present.ravel()].any())
        if self.waits:
            self.whole, self.part = table.whole[flat], table.part[flat]
            self.parts = bool(self.part.any())
            self.depth = int(self.whole.max()) + 3
            self.arrived = self.end.copy()
            # The slot of a cycle that nobody finished yet holds the start.
            self.ends = np.repeat(self.end, self.depth)
        self.ready = np.full(flat.shape, np.inf)
        everybody = np.nonzero(present.ravel())[0]
        self.ready[everybody] = self._asks(everybody, self.end[everybody])
        self.ready_by_row = self.ready.reshape(self.shape)

    def round(self) -> None:
        """One turn in every group."""
        table = self.table
        who = self.row + self.ready_by_row.argmin(axis=1)
        start = np.maximum(self.free, self.ready[who])
        if self.owner is not None:
            cost = (self.out_s[self.owner] + self.in_s[who]) * (self.owner != who)
            start += cost
            self.moving += cost
        self.owner = who
        place = self.place[who]
        on = table.on[place]
        end = start + on
        self.free = end
        self.busy[who] += on
        self.place[who] = table.following[place]
        if self.simple:
            self.cycles[who] += 1
            self.end[who] = end
        else:
            last = table.last[place]
            self.cycles[who] += last
            self.end[who] = np.where(last, end, self.end[who])
        if self.waits:
            # Not the last turn of a cycle: the slot gets the end it has already.
            self.ends[who * self.depth + self.cycles[who] % self.depth] = self.end[who]
        self.ready[who] = self._asks(who, end)

    def _asks(self, who: Ints, since: Floats) -> Floats:
        table = self.table
        place = self.place[who]
        if self.waits:
            number = self.cycles[who] + 1
            make, whole = table.make[place], self.whole[who]
            ready = self.arrived[who]
            if self.parts:
                part = self.part[who]
                early = np.maximum(ready, self._end_of(who, number - 2 - whole)) + part * make
                ready = np.where(part > 0, early, ready)
                make = make * (1.0 - part)
            ready = np.maximum(ready, self._end_of(who, number - 1 - whole)) + make
            waits = self.buffered[who]
            if not self.simple:
                waits = waits & table.first[place]
            self.arrived[who] = np.where(waits, ready, self.arrived[who])
            since = np.where(waits, np.maximum(since, ready), since)
        asks: Floats = since + table.off[place]
        return asks

    def _end_of(self, who: Ints, cycle: Ints) -> Floats:
        """End of the cycle of that number, counted from 1. Slots of cycles before the first, and slot 0 until
        it is used again, hold the start: by then such cycles are no longer asked for."""
        found: Floats = self.ends[who * self.depth + np.maximum(cycle, 0) % self.depth]
        return found

    def slowdown(self) -> Floats:
        unit, begun, over = self.unit.reshape(self.shape), self.begun, self.over
        alone = self.table.solo_at(unit, over.cycles) - self.table.solo_at(unit, begun.cycles)
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = np.where(alone > 0, (over.end - begun.end) / alone, np.inf)
        return found

    def held(self) -> Floats:
        found: Floats = (self.over.busy - self.begun.busy) / self._span()[:, None]
        return found

    def swapping(self) -> Floats:
        found: Floats = (self.over.moving - self.begun.moving) / self._span()
        return found

    def _span(self) -> Floats:
        found: Floats = np.maximum(self.over.free - self.begun.free, 1e-12)
        return found
