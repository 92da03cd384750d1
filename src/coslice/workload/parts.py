"""One part of a process's state on its way out, out, or on its way back; and where its bytes lie.

Parts exist so that a move can give memory up, and take it again, piece by piece. ``GroupState`` decides the
order and undoes what fails; here are the steps of one part, over any adapter. Knows no locks and no network.
"""

import zlib
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from coslice.errors import CosliceError, NoRoom, OperationFailed, StateLost
from coslice.workload.adapters import Adapter, Slotted, Taken
from coslice.workload.arena import Arena
from coslice.workload.buffers import Buffers, HostBuffer

OFFLOAD, DISCARD = "offload", "discard"
MID_PHASE = "mid_phase"
"""What a process that may be moved at any moment says among its modes."""
PARTS = "parts"
"""What a process that can move a part of its state, and leave the rest, says among its modes."""


@dataclass(eq=False, slots=True)
class Registration:
    """What one call of ``register`` brought."""

    name: str
    adapters: Sequence[Adapter]
    mode: str = OFFLOAD
    refills: bool = False
    """It has an ``on_restore``, so its bytes may be dropped."""
    for_children: bool = False
    """The process has nothing on the device itself."""


@dataclass(eq=False, slots=True)
class Part:
    owner: Registration
    taken: Taken
    slots: list[tuple[Hashable, int]] = field(default_factory=list)
    """Name in the arena and bytes, in the order in which the adapter wants them."""
    offsets: tuple[int, ...] = ()
    checksum: int = 0
    freed: bool = False
    loaded: bool = False
    """Its bytes are on the device again, though it is not finished: it may yet be freed without a copy."""

    @property
    def registered(self) -> int:
        return self.taken.registered

    def save(self, buffer: HostBuffer | None) -> None:
        self.taken.save(buffer, self._offset(buffer))

    def free(self) -> None:
        self.freed, self.loaded = True, False
        self.taken.free()

    def load(self, buffer: HostBuffer | None) -> None:
        """Device memory and bytes; raises ``NoRoom``, ``StateLost``. Repeating it is harmless."""
        if not self.loaded:
            self.taken.allocate()
            self.taken.load(buffer, self._offset(buffer))
            self.loaded = True

    def _offset(self, buffer: HostBuffer | None) -> int:
        if isinstance(self.taken, Slotted):
            if buffer is not None:
                buffer.check(self.end)
            self.taken.placed(self.offsets)
            return 0
        return self.offsets[0] if self.offsets else 0

    @property
    def end(self) -> int:
        """Of its bytes in the buffer."""
        return max((at + size for at, (_, size) in zip(self.offsets, self.slots, strict=True)), default=0)

    def sum(self, buffer: HostBuffer | None) -> int:
        """Of its bytes in the buffer."""
        total = 0
        if buffer is not None:
            for offset, (_, size) in zip(self.offsets, self.slots, strict=True):
                total = zlib.crc32(buffer.bytes(offset, size), total)
        return total

    def check(self, buffer: HostBuffer | None) -> None:
        if self.sum(buffer) != self.checksum:
            raise StateLost(
                f"the state of {self.owner.name} changed in host memory (checksum): it cannot be trusted; "
                "restart the job from its last checkpoint"
            )


def make_parts(owner: Registration, number: int, taken: Taken) -> list[Part]:
    """``number``: of the adapter within its registration."""
    if isinstance(taken, Slotted):
        return [
            Part(owner, each, [((id(owner), number, key), size) for key, size in each.slots()])
            for each in taken.split()
        ]
    return [Part(owner, taken, [((id(owner), number), taken.kept)] if taken.kept else [])]


def place(
    leaving: Sequence[Part], parked: Iterable[Part], arena: Arena, buffers: Buffers
) -> HostBuffer | None:
    """Find room for the bytes of ``leaving`` in the buffer; raises ``NoRoom``. None: there are no bytes."""
    lying = {key for part in parked for key, _ in part.slots}
    wanted: dict[Hashable, int] = {}
    for part in leaving:
        part.slots = [(_unlike(key, wanted, lying), size) for key, size in part.slots]
        wanted |= dict(part.slots)
    if not wanted:
        return None
    used = max((part.end for part in parked), default=0)
    end = arena.place(wanted, lying)
    try:
        buffer = buffers.obtain(end, keep=used)
    except NoRoom:
        packed = arena.pack(wanted, lying)
        if packed >= end:
            raise
        buffer = buffers.obtain(packed, keep=used)
    for part in leaving:
        part.offsets = tuple(arena.offset(key) for key, _ in part.slots)
    return buffer


def _unlike(key: Hashable, *others: Collection[Hashable]) -> Hashable:
    """Two storages may have one name (a tensor took the place of another, which an alias keeps)."""
    while any(key in known for known in others):
        key = (key, "again")
    return key


def told(error: BaseException) -> CosliceError:
    """The error as the mover's callers get it: ours as it is, anything else named."""
    if isinstance(error, CosliceError):
        return error
    return OperationFailed(f"state was not moved: {type(error).__name__}: {error}")
