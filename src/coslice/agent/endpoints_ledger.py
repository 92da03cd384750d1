"""What sleeps where: the agent's own record of each engine, durable before anything is asked of it.

Engines do not tell (SGLang has no route for it, vLLM calls a paused engine asleep), and asking twice kills or
corrupts them. So each step is written here first: after a crash of the agent an entry in ``LEAVING`` or
``RETURNING`` says that the answer is unknown and the engine has to be looked at.
"""

import asyncio
from enum import StrEnum

from msgspec import Struct

from coslice.store.codec import Codec
from coslice.store.slot import Slot
from coslice.workload.listening import started


class Phase(StrEnum):
    AWAKE = "awake"
    LEAVING = "leaving"
    """Told to sleep; no answer yet."""
    ASLEEP = "asleep"
    RETURNING = "returning"
    """Told to wake; no answer yet."""
    LOST = "lost"
    """It answered nonsense or not at all: only a restart of the engine helps."""


class Golden(Struct, frozen=True, kw_only=True):
    """What the engine answered to one prompt before it slept, to be compared afterwards."""

    model: str
    text: str
    top: dict[str, float] = {}
    """Log-probabilities of the likeliest first tokens."""
    checksums: str = ""
    """The engine's own, where it offers them and we were asked to use them; JSON."""


class Entry(Struct, frozen=True, kw_only=True):
    """One engine: the process behind an address, under a member's name."""

    url: str
    engine: str
    pid: int
    started: int
    phase: Phase = Phase.AWAKE
    tags: tuple[str, ...] = ()
    """What sleeps, or is on its way."""
    discard: bool = False
    awake_bytes: int = 0
    """Device memory before it was told to sleep."""
    freed: int = 0
    """What it gave up when it went to sleep."""
    asleep_bytes: int = -1
    """Device memory the last time it slept; -1: never did."""
    cycles: int = 0
    golden: Golden | None = None
    reason: str = ""
    """Why it is lost."""

    def of(self, pid: int, started: int, url: str) -> bool:
        return (self.pid, self.started, self.url) == (pid, started, url)


class LedgerState(Struct, kw_only=True):
    entries: dict[str, Entry] = {}


CODEC = Codec(LedgerState, kind="endpoints")
KEY = "backend/app_endpoint/engines"


class Ledger:
    """Without a slot nothing survives a restart of the agent."""

    def __init__(self, slot: Slot[LedgerState] | None = None) -> None:
        self._slot = slot
        self._entries = dict((slot.state() or LedgerState()).entries) if slot is not None else {}
        self._writing = asyncio.Lock()

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def under(self, prefix: str) -> dict[str, Entry]:
        return {key: entry for key, entry in self._entries.items() if key.startswith(prefix)}

    def ended(self) -> tuple[str, ...]:
        """Keys of entries whose process is gone: nothing of theirs sleeps anywhere."""
        return tuple(k for k, entry in self._entries.items() if started(entry.pid) != entry.started)

    async def put(self, key: str, entry: Entry) -> Entry:
        """Returns once it is written; only then may what it says be done."""
        self._entries[key] = entry
        await self._save()
        return entry

    async def drop(self, key: str) -> None:
        if self._entries.pop(key, None) is not None:
            await self._save()

    async def _save(self) -> None:
        if self._slot is None:
            return
        async with self._writing:
            await self._slot.save(LedgerState(entries=dict(self._entries)))
