"""One etcd for the tests that only use it, and one of its own for each that kills it."""

import itertools
from collections.abc import Iterator

import pytest
from store.etcd_server import EtcdServer

_prefixes = itertools.count()


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd")).start()
    yield server
    server.kill()


@pytest.fixture
def etcd_location(shared_etcd: EtcdServer) -> str:
    """A place in it that nobody used before."""
    return shared_etcd.location(f"test-{next(_prefixes)}")


@pytest.fixture
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd")).start()
    yield server
    server.kill()
