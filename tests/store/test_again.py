"""Of a store that falls silent: who asks is told when nothing is to be hoped for any more, not later."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from coslice.store import Store, Tenure
from coslice.store.base import NoAnswer
from coslice.store.election import Deposed
from coslice.store.etcd import EtcdStore
from coslice.store.etcd_api import EtcdApi
from coslice.store.etcd_location import parse_etcd

BOUND = 60.0


class Silent(EtcdApi):
    """Answers until it is told to fall silent; then never, not even that it does not."""

    def __init__(self) -> None:
        super().__init__(parse_etcd("etcd://127.0.0.1:1/test"))
        self.silent, self.asked = False, asyncio.Event()

    async def call(self, path: str, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        if self.silent:
            self.asked.set()
            await asyncio.Event().wait()
        return {"header": {"revision": "1"}}


WORKS: list[Callable[[Store], Awaitable[Any]]] = [
    lambda store: store.load(),
    lambda store: store.save("key", b"1", expect=0),
]


@pytest.mark.parametrize("work", WORKS, ids=["read", "write"])
async def test_a_leader_waits_for_no_answer_once_it_leads_no_longer(
    work: Callable[[Store], Awaitable[Any]],
) -> None:
    api, tenure = Silent(), Tenure()
    store = EtcdStore(api, tenure=tenure)
    await store.load()
    api.silent = True
    doing = asyncio.ensure_future(work(store))
    async with asyncio.timeout(BOUND):
        await api.asked.wait()
        tenure.end("its lease ran out")
        with pytest.raises(Deposed, match="its lease ran out"):
            await doing
        await store.close()


@pytest.mark.parametrize("work", WORKS, ids=["read", "write"])
async def test_without_an_election_patience_ends_also_in_the_middle_of_a_call(
    work: Callable[[Store], Awaitable[Any]],
) -> None:
    api = Silent()
    store = EtcdStore(api, patience=0.1)
    await store.load()
    api.silent = True
    async with asyncio.timeout(BOUND):
        with pytest.raises(NoAnswer):
            await work(store)
        await store.close()


async def test_a_tenure_that_ends_within_ends_nothing_afterwards() -> None:
    tenure = Tenure()
    async with tenure.lasting():
        tenure.end("another was elected")
    await asyncio.sleep(0)  # what it would have ended is over
    with pytest.raises(Deposed):
        async with tenure.lasting():
            pytest.fail("it leads no longer")
