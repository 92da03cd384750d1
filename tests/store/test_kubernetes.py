"""The Kubernetes store and its election: storms of 409, gaps in a watch, outages, writers that come late."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from store.listener import Listener

from coslice.errors import ConfigError
from coslice.store import Seat, Store, Tenure, kube_candidates, make_election
from coslice.store.base import Conflict, StoreError
from coslice.store.election import Deposed
from coslice.store.kube_api import KubeApi
from coslice.store.kube_election import LeaseElection
from coslice.store.kube_location import parse_kubernetes
from coslice.store.kubernetes import KubernetesStore
from coslice.store.reach import read
from coslice.testing.fake_kubernetes import ApiError
from coslice.testing.fake_kubernetes_http import FakeKubernetes

BOUND = 60.0
Elect = Callable[..., LeaseElection]
MAPS, LEASES = ("v1", "configmaps", "here"), ("coordination.k8s.io/v1", "leases", "here")


@pytest.fixture
def api() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as api:
        api.bookmark_s = 0.1
        yield api


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def elect(api: FakeKubernetes, stack: AsyncExitStack) -> Elect:
    def make(name: str, ttl: float = 60) -> LeaseElection:
        address = name if ":" in name else f"{name}:1"
        election = make_election(f"kubernetes://here/t?api={api.url}", seat=Seat(address), ttl=ttl)
        assert isinstance(election, LeaseElection)
        stack.push_async_callback(election.close)
        return election

    return make


def plain(api: FakeKubernetes) -> KubernetesStore:
    return KubernetesStore(KubeApi(parse_kubernetes(f"kubernetes://here/t?api={api.url}")))


async def lead(election: LeaseElection) -> tuple[Tenure, Store]:
    async with asyncio.timeout(BOUND):
        tenure, store = await election.campaign()
        await store.load()
    return tenure, store


def seize(api: FakeKubernetes) -> None:
    """Take the lead away, as if the leader had been silent for long: it does not notice."""
    lease = api.cluster.get(LEASES, "t-leader")
    lease["spec"]["holderIdentity"] = ""
    api.cluster.replace(LEASES, "t-leader", lease)


def sleep(election: LeaseElection) -> None:
    assert election._keeper is not None
    election._keeper.cancel()


# ── one writer ─────────────────────────────────────────────────────────────


async def test_a_write_whose_answer_is_lost_happens_once(api: FakeKubernetes) -> None:
    store = plain(api)
    await store.load()
    for method in ("POST", "PUT", "DELETE"):
        lost: list[str] = []

        def lose(sent: str, path: str, method: str = method, lost: list[str] = lost) -> bool:
            if sent == method and not lost:
                lost.append(path)
                return True
            return False

        api.lose = lose
        match method:
            case "POST":
                version = await store.save("key", b"1", expect=0)
            case "PUT":
                version = await store.save("key", b"2", expect=version)
            case _:
                await store.delete("key", expect=version)
        assert lost
    assert api.cluster.writes == 2
    assert await store.load() == {}
    await store.close()


async def test_who_touches_labels_only_does_not_stand_in_the_way(api: FakeKubernetes) -> None:
    store = plain(api)
    await store.load()
    version = await store.save("key", b"1", expect=0)
    (thing,), _ = api.cluster.list(MAPS)
    name = thing["metadata"]["name"]
    storm = iter(range(8))

    def touch(method: str, path: str) -> None:
        if method == "PUT" and (n := next(storm, None)) is not None:  # always just before we write
            api.cluster.patch(MAPS, name, {"metadata": {"labels": {"n": str(n)}}})

    api.fail = touch
    async with asyncio.timeout(BOUND):
        second = await store.save("key", b"2", expect=version)
    assert await store.load() == {"key": (b"2", second)}
    await store.close()


async def test_another_writer_is_a_conflict(api: FakeKubernetes) -> None:
    a, b = plain(api), plain(api)
    await a.load()
    version = await a.save("key", b"a", expect=0)
    assert await b.load() == {"key": (b"a", version)}
    second = await b.save("key", b"b", expect=version)
    with pytest.raises(Conflict) as told:
        await a.save("key", b"lost", expect=version)
    assert told.value.data["found"] == str(second)
    with pytest.raises(Conflict):
        await b.save("key", b"lost", expect=0)
    assert await a.load() == {"key": (b"b", second)}
    for store in (a, b):
        await store.close()


async def test_a_value_above_the_limit_of_config_maps_is_refused_by_name(api: FakeKubernetes) -> None:
    store = plain(api)
    await store.load()
    with pytest.raises(StoreError, match="1048576"):
        await store.save("key", b"\0" * (2 << 20), expect=0)
    assert await store.save("key", b"1", expect=0)
    await store.close()


async def test_a_long_list_is_read_in_pages_and_anew_after_a_compaction(
    api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coslice.store.kubernetes._PAGE", "2")
    store = plain(api)
    await store.load()
    for n in range(5):
        await store.save(f"key-{n}", b"1", expect=0)
    pages: list[str] = []

    def compact(method: str, path: str) -> None:
        if method == "GET":
            pages.append(path)
            if len(pages) == 2:
                api.cluster.patch(MAPS, api.cluster.list(MAPS)[0][0]["metadata"]["name"], {"x": "1"})
                api.cluster.compact()

    api.fail = compact
    assert list(await store.load()) == [f"key-{n}" for n in range(5)]
    assert len(pages) == 5  # two for nothing, then all three
    await store.close()


async def test_one_that_goes_away_in_the_middle_of_a_read_is_told_as_soon_as_one_that_never_answered(
    api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coslice.store.kubernetes._PAGE", "2")
    store = plain(api)
    await store.load()
    await asyncio.gather(*(store.save(f"key-{n}", b"1", expect=0) for n in range(5)))
    await store.close()
    lists = 0

    def down(method: str, path: str) -> bool:
        nonlocal lists
        lists += path.endswith("/configmaps")
        api.down = api.down or lists == 2
        return False

    api.lose = down
    with pytest.raises(StoreError, match=f"{api.url} did not answer within 0.5 s.*--timeout"):
        await read(f"kubernetes://here/t?api={api.url}", patience=0.5)


async def test_an_outage_shorter_than_the_lease_is_ridden_out(api: FakeKubernetes, elect: Elect) -> None:
    tenure, store = await lead(elect("a"))
    version = await store.save("key", b"1", expect=0)
    api.go_down()
    saving = asyncio.gather(store.save("key", b"2", expect=version), store.save("new", b"1", expect=0))
    await asyncio.sleep(0.2)  # the outage lasts for some attempts
    assert not saving.done()
    api.down = False
    async with asyncio.timeout(BOUND):
        versions = await saving
    assert await store.load() == {"key": (b"2", versions[0]), "new": (b"1", versions[1])}
    assert not tenure.over
    await store.close()


# ── several ────────────────────────────────────────────────────────────────


async def test_one_leads_and_the_others_know_whom_to_dial(elect: Elect) -> None:
    a, b = elect("a"), elect("b")
    first, _ = await lead(a)
    waiting = asyncio.ensure_future(lead(b))
    async with asyncio.timeout(BOUND):
        while b.hearsay.leader != Seat("a:1"):  # noqa: ASYNC110  # it tells nobody whom it heard of
            await asyncio.sleep(0.01)
    assert not waiting.done()
    await a.close()  # resigns: nobody waits for its lease to run out
    async with asyncio.timeout(BOUND):
        second, _ = await waiting
    assert second.term > first.term


async def test_who_stands_by_is_known_while_it_lives(
    api: FakeKubernetes, elect: Elect, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = elect("a"), elect("b"), elect("c")
    await lead(a)
    waiting = [asyncio.ensure_future(one.campaign()) for one in (b, c)]

    async def until_known(*addresses: str) -> None:
        async with asyncio.timeout(BOUND):
            while sorted(seat.address for seat in await a.candidates()) != list(addresses):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # it is announced to nobody

    await until_known("a:1", "b:1", "c:1")
    await b.close()
    await until_known("a:1", "c:1")
    assert c._known._task is not None
    c._known._task.cancel()  # as if it had been killed
    for later, left in ((kube_candidates.LIVES_S, 2), (kube_candidates.LEFT_S, 1)):
        now = time.time() + later + 1
        monkeypatch.setattr(kube_candidates, "time", SimpleNamespace(time=lambda now=now: now))
        await a._known._renew()
        await until_known("a:1")
        await a._known.clear()
        assert len(api.cluster.list(LEASES, labels="coslice-candidate=t")[0]) == left
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_of_one_who_was_deposed_every_write_is_refused(api: FakeKubernetes, elect: Elect) -> None:
    a, b = elect("a"), elect("b")
    tenure, store = await lead(a)
    version = await store.save("key", b"a", expect=0)
    other = await store.save("other", b"a", expect=0)
    sleep(a)
    seize(api)
    _, successor = await lead(b)
    before = api.cluster.list(MAPS)[0]
    results = await asyncio.gather(
        store.save("key", b"late", expect=version),
        store.delete("other", expect=other),
        store.save("new", b"late", expect=0),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [Deposed] * 3
    assert "elected" in await tenure.ended()
    counted = await successor.load()
    assert {key: value for key, (value, _) in counted.items()} == {"key": b"a", "other": b"a"}
    there = {thing["data"]["key"]: thing for thing in api.cluster.list(MAPS)[0]}
    assert [there[thing["data"]["key"]] for thing in before] == before
    for opened in (store, successor):
        await opened.close()


async def test_what_a_deposed_leader_created_late_counts_for_nothing(
    api: FakeKubernetes, elect: Elect
) -> None:
    """The one write that cannot be refused: an object that was not there. Its creator is told, and its
    successors ignore it."""
    a, b, c = elect("a"), elect("b"), elect("c")
    _, store = await lead(a)
    sleep(a)
    seize(api)
    _, successor = await lead(b)
    with pytest.raises(Deposed):
        await store.save("late", b"void", expect=0)
    with pytest.raises(Deposed):
        await store.save("left", b"void", expect=0)
    assert await successor.save("late", b"real", expect=0)
    await b.close()
    _, third = await lead(c)
    assert {key: value for key, (value, _) in (await third.load()).items()} == {"late": b"real"}
    assert len(api.cluster.list(MAPS)[0]) == 1


async def test_a_write_that_crosses_the_take_over_is_taken_over_or_refused(
    api: FakeKubernetes, elect: Elect
) -> None:
    """The predecessor writes just before its object is taken: the successor has that, and nothing later."""
    a, b = elect("a"), elect("b")
    _, store = await lead(a)
    version = await store.save("key", b"1", expect=0)
    sleep(a)
    seize(api)
    crossed: list[int] = []
    thing = api.cluster.list(MAPS)[0][0]

    def cross(method: str, path: str) -> None:
        if method == "PUT" and "configmaps" in path and not crossed:
            crossed.append(1)
            late = {
                "binaryData": {"state": "Mg=="},
                "data": {"writes": "2"},
            }  # b"2", as the predecessor would
            api.cluster.patch(MAPS, thing["metadata"]["name"], late)

    api.fail = cross
    _, successor = await lead(b)
    assert crossed
    assert {key: value for key, (value, _) in (await successor.load()).items()} == {"key": b"2"}
    with pytest.raises((Deposed, Conflict)):
        await store.save("key", b"3", expect=version)


async def test_a_leader_without_the_api_stops_leading_by_its_own_clock(
    api: FakeKubernetes, elect: Elect
) -> None:
    a = elect("a", ttl=1)
    tenure, store = await lead(a)
    api.go_down()
    async with asyncio.timeout(BOUND):
        assert "confirmed nothing" in await tenure.ended()
        with pytest.raises(Deposed):
            await store.save("key", b"1", expect=0)
    api.down = False
    again, _ = await lead(a)
    assert again.term > tenure.term


async def test_a_silent_leader_is_succeeded_over_gaps_in_the_watch(api: FakeKubernetes, elect: Elect) -> None:
    a, b = elect("a", ttl=2), elect("b", ttl=2)
    first, _ = await lead(a)
    waiting = asyncio.ensure_future(lead(b))
    for _ in range(5):  # the watch of the one who waits has to begin anew each time
        await asyncio.sleep(0.2)  # so that its watch is on again
        api.cluster.create(("v1", "pods", "here"), {"metadata": {"generateName": "p-"}})
        api.cluster.compact()
        api.cluster.drop_watches()
    assert not waiting.done()  # its renewals count, though none was seen as an event
    sleep(a)
    async with asyncio.timeout(BOUND):
        second, _ = await waiting
    assert second.term == first.term + 1


async def test_of_a_process_that_is_gone_the_lease_is_not_waited_for(
    api: FakeKubernetes, elect: Elect
) -> None:
    async with Listener() as process:
        a, b = elect(process.address), elect("b")
        first, store = await lead(a)
        sleep(a)
        waiting = asyncio.ensure_future(lead(b))
        await process.visited.wait()
    async with asyncio.timeout(BOUND / 2):  # its lease lives for BOUND
        second, successor = await waiting
    assert second.term == first.term + 1
    with pytest.raises(Deposed):  # should it write all the same
        await store.save("key", b"late", expect=0)
    for opened in (store, successor):
        await opened.close()


async def test_bookmarks_do_not_stand_for_the_lease(api: FakeKubernetes, elect: Elect) -> None:
    """They say how far the watch is, which is further than the last change of what is watched."""
    a, b = elect("a", ttl=1), elect("b", ttl=1)
    first, _ = await lead(a)
    waiting = asyncio.ensure_future(lead(b))
    sleep(a)
    async with asyncio.timeout(BOUND):
        while not waiting.done():
            api.cluster.create(("v1", "pods", "here"), {"metadata": {"generateName": "p-"}})
            await asyncio.sleep(0.05)  # the pace of others that write
    assert (await waiting)[0].term == first.term + 1


async def test_a_lease_that_others_touch_is_still_renewed(api: FakeKubernetes, elect: Elect) -> None:
    tenure, _ = await lead(elect("a", ttl=1))
    for n in range(15):
        api.cluster.patch(LEASES, "t-leader", {"metadata": {"labels": {"n": str(n)}}})
        await asyncio.sleep(0.1)  # the pace of others that write
    assert not tenure.over


async def test_missing_rights_are_no_reason_to_wait(api: FakeKubernetes, elect: Elect) -> None:
    api.fail = lambda method, path: ApiError(403, "Forbidden", "leases is forbidden")
    with pytest.raises(StoreError, match=r"403.*forbidden.*rights"):
        await elect("a").campaign()


@pytest.mark.parametrize(
    "location", ["kubernetes://", "kubernetes://Here", "kubernetes://a/b/c", "kubernetes://a?colour=red"]
)
def test_a_location_that_cannot_be_is_refused(location: str) -> None:
    with pytest.raises(ConfigError):
        make_election(location, seat=Seat("a:1"))


def test_labels_and_fields_select_as_they_do_there(api: FakeKubernetes) -> None:
    pods = ("v1", "pods", "here")
    things: list[dict[str, Any]] = [
        {"metadata": {"name": "a", "labels": {"app": "x", "tier": "1"}}, "spec": {"nodeName": "n1"}},
        {"metadata": {"name": "b", "labels": {"app": "y"}}, "spec": {"nodeName": "n2"}},
        {"metadata": {"name": "c"}, "spec": {"nodeName": "n1"}},
    ]
    for thing in things:
        api.cluster.create(pods, thing)

    def names(labels: str = "", fields: str = "") -> str:
        return "".join(thing["metadata"]["name"] for thing in api.cluster.list(pods, labels, fields)[0])

    assert names("app=x") == names("app==x") == names("app in (x, z)") == names("app,tier") == "a"
    assert names("app!=x") == names("app notin (x)") == "bc"
    assert names("!app") == "c"
    assert names("app in (x,y),tier=1") == "a"
    assert names(fields="spec.nodeName=n1") == "ac"
    assert names(fields="spec.nodeName!=n1") == "b"
    assert names("app", "metadata.name=b") == "b"
