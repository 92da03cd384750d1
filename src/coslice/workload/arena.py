"""Where in the host buffer each piece of state has its place, move after move.

A piece that comes again under the same name and size lies where it lay last time, so that what did not change
meanwhile need not be copied again (``copying``). Called by the registry; knows names and sizes, no memory.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

ALIGN = 64
"""Pieces of a multiple of this many bytes come first, so that copies of them are aligned."""
WASTE = 1 / 8
"""Share of gaps between pieces that is worth keeping the pieces where they are."""


@dataclass(frozen=True, slots=True)
class Slot:
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


class Arena:
    """Offsets only. Places of pieces that did not come this time are kept until others need the room."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, Slot] = {}
        self._high = 0
        """The furthest end so far: up to there the buffer exists already, so gaps cost nothing new."""

    def offset(self, key: Hashable) -> int:
        return self._slots[key].offset

    def place(self, wanted: Mapping[Hashable, int], parked: Collection[Hashable] = ()) -> int:
        """Give every wanted piece a place; ``parked`` ones hold state and stay. Returns the end."""
        stay = {key: slot for key in parked if (slot := self._slots.get(key)) is not None}
        again = {
            key: slot
            for key, size in wanted.items()
            if key not in stay and (slot := self._slots.get(key)) is not None and slot.size == size
        }
        missing = {key: size for key, size in wanted.items() if key not in again}
        if not missing:
            return _end((stay | again).values())
        found = _fill(stay | again, missing)
        if not stay and _end(found.values()) > max(self._high, (1 + WASTE) * sum(wanted.values())):
            found = _fill({}, wanted)
        self._slots = found
        end = _end(found.values())
        self._high = max(self._high, end)
        return end

    def pack(self, wanted: Mapping[Hashable, int], parked: Collection[Hashable] = ()) -> int:
        """``place`` without gaps where nothing is parked: for a buffer that may not grow."""
        stay = {key: slot for key in parked if (slot := self._slots.get(key)) is not None}
        self._slots = _fill(stay, wanted)
        self._high = _end(self._slots.values())
        return self._high

    def clear(self) -> None:
        self._slots.clear()
        self._high = 0


def _end(slots: Collection[Slot]) -> int:
    return max((slot.end for slot in slots), default=0)


def _fill(taken: Mapping[Hashable, Slot], missing: Mapping[Hashable, int]) -> dict[Hashable, Slot]:
    """Into the first gap that holds it, else at the end; unaligned sizes last, then the largest first."""
    found = dict(taken)
    gaps = _gaps(taken.values())
    for key, size in sorted(missing.items(), key=lambda item: (item[1] % ALIGN != 0, -item[1])):
        for index, (start, stop) in enumerate(gaps):
            if stop is None or stop - start >= size:
                found[key] = Slot(start, size)
                gaps[index] = (start + size, stop)
                break
    return found


def _gaps(slots: Collection[Slot]) -> list[tuple[int, int | None]]:
    """Free (start, stop) ranges in order; the last one has no end."""
    gaps: list[tuple[int, int | None]] = []
    at = 0
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if slot.offset > at:
            gaps.append((at, slot.offset))
        at = max(at, slot.end)
    gaps.append((at, None))
    return gaps
