"""A store for the contract suite that is elected when it is loaded."""

from coslice.store import Seat, Store, make_election


class Elected:
    """The store of one who is elected when it is loaded."""

    def __init__(self, location: str) -> None:
        self._election = make_election(location, seat=Seat("127.0.0.1:1"), ttl=5)
        self._store: Store | None = None

    async def load(self) -> dict[str, tuple[bytes, int]]:
        if self._store is None:
            _, self._store = await self._election.campaign()
        return await self._store.load()

    async def save(self, key: str, value: bytes, *, expect: int) -> int:
        assert self._store is not None
        return await self._store.save(key, value, expect=expect)

    async def delete(self, key: str, *, expect: int) -> None:
        assert self._store is not None
        await self._store.delete(key, expect=expect)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()
            await self._election.close()
