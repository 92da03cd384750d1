"""The stores behind their one contract suite."""

from pathlib import Path
from typing import Any

import pytest

from coslice.store import MemoryStore, SqliteStore
from coslice.store.base import Store
from coslice.testing.store_contract import StoreContract
from coslice.testing.stores import ObservedStore


class TestMemoryStore(StoreContract):
    durable = False

    def make(self, location: Any) -> Store:
        return MemoryStore()


class TestSqliteStore(StoreContract):
    durable = True

    @pytest.fixture
    def location(self, tmp_path: Path) -> Any:
        return tmp_path / "state.db"

    def make(self, location: Any) -> Store:
        return SqliteStore(location)


class TestObservedStore(StoreContract):
    durable = False

    def make(self, location: Any) -> Store:
        return ObservedStore(MemoryStore())


class TestSqliteStoreThatDoesNotFlush(TestSqliteStore):
    def make(self, location: Any) -> Store:
        return SqliteStore(location, flush=False)
