"""What only a shared store has to stand: lost answers, a server that goes away, one who was deposed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from store.etcd_server import EtcdServer
from store.listener import Listener

from coslice.errors import ConfigError
from coslice.store import Seat, Store, Tenure, etcd, make_election
from coslice.store.base import Conflict, StoreError
from coslice.store.election import Deposed
from coslice.store.etcd import EtcdStore
from coslice.store.etcd_api import EtcdApi, NoAnswer
from coslice.store.etcd_election import EtcdElection
from coslice.store.etcd_location import parse_etcd

pytestmark = pytest.mark.etcd
BOUND = 60.0
Elect = Callable[..., EtcdElection]


class LossyApi(EtcdApi):
    """Does what it is asked, and loses the next ``lose`` answers to transactions."""

    lose = 0

    async def call(self, path: str, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        answer = await super().call(path, body, timeout=timeout)
        if path == "kv/txn" and self.lose:
            self.lose -= 1
            raise NoAnswer("lost on the way back")
        return answer


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def elect(stack: AsyncExitStack) -> Elect:
    def make(location: str, name: str, ttl: float = 5) -> EtcdElection:
        address = name if ":" in name else f"{name}:1"
        election = make_election(location, seat=Seat(address), ttl=ttl)
        assert isinstance(election, EtcdElection)
        stack.push_async_callback(election.close)
        return election

    return make


async def lead(election: EtcdElection) -> tuple[Tenure, Store]:
    async with asyncio.timeout(BOUND):
        tenure, store = await election.campaign()
        await store.load()
    return tenure, store


# ── one writer ─────────────────────────────────────────────────────────────


async def test_a_write_whose_answer_is_lost_happens_once(etcd_location: str) -> None:
    api = LossyApi(parse_etcd(etcd_location))
    store = EtcdStore(api)
    await store.load()
    api.lose = 3
    version = await store.save("key", b"1", expect=0)
    api.lose = 1
    second, other = await asyncio.gather(
        store.save("key", b"2", expect=version), store.save("other", b"1", expect=0)
    )
    api.lose = 1
    await store.delete("other", expect=other)
    api.lose = 1
    with pytest.raises(Conflict):
        await store.save("key", b"3", expect=version)
    assert await store.load() == {"key": (b"2", second)}
    await store.close()


async def test_many_writers_share_transactions(etcd_location: str) -> None:
    store = EtcdStore(EtcdApi(parse_etcd(etcd_location)))
    await store.load()
    await asyncio.gather(*(store.save(f"key-{n}", b"1", expect=0) for n in range(500)))
    assert store.commits <= 10
    await store.close()


async def test_a_value_that_etcd_does_not_take_fails_alone(etcd_location: str) -> None:
    store = EtcdStore(EtcdApi(parse_etcd(etcd_location)))
    await store.load()
    results = await asyncio.gather(
        store.save("a", b"1", expect=0),
        store.save("huge", b"\0" * 3_000_000, expect=0),
        store.save("b", b"1", expect=0),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [int, StoreError, int]
    assert list(await store.load()) == ["a", "b"]
    await store.close()


async def test_reading_begins_anew_when_its_revision_is_compacted_away(
    etcd_location: str, shared_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd, "_PAGE", 2)
    reads: list[str] = []

    class Compacting(EtcdApi):
        async def call(self, path: str, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
            answer = await super().call(path, body, timeout=timeout)
            if path == "kv/range":
                reads.append(str(body["revision"]))
            if len(reads) == 1:  # between the first page and the second
                put = shared_etcd.call("kv/put", {"key": "eA==", "value": ""})
                revision = put["header"]["revision"]  # type: ignore[index]
                shared_etcd.call("kv/compaction", {"revision": revision})
            return answer

    store = EtcdStore(EtcdApi(parse_etcd(etcd_location)))
    await store.load()
    for n in range(5):
        await store.save(f"key-{n}", b"1", expect=0)
    reader = EtcdStore(Compacting(parse_etcd(etcd_location)))
    assert list(await reader.load()) == [f"key-{n}" for n in range(5)]
    assert len(reads) == 4  # the first page for nothing, then all three
    for opened in (reader, store):
        await opened.close()


async def test_an_outage_shorter_than_the_lease_is_ridden_out(etcd: EtcdServer, elect: Elect) -> None:
    tenure, store = await lead(elect(etcd.location(), "a", ttl=60))
    version = await store.save("key", b"1", expect=0)
    etcd.kill()
    saving = asyncio.gather(store.save("key", b"2", expect=version), store.save("new", b"1", expect=0))
    await asyncio.sleep(0.2)  # the outage lasts for some attempts
    assert not saving.done()
    await asyncio.to_thread(etcd.start)
    async with asyncio.timeout(BOUND):
        versions = await saving
    assert await store.load() == {"key": (b"2", versions[0]), "new": (b"1", versions[1])}
    assert not tenure.over
    await store.close()


# ── several ────────────────────────────────────────────────────────────────


async def test_one_leads_and_the_others_know_whom_to_dial(etcd_location: str, elect: Elect) -> None:
    a, b = elect(etcd_location, "a"), elect(etcd_location, "b")
    await lead(a)
    waiting = asyncio.ensure_future(b.campaign())
    async with asyncio.timeout(BOUND):
        while b.hearsay.leader != Seat("a:1"):  # noqa: ASYNC110  # it tells nobody whom it heard of
            await asyncio.sleep(0.01)
        while sorted(seat.address for seat in await a.candidates()) != ["a:1", "b:1"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # who stands by is announced to nobody
    assert not waiting.done()
    await a.close()  # resigns: nobody waits for its lease to run out
    async with asyncio.timeout(BOUND):
        await waiting


async def test_of_one_who_was_deposed_every_write_is_refused(
    etcd_location: str, shared_etcd: EtcdServer, elect: Elect
) -> None:
    a, b = elect(etcd_location, "a"), elect(etcd_location, "b")
    tenure, store = await lead(a)
    version = await store.save("key", b"a", expect=0)
    assert a._lease is not None
    a._keeper.cancel()  # type: ignore[union-attr]  # as if it slept: it does not notice what follows
    shared_etcd.call("lease/revoke", {"ID": a._lease.id})
    _, successor = await lead(b)
    results = await asyncio.gather(
        store.save("key", b"late", expect=version),
        store.save("new", b"late", expect=0),
        store.delete("key", expect=version),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [Deposed] * 3
    assert "elected" in await tenure.ended()
    with pytest.raises(Deposed):
        await store.save("key", b"later", expect=version)
    assert await successor.load() == {"key": (b"a", version)}
    for opened in (store, successor):
        await opened.close()


async def test_of_a_process_that_is_gone_the_lease_is_not_waited_for(
    etcd_location: str, elect: Elect
) -> None:
    async with Listener() as process:
        a, b = elect(etcd_location, process.address, ttl=BOUND), elect(etcd_location, "b")
        _, store = await lead(a)
        waiting = asyncio.ensure_future(lead(b))
        await process.visited.wait()
    async with asyncio.timeout(BOUND / 2):  # its lease lives for BOUND
        _, successor = await waiting
        with pytest.raises(Deposed):  # should it write all the same
            await store.save("key", b"late", expect=0)
    for opened in (store, successor):
        await opened.close()


async def test_a_leader_without_etcd_stops_leading_by_its_own_clock(etcd: EtcdServer, elect: Elect) -> None:
    a = elect(etcd.location(), "a", ttl=2)
    tenure, store = await lead(a)
    etcd.pause()
    async with asyncio.timeout(BOUND):
        assert "confirmed nothing" in await tenure.ended()
        with pytest.raises(Deposed):
            await store.save("key", b"1", expect=0)
    etcd.go_on()
    again, second = await lead(a)  # and stands again when etcd is back
    assert again.term > tenure.term
    assert await second.load() == {}
    await second.close()


async def test_standing_by_survives_an_outage(
    etcd: EtcdServer, elect: Elect, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = elect(etcd.location(), "a", ttl=2), elect(etcd.location(), "b", ttl=2)
    tenure, _ = await lead(a)
    waiting = asyncio.ensure_future(lead(b))
    await asyncio.sleep(0.2)  # it has begun to wait by then, or begins in the outage
    etcd.kill()
    async with asyncio.timeout(BOUND):
        await tenure.ended()
        said = Counter(r.getMessage() for r in caplog.records if "could not be renewed" in r.getMessage())
        await asyncio.to_thread(etcd.start)
        _, store = await waiting
        await store.save("key", b"1", expect=0)
    await store.close()
    assert max(said.values(), default=0) <= 2, "each of the two says the same once"


async def test_a_watch_of_a_compacted_revision_ends_and_is_begun_anew(
    etcd_location: str, shared_etcd: EtcdServer
) -> None:
    put = shared_etcd.call("kv/put", {"key": "eA==", "value": ""})
    shared_etcd.call("kv/compaction", {"revision": put["header"]["revision"]})  # type: ignore[index]
    election = EtcdElection(parse_etcd(etcd_location), seat=Seat("a:1"), ttl=5)
    async with asyncio.timeout(BOUND):
        await election._vacant(1)
    await election.close()


async def test_another_member_is_asked_when_one_does_not_answer(etcd: EtcdServer, elect: Elect) -> None:
    location = etcd.location().replace("etcd://", "etcd://127.0.0.1:1,")
    tenure, store = await lead(elect(location, "a"))
    assert await store.save("key", b"1", expect=0)
    assert not tenure.over
    await store.close()


@pytest.mark.parametrize(
    "location",
    ["etcd:///x", "etcd://host/x", "etcd://host:1/x?ca=/f", "etcd://a:1/x?colour=red", "etcd://u:p@h:1/x"],
)
def test_a_location_that_cannot_be_is_refused(location: str) -> None:
    with pytest.raises(ConfigError):
        make_election(location, seat=Seat("a:1"))
