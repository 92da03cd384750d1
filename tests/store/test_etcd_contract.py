"""The store contract on a real etcd: as the store of whoever was elected, and without an election."""

import pytest
from store.elected import Elected

from coslice.store import Store
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


class TestElectedEtcdStore(StoreContract):
    durable = True

    @pytest.fixture
    def location(self, etcd_location: str) -> str:
        return etcd_location

    def make(self, location: str) -> Store:
        return Elected(location)
