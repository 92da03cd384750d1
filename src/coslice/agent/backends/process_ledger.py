"""What a backend of whole processes has begun and done, kept over restarts of the agent: a parked process is
on no device, so whose it is and what it needs to come back is written nowhere else.

Each step is written before it is taken. The states of the processes are the driver's to tell; this only says
whose they are and what was meant. Not synced to disk: processes end with the machine, and their entries mean
nothing then.
"""

import asyncio
from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from coslice.agent.processes import alive
from coslice.core.ids import GroupId, Incarnation, JobId
from coslice.store import Store
from coslice.store.codec import Codec
from coslice.store.slot import Slot

Phase = Literal["leaving", "parked", "returning"]


class Target(Struct, frozen=True, kw_only=True):
    """One process that uses devices. ``started``: clock ticks since boot; with the pid it names the process
    for good."""

    pid: int
    started: int
    devices: dict[str, int] = {}
    """Bytes on each device, by UUID, when it was last seen there."""

    @property
    def bytes(self) -> int:
        return sum(self.devices.values())

    @property
    def alive(self) -> bool:
        return alive(self.pid, self.started)


Key = tuple[GroupId, JobId]


class Entry(Struct, frozen=True, kw_only=True):
    group: GroupId
    job: JobId
    incarnation: Incarnation
    phase: Phase
    op: str
    targets: tuple[Target, ...]
    fault: str = ""
    """Why it can never be restored."""

    @property
    def key(self) -> Key:
        return (self.group, self.job)

    @property
    def bytes(self) -> int:
        return sum(target.bytes for target in self.targets)

    def per_device(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for target in self.targets:
            for uuid, size in target.devices.items():
                total[uuid] = total.get(uuid, 0) + size
        return total


class _Book(Struct, frozen=True):
    entries: tuple[Entry, ...] = ()


class Ledger:
    def __init__(self, backend: str, store: Store, found: Mapping[str, tuple[bytes, int]]) -> None:
        """``found``: what the store held. Raises ``ConfigError`` if it is not ours to read."""
        key = f"backend/{backend}/parked"
        self._slot = Slot(store, key, Codec(_Book, kind="parked-processes"), found.get(key))
        book = self._slot.state() or _Book()
        self._entries = {entry.key: entry for entry in book.entries}
        self._saving = asyncio.Lock()

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries.values()))

    def get(self, key: Key) -> Entry | None:
        return self._entries.get(key)

    async def put(self, entry: Entry) -> Entry:
        self._entries[entry.key] = entry
        await self._save()
        return entry

    async def step(self, entry: Entry, phase: Phase, **changes: object) -> Entry:
        return await self.put(replace(entry, phase=phase, **changes))

    async def drop(self, key: Key) -> None:
        if self._entries.pop(key, None) is not None:
            await self._save()

    async def _save(self) -> None:
        async with self._saving:
            await self._slot.save(_Book(tuple(self._entries.values())))
