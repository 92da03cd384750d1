"""What admission remembers, in the orchestrator's store: a value for each group beside that of its lock.

A verdict is saved before it is acted upon. What was only measured is saved with the next verdict, or
``EVERY_S`` after the last time: a kill costs what was measured since, and it is measured again."""

import logging
import time
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from coslice.admission.books import Books, Saved
from coslice.core.ids import GroupId
from coslice.runtime.clock import Clock
from coslice.store import Store
from coslice.store.codec import Codec
from coslice.store.slot import Slot

log = logging.getLogger(__name__)
KEY = "admission/"
EVERY_S = 5.0
MOST_BYTES = 512 << 10
"""Shared stores take one or one and a half MiB. Of more, only what was decided is saved."""


class Kept(Struct, frozen=True):
    saved: Saved
    unix: float
    """When, so that ages go on while nobody runs. Clocks of two machines may differ by as much as that is
    off."""


CODEC = Codec(Kept, kind="admission")


class AdmissionStore:
    """One writer: ``Admissions``."""

    def __init__(self, store: Store, saved: Mapping[str, tuple[bytes, int]], clock: Clock) -> None:
        """Raises ``ConfigError`` for a value that is damaged, or that a newer coslice wrote."""
        self._store, self._clock = store, clock
        self._slots: dict[str, Slot[Kept]] = {}
        self._found: dict[str, Kept] = {}
        self._last: dict[str, float] = {}
        for key, found in saved.items():
            if key.startswith(KEY):
                name, slot = key.removeprefix(KEY), Slot(store, key, CODEC, found)
                if (kept := slot.state()) is not None:
                    self._slots[name], self._found[name] = slot, kept

    def found(self, group: GroupId) -> tuple[Saved, float] | None:
        """What an orchestrator before this one saved, with its age in seconds; once."""
        kept = self._found.pop(group, None)
        return None if kept is None else (kept.saved, max(0.0, time.time() - kept.unix))

    def due(self, group: GroupId) -> float:
        """From when on something that was only measured may be saved."""
        return self._last.get(group, -EVERY_S) + EVERY_S

    async def save(self, group: GroupId, books: Books) -> None:
        now = self._clock.now()
        self._last[group] = now
        saved = books.save(now)
        size = len(CODEC.encode(Kept(saved, 0.0)))
        if size > MOST_BYTES:
            log.warning("admission of group %s: %d bytes to save, without what was measured", group, size)
            saved = replace(saved, seats=(), trails=(), left=())
        slot = self._slots.get(group)
        if slot is None:
            slot = self._slots[group] = Slot(self._store, KEY + group, CODEC)
        await slot.save(Kept(saved, time.time()))

    async def forget(self, group: GroupId) -> None:
        """The group is no more."""
        self._last.pop(group, None)
        if (slot := self._slots.pop(group, None)) is not None:
            await slot.delete()
