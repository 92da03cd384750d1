"""Tells those who watch the status that something changed. Many changes at once are told once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from coslice.core.ids import GroupId

PAUSE = 0.1
"""Seconds between two messages to one watcher, at least, for each ``MANY`` groups in them."""
MANY = 100


class Watchers:
    def __init__(self) -> None:
        self._changes: dict[asyncio.Event, str] = {}
        self._stopping = False
        self.also: Callable[[GroupId], None] | None = None
        """Called at once, after each change."""

    def changed(self, group: GroupId) -> None:
        for event, watched in self._changes.items():
            if watched in ("", group):
                event.set()
        if self.also is not None:
            self.also(group)

    def stop(self) -> None:
        self._stopping = True
        for event in self._changes:
            event.set()

    async def follow(self, group: str, groups: int, beat: float | None = None) -> AsyncIterator[None]:
        """Yields at once, and again after changes of ``group`` (empty: of any of ``groups``) and ``beat``
        seconds without any, until stopped."""
        pause = PAUSE if group else PAUSE * max(1.0, groups / MANY)
        event = asyncio.Event()
        self._changes[event] = group
        try:
            while not self._stopping:
                event.clear()
                yield
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(beat):
                        await event.wait()
                await asyncio.sleep(pause)  # what else changes meanwhile goes into the same message
        finally:
            del self._changes[event]
