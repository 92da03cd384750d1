"""A pool's profile unrolled in time: the turns it takes, and when its batches are there.

Called by the simulator and the planner, so that both mean the same by a profile. Pure; randomness comes from
a seed that the caller gives.
"""

import random
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from coslice.profile.model import Durations, Phase, Pool


class Turn(Struct, frozen=True):
    """One stretch on the accelerators, and the closed off-time before it.

    The job asks ``off`` seconds after its last yield. The first turn of a cycle of a buffered pool asks
    ``off`` seconds after the later of its last yield and the arrival of its batch.
    """

    off: float
    on: float
    phase: str = ""
    """In our words (``Phase.phase``) or, without one, the source's: of the longest phase of the turn."""


class Cycle(Struct, frozen=True):
    turns: tuple[Turn, ...]
    make: float = 0.0
    """Buffered pools: seconds that the producer needs for this cycle's batch; see ``Batches``."""
    wait: float = 0.0
    """Buffered pools: what of that the job, alone, waits for."""

    @property
    def on(self) -> float:
        return sum(turn.on for turn in self.turns)

    @property
    def alone(self) -> float:
        """Seconds of the whole cycle without others, after the start-up."""
        return self.wait + sum(turn.off + turn.on for turn in self.turns)


def cycles(pool: Pool, count: int, *, seed: int = 0) -> list[Cycle]:
    """``count`` cycles of the pool alone: its samples in their order, over and over; else drawn from the
    quantiles with ``seed``; else the means."""
    rng = random.Random(seed)
    values = [_values(phase.duration, count, rng) for phase in pool.phases]
    order = _rotation(pool.phases)
    kinds = [(phase.on, phase.coupling == "buffered", phase.phase or phase.name) for phase in pool.phases]
    kinds = [kinds[index] for index in order]
    shapes = [_turns(kinds, row) for row in zip(*(values[index] for index in order), strict=True)]
    if pool.coupling == "closed":
        return [Cycle(turns) for turns, _ in shapes]
    staleness, made = pool.staleness, []
    for index, (turns, wait) in enumerate(shapes):
        # Alone, batch i came when the wait before cycle i was over. Up to ``staleness`` of it was made while
        # the cycle before it ran (for the first one: the last of the record, which goes round).
        before = _length(shapes[index - 1]) - shapes[index - 1][1] if count > 1 else _length(shapes[0]) - wait
        ahead = wait / (1.0 - staleness) if staleness < 1.0 else float("inf")
        made.append(Cycle(turns, min(before + wait, ahead), wait))
    return made


def blocks(pool: Pool, count: int, *, seed: int = 0) -> list[tuple[float, float]]:
    """The idle block before each turn and the turn, in seconds, as the pool has them when it is alone."""
    plain = tuple(replace(phase, coupling="closed", staleness=0.0) for phase in pool.phases)
    made = cycles(replace(pool, phases=plain), count, seed=seed)
    return [(turn.off, turn.on) for cycle in made for turn in cycle.turns]


def solo_seconds(pool: Pool, made: Sequence[Cycle], *, free: float = 0.0) -> list[float]:
    """When each of these cycles ends if nobody else is there; the job has everything it needs at ``free``."""
    batches = Batches(pool.staleness) if pool.coupling == "buffered" else None
    ends, at = [], free
    for cycle in made:
        if batches is not None:
            at = max(at, batches.arrives(cycle.make))
        at += sum(turn.off + turn.on for turn in cycle.turns)
        ends.append(at)
        if batches is not None:
            batches.finished(at)
    return ends


class Batches:
    """When the batches of a buffered pool are there.

    The producer makes one batch after the other, and at no time is it more than ``1 + staleness`` batches
    beyond the steps that are finished; it stands still there. (``staleness`` 0 is on-policy: it starts when
    the step is finished.) Call ``arrives`` once per cycle, in order, and ``finished`` at the end of each
    cycle: the arrival of batch n depends on the ends of cycles up to n − 1 only.
    """

    def __init__(self, staleness: float, *, start: float = 0.0) -> None:
        self._whole, self._part = int(staleness), staleness - int(staleness)
        self._start, self._last = start, start
        self._ends: list[float] = []
        self._count = 0

    def arrives(self, make: float) -> float:
        """When the next batch, which takes ``make`` seconds to make, is complete."""
        self._count += 1
        ready = self._last
        if self._part:
            ready = max(ready, self._end(self._count - 2 - self._whole)) + self._part * make
        ready = max(ready, self._end(self._count - 1 - self._whole)) + (1.0 - self._part) * make
        self._last = ready
        return ready

    def finished(self, at: float) -> None:
        self._ends.append(at)

    def _end(self, cycle: int) -> float:
        """End of the cycle of that number, counted from 1; before the first: the start."""
        return self._ends[cycle - 1] if cycle >= 1 else self._start


def _values(part: Durations, count: int, rng: random.Random) -> list[float]:
    if part.samples:
        return [part.samples[index % len(part.samples)] for index in range(count)]
    if part.quantiles:
        return [part.quantile(rng.random()) for _ in range(count)]
    return [part.mean] * count


def _rotation(phases: Sequence[Phase]) -> list[int]:
    """Cycles begin with the off-time before the first turn: with the buffered phase if there is one, else
    with the first off-phase that follows an on-phase (going round), else as they are."""
    count = len(phases)
    starts = [index for index in range(count) if phases[index].coupling == "buffered"] or [
        index for index in range(count) if not phases[index].on and phases[index - 1].on
    ]
    start = starts[0] if starts else 0
    return [(start + index) % count for index in range(count)]


def _turns(
    kinds: Sequence[tuple[bool, bool, str]], seconds: Sequence[float]
) -> tuple[tuple[Turn, ...], float]:
    """The turns of one cycle, and its buffered off-time. ``kinds``, of each phase: is it on, is it buffered,
    its name. Off-time after the last turn cannot be (``_rotation``); a cycle that computed nothing keeps one
    empty turn."""
    turns: list[Turn] = []
    wait = off = on = longest = 0.0
    label = ""
    for (is_on, buffered, name), value in zip(kinds, seconds, strict=True):
        if buffered:
            wait += value
        elif is_on:
            on += value
            if value > longest:
                longest, label = value, name
        elif value > 0:
            if on > 0:
                turns.append(Turn(off, on, label))
                off = on = longest = 0.0
            off += value
    if on > 0 or off > 0 or not turns:
        turns.append(Turn(off, on, label))
    return tuple(turns), wait


def _length(shape: tuple[tuple[Turn, ...], float]) -> float:
    turns, wait = shape
    return wait + sum(turn.off + turn.on for turn in turns)
