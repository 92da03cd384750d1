"""State that ends with the process: for tests, and for those who do not care to survive a restart."""

from coslice.store.base import Conflict, StoreError


class MemoryStore:
    def __init__(self) -> None:
        self._values: dict[str, tuple[bytes, int]] = {}
        self._last = 0
        self._closed = False

    async def load(self) -> dict[str, tuple[bytes, int]]:
        self._check_open()
        return dict(sorted(self._values.items()))

    async def save(self, key: str, value: bytes, *, expect: int) -> int:
        self._check(key, expect)
        self._last += 1
        self._values[key] = (bytes(value), self._last)
        return self._last

    async def delete(self, key: str, *, expect: int) -> None:
        self._check(key, expect)
        self._values.pop(key, None)

    async def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")

    def _check(self, key: str, expect: int) -> None:
        self._check_open()
        found = self._values[key][1] if key in self._values else 0
        if found != expect:
            raise Conflict(key, expected=expect, found=found)
