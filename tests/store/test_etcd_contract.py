"""The store contract on a real etcd: as the store of whoever was elected, and without an election."""

import pytest

from coslice.store import Seat, Store, make_election
from coslice.store.etcd import EtcdStore
from coslice.store.etcd_api import EtcdApi
from coslice.store.etcd_location import parse_etcd
from coslice.testing.store_contract import StoreContract

pytestmark = pytest.mark.etcd


class TestEtcdStore(StoreContract):
    durable = True

    @pytest.fixture
    def location(self, etcd_location: str) -> str:
        return etcd_location

    def make(self, location: str) -> Store:
        return EtcdStore(EtcdApi(parse_etcd(location)))


class _Elected:
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


class TestElectedEtcdStore(StoreContract):
    durable = True

    @pytest.fixture
    def location(self, etcd_location: str) -> str:
        return etcd_location

    def make(self, location: str) -> Store:
        return _Elected(location)
