"""Durable state: compare-and-swap values behind one protocol (base), where they live (memory, sqlite, etcd,
kubernetes), and who of several processes writes them (election)."""

from pathlib import Path

from coslice.errors import ConfigError
from coslice.store.base import Store
from coslice.store.election import Alone, Election, Seat, Tenure
from coslice.store.etcd_location import SCHEME as ETCD
from coslice.store.etcd_location import SECURE as ETCD_TLS
from coslice.store.etcd_location import parse_etcd
from coslice.store.kube_location import SCHEME as KUBERNETES
from coslice.store.kube_location import parse_kubernetes
from coslice.store.memory import MemoryStore
from coslice.store.sqlite import SqliteStore

DEFAULT_TTL = 5.0


def make_store(location: str | Path, *, flush: bool = True) -> Store:
    """``":memory:"``, or the path of an SQLite file (``flush`` as there). ``load()`` opens it."""
    return MemoryStore() if str(location) == ":memory:" else SqliteStore(location, flush=flush)


def make_election(location: str, *, seat: Seat, ttl: float = DEFAULT_TTL) -> Election:
    """Of those who would write the state at ``location``: ``etcd://…``, ``kubernetes://…``, ``sqlite:PATH``
    or as for ``make_store``. Opens nothing yet.

    ``seat``: where others are told to dial while this process leads. Raises ``ConfigError``.
    """
    scheme, colon, rest = location.partition(":")
    if not shared(location):
        return Alone(make_store(rest if colon and scheme == "sqlite" else location))
    check_http(scheme)
    from coslice.store.etcd_election import EtcdElection
    from coslice.store.kube_election import LeaseElection

    if scheme == KUBERNETES:
        return LeaseElection(parse_kubernetes(location), seat=seat, ttl=ttl)
    return EtcdElection(parse_etcd(location), seat=seat, ttl=ttl)


def check_location(location: str, *, insecure: bool) -> None:
    """Raises ``ConfigError`` for a place that cannot be, or that is reached in the clear without leave."""
    if not shared(location):
        kind, scheme, _ = location.partition("://")
        if scheme and kind.isalnum():
            raise ConfigError(
                f"there is no store of the kind {kind}: write {ETCD}://…, {ETCD_TLS}://…, {KUBERNETES}://… "
                "or sqlite:PATH"
            )
        return
    kubernetes = location.startswith(f"{KUBERNETES}://")
    place = parse_kubernetes(location) if kubernetes else parse_etcd(location)
    if place.in_the_clear and not insecure:
        better = "api=https://…&ca=FILE" if kubernetes else "etcd+tls://…?ca=FILE"
        raise ConfigError(
            f"{location} would be written to over the network in the clear: use {better}, or say --insecure"
        )


def check_http(scheme: str) -> None:
    """Raises ``ConfigError`` where the package is missing that these stores need."""
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{scheme} is spoken over HTTP: pip install 'coslice[ha]' ({error})") from error


def shared(location: str) -> bool:
    """Is the state where several orchestrators reach it?"""
    return location.startswith((f"{ETCD}://", f"{ETCD_TLS}://", f"{KUBERNETES}://"))


__all__ = [
    "DEFAULT_TTL",
    "Alone",
    "Election",
    "MemoryStore",
    "Seat",
    "SqliteStore",
    "Store",
    "Tenure",
    "check_http",
    "check_location",
    "make_election",
    "make_store",
    "shared",
]
