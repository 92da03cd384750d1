"""Durable state: compare-and-swap values behind one protocol (base), and where they live (memory, sqlite)."""

from pathlib import Path

from coslice.store.base import Store
from coslice.store.memory import MemoryStore
from coslice.store.sqlite import SqliteStore


def make_store(location: str | Path, *, flush: bool = True) -> Store:
    """``":memory:"``, or the path of an SQLite file (``flush`` as there). ``load()`` opens it."""
    return MemoryStore() if str(location) == ":memory:" else SqliteStore(location, flush=flush)


__all__ = ["MemoryStore", "SqliteStore", "Store", "make_store"]
