"""Durable state: compare-and-swap values behind one protocol (base), where they live (memory, sqlite, etcd),
and who of several processes writes them (election)."""

from pathlib import Path

from coslice.errors import ConfigError
from coslice.store.base import Store
from coslice.store.election import Alone, Election, Seat, Tenure
from coslice.store.memory import MemoryStore
from coslice.store.sqlite import SqliteStore

DEFAULT_TTL = 5.0


def make_store(location: str | Path, *, flush: bool = True) -> Store:
    """``":memory:"``, or the path of an SQLite file (``flush`` as there). ``load()`` opens it."""
    return MemoryStore() if str(location) == ":memory:" else SqliteStore(location, flush=flush)


def make_election(location: str, *, seat: Seat, ttl: float = DEFAULT_TTL) -> Election:
    """Of those who would write the state at ``location``: ``etcd://…``, ``sqlite:PATH`` or as for
    ``make_store``. Opens nothing yet.

    ``seat``: where others are told to dial while this process leads. Raises ``ConfigError``.
    """
    scheme, colon, rest = location.partition(":")
    if not shared(location):
        return Alone(make_store(rest if colon and scheme == "sqlite" else location))
    try:
        from coslice.store.etcd_api import parse_etcd
        from coslice.store.etcd_election import EtcdElection
    except ImportError as error:
        raise ConfigError(f"{scheme} is spoken over HTTP: pip install 'coslice[ha]' ({error})") from error
    return EtcdElection(parse_etcd(location), seat=seat, ttl=ttl)


def shared(location: str) -> bool:
    """Is the state where several orchestrators reach it?"""
    return location.startswith(("etcd://", "etcd+tls://"))


__all__ = [
    "DEFAULT_TTL",
    "Alone",
    "Election",
    "MemoryStore",
    "Seat",
    "SqliteStore",
    "Store",
    "Tenure",
    "make_election",
    "make_store",
    "shared",
]
