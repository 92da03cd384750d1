"""Fixtures of the client's tests: an orchestrator with behaviour, and clients that end with the test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from client.fake_server import FakeOrchestrator

import coslice


@pytest.fixture
def fake() -> Iterator[FakeOrchestrator]:
    fake = FakeOrchestrator("a", "b", "c").start()
    yield fake
    fake.kill()


@pytest.fixture
def connect(fake: FakeOrchestrator) -> Iterator[Callable[..., coslice.Client]]:
    clients: list[coslice.Client] = []

    def connect(job: str = "job-1", **settings: Any) -> coslice.Client:
        settings = {"groups": "a", "reconnect_timeout": 20.0, **settings}
        client = coslice.Client(fake.address, job=job, **settings)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Callable[..., coslice.Client]) -> coslice.Client:
    return connect()
