"""What sharing does to a few pools: their turns played through, one lock, first come first served.

The reference that ``batch`` (many groups at once) and the simulator (the core itself) are compared with; also
what admission asks, since it needs no more than the standard library. A change of hands costs the way out of
who was there and the way in of who comes; whoever comes back to its own state pays nothing.
"""

from collections.abc import Sequence

from msgspec import Struct

from coslice.plan.units import Unit
from coslice.profile.cycle import Batches

WARMUP = 0.1
"""Share of the turns before figures are taken."""


class Prediction(Struct, frozen=True, kw_only=True):
    slowdown: tuple[float, ...]
    """Of each unit: time of its cycles ÷ what the same cycles take alone."""
    useful_duty: float
    held: tuple[float, ...]
    """Each unit's part of the useful duty."""
    swaps: int
    swap_duty: float
    """Share of the time that changes of hands take."""
    order: tuple[int, ...]
    """Who had the turns, at the end: one cycle of the longest."""


class Played(Struct, frozen=True):
    """One turn as it went: the swap before it, if any, took ``swap`` seconds up to ``start``."""

    unit: int
    start: float
    end: float
    swap: float


def predict(
    units: Sequence[Unit],
    *,
    turns: int = 2000,
    starts: Sequence[float] = (),
    record: list[Played] | None = None,
) -> Prediction:
    """Play ``turns`` turns of the group. ``starts``: when each unit begins; all at 0 if empty. ``record``
    gets every turn."""
    plays = [_Play(unit, starts[number] if starts else 0.0) for number, unit in enumerate(units)]
    free, owner, swaps, moving = 0.0, -1, 0, 0.0
    order: list[int] = []
    begin = 0.0
    for turn in range(turns):
        if turn == int(turns * WARMUP):
            begin = free
            for play in plays:
                play.mark()
            swaps, moving = 0, 0.0
        number = min(range(len(plays)), key=lambda k: plays[k].ready)
        play, cost = plays[number], 0.0
        if owner not in (-1, number):
            cost = units[owner].out_s + units[number].in_s
            swaps, moving = swaps + 1, moving + cost
        owner = number
        start = max(free, play.ready) + cost
        free = play.take(start)
        if record is not None:
            record.append(Played(number, start, free, cost))
        order.append(number)
    span = free - begin
    held = tuple(play.busy / span if span > 0 else 0.0 for play in plays)
    return Prediction(
        slowdown=tuple(play.slowdown() for play in plays),
        useful_duty=sum(held),
        held=held,
        swaps=swaps,
        swap_duty=moving / span if span > 0 else 0.0,
        order=_one_cycle(units, order),
    )


class _Play:
    """One unit in the course of its turns. ``ready``: when it asks, or asked, for the next one."""

    __slots__ = ("at", "batches", "busy", "cycles", "end", "marked", "ready", "unit")

    def __init__(self, unit: Unit, start: float) -> None:
        self.unit, self.at, self.cycles, self.busy = unit, 0, 0, 0.0
        self.batches = Batches(unit.staleness, start=start) if unit.buffered else None
        self.end = start
        self.marked = (0, start)
        self.ready = self._asks(start)

    def mark(self) -> None:
        self.marked, self.busy = (self.cycles, self.end), 0.0

    def take(self, start: float) -> float:
        turn = self.unit.turns[self.at % len(self.unit.turns)]
        end = start + turn.on
        self.busy += turn.on
        self.at += 1
        if turn.last:
            self.cycles, self.end = self.cycles + 1, end
            if self.batches is not None:
                self.batches.finished(end)
        self.ready = self._asks(end)
        return end

    def _asks(self, since: float) -> float:
        turn = self.unit.turns[self.at % len(self.unit.turns)]
        if turn.first and self.batches is not None:
            since = max(since, self.batches.arrives(turn.make))
        return since + turn.off

    def slowdown(self) -> float:
        """Infinite for a unit that finished no cycle since the mark."""
        count, since = self.marked
        alone = self._solo(self.cycles) - self._solo(count)
        return (self.end - since) / alone if alone > 0 else float("inf")

    def _solo(self, cycle: int) -> float:
        rounds, rest = divmod(cycle, len(self.unit.solo_ends))
        return rounds * self.unit.solo_ends[-1] + (self.unit.solo_ends[rest - 1] if rest else 0.0)


def _one_cycle(units: Sequence[Unit], order: Sequence[int]) -> tuple[int, ...]:
    """The turns between the last two of the unit with the longest period."""
    longest = max(range(len(units)), key=lambda k: units[k].period)
    places = [place for place, number in enumerate(order) if number == longest]
    if len(places) < 2:
        return tuple(dict.fromkeys(order))
    return tuple(order[places[-2] : places[-1]])
