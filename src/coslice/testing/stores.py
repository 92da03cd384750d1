"""Stores for tests: one that tells in which order things happened, and fails or waits when it is told to."""

import asyncio
from collections.abc import Callable

from coslice.store.base import Store, StoreError


class ObservedStore:
    """Wraps a store. ``log`` gets ``("saving", key)`` and ``("saved", key)``.

    ``fail_next`` makes the next save fail without saving; ``gate`` (an ``asyncio.Event``) holds saves back.
    """

    def __init__(self, inner: Store, log: Callable[[tuple[str, str]], None] | None = None) -> None:
        self.inner = inner
        self.saves = 0
        self.fail_next: Exception | None = None
        self.gate: asyncio.Event | None = None
        self._log = log or (lambda entry: None)

    async def load(self) -> dict[str, tuple[bytes, int]]:
        return await self.inner.load()

    async def save(self, key: str, value: bytes, *, expect: int) -> int:
        self._log(("saving", key))
        if self.gate is not None:
            await self.gate.wait()
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        version = await self.inner.save(key, value, expect=expect)
        self.saves += 1
        self._log(("saved", key))
        return version

    async def delete(self, key: str, *, expect: int) -> None:
        await self.inner.delete(key, expect=expect)

    async def close(self) -> None:
        await self.inner.close()


def disk_full() -> StoreError:
    return StoreError("no space left on the device")
