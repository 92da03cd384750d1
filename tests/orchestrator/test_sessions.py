"""Clients that change their mind, vanish, come back or repeat themselves."""

import asyncio
import gc
import io
import weakref
from pathlib import Path

import pytest
from orchestrator.hours import Hand
from orchestrator.world import World
from rich.console import Console

from coslice.cli.show import _page
from coslice.runtime.journal import read_journal
from coslice.store.memory import MemoryStore
from coslice.testing.fake_agent import gated
from coslice.wire.v1 import coslice_pb2 as pb


def _idle(group: pb.GroupStatus) -> bool:
    return group.state in ("empty", "resident") and not group.waiters


async def test_an_abandoned_waiter_leaves_nothing(world: World) -> None:
    await world.start()
    await world.agent()
    a, b, c = [await world.client(job) for job in ("job-a", "job-b", "job-c")]
    held = await a.acquire("pool")
    wants_b = await b.ask("pool")
    await a.until("pool", lambda group: len(group.waiters) == 1)
    wants_c = await c.ask("pool")
    await b.abandon(wants_b)
    await a.until("pool", lambda group: [w.job for w in group.waiters] == ["job-c"])
    await a.yielded(held)
    await c.yielded(await c.granted(wants_c))
    assert not b.answered(wants_b)
    await a.until("pool", _idle)


async def test_a_grant_that_was_saved_late_can_be_confirmed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, save = Hand(), MemoryStore.save

    async def slow(self: MemoryStore, key: str, value: bytes, *, expect: int) -> int:
        monkeypatch.setattr(MemoryStore, "save", save)
        clock.at += 60.0
        return await save(self, key, value, expect=expect)

    await world.start(clock=clock)
    await world.agent()
    a = await world.client("job-a")
    await a.until("pool", lambda group: bool(group.nodes))
    monkeypatch.setattr(MemoryStore, "save", slow)
    await a.yielded(await a.acquire("pool"))
    assert clock.at == 60.0


async def test_a_swap_whose_caller_left_ends_with_a_free_lock(world: World) -> None:
    gate = asyncio.Event()
    await world.start()
    agent = await world.agent(behaviour=gated(gate))
    a, b = await world.client("job-a"), await world.client("job-b")
    await a.yielded(await a.acquire("pool"))
    wants = await b.ask("pool")
    await agent.wait_commands(1)
    await b.abandon(wants)
    gate.set()
    await a.until("pool", _idle)
    assert (await a.acquire("pool")).leases[0].epoch > 1


async def test_abandon_races_with_grant(world: World) -> None:
    """However the two meet: no waiter and no lease is left, and the lock still works."""
    await world.start()
    await world.agent()
    a, b = await world.client("job-a"), await world.client("job-b")
    for _ in range(200):
        held = await a.acquire("pool")
        wants = await b.ask("pool")
        giving = asyncio.create_task(a.give(held))
        await b.abandon(wants)
        assert (await giving).HasField("yielded")
    last = await a.until("pool", _idle)
    assert last.epoch >= 200
    assert a.news.empty()
    await b.yielded(await b.acquire("pool"))


async def test_an_unconfirmed_grant_is_taken_back(world: World) -> None:
    await world.start(confirm_timeout=0.1)
    await world.agent()
    a = await world.client("job-a")
    request = await a.ask("pool")
    grant = await a.answer(request)
    lost = await a.news.get()
    assert lost.lease_lost.epoch == grant.granted.leases[0].epoch
    await a.until("pool", _idle)


async def test_a_killed_waiter_keeps_its_place_and_is_passed_over(world: World) -> None:
    await world.start(session_grace=3600)
    await world.agent()
    a, b, c = [await world.client(job) for job in ("job-a", "job-b", "job-c")]
    held = await a.acquire("pool")
    wants_b = await b.ask("pool")
    await a.until("pool", lambda group: len(group.waiters) == 1)
    wants_c = await c.ask("pool")
    await a.until("pool", lambda group: len(group.waiters) == 2)
    b.kill()
    status = await a.until("pool", lambda group: "passed over" in group.waiters[0].reason)
    assert [waiter.job for waiter in status.waiters] == ["job-b", "job-c"]
    await a.yielded(held)
    theirs = await c.granted(wants_c)
    status = await a.group("pool")
    assert [waiter.job for waiter in status.waiters] == ["job-b"]
    await b.ended.wait()
    await b.connect()
    await b.ask("pool", request=wants_b)
    await c.yielded(theirs)
    assert await b.granted(wants_b)


async def test_a_killed_waiter_is_removed_after_its_grace(world: World) -> None:
    await world.start(session_grace=0.1)
    await world.agent()
    a, b = await world.client("job-a"), await world.client("job-b")
    await a.acquire("pool")
    await b.ask("pool")
    await a.until("pool", lambda group: len(group.waiters) == 1)
    b.kill()
    status = await a.until("pool", lambda group: not group.waiters)
    assert status.state == "held"


async def test_a_killed_holder_keeps_its_lease_for_the_grace_only(world: World) -> None:
    await world.start(session_grace=0.1)
    await world.agent()
    a, b = await world.client("job-a"), await world.client("job-b")
    await a.acquire("pool")
    wants = await b.ask("pool")
    await b.until("pool", lambda group: len(group.waiters) == 1)
    a.kill()
    assert await b.granted(wants)


async def test_a_lost_connection_shows_in_the_status(world: World) -> None:
    """What is left of the grace, of the holder, of a waiter, and of the jobs; and on the page for people."""
    await world.start(session_grace=3600)
    await world.agent()
    a, b, c = [await world.client(f"job-{name}") for name in "abc"]
    await a.acquire("pool")
    await b.ask("pool")
    await c.until("pool", lambda s: len(s.waiters) == 1)
    status = await c.group("pool")
    assert not status.HasField("lost_left_s")
    assert not status.waiters[0].HasField("lost_left_s")
    a.kill()
    b.kill()
    status = await c.until(
        "pool", lambda s: s.HasField("lost_left_s") and s.waiters[0].HasField("lost_left_s")
    )
    assert 3500 < status.lost_left_s <= 3600
    assert [job.job for job in status.jobs if job.HasField("lost_left_s")] == ["job-a", "job-b"]
    page = Console(width=300, file=io.StringIO())
    page.print(_page(pb.GetStatusResponse(groups=[status])))
    text = page.file.getvalue()
    assert text.count("connection lost, 3") == 2
    assert "its connection is lost, 3" in text
    assert any("its connection is lost" in line for line in await c.explain("pool"))


async def test_a_goodbye_ends_the_lease_at_once(world: World) -> None:
    await world.start(session_grace=3600)
    await world.agent()
    a, b = await world.client("job-a"), await world.client("job-b")
    await a.acquire("pool")
    wants = await b.ask("pool")
    await a.goodbye()
    assert await b.granted(wants)


async def test_a_client_that_is_back_within_its_grace_keeps_place_and_lease(world: World) -> None:
    await world.start(session_grace=3600)
    await world.agent()
    a, b = await world.client("job-a"), await world.client("job-b")
    held = await a.acquire("pool")
    wants = await b.ask("pool")
    await a.until("pool", lambda group: len(group.waiters) == 1)
    for client in (a, b):
        client.kill()
        await client.ended.wait()
        await client.connect()
    assert a.welcome is not None
    assert [(ref.group, ref.epoch) for ref in a.welcome.held] == [("pool", held.leases[0].epoch)]
    await b.ask("pool", request=wants)
    await a.yielded(held)
    assert await b.granted(wants)


async def test_a_second_stream_replaces_a_half_open_one(world: World) -> None:
    await world.start(session_grace=3600)
    await world.agent()
    a = await world.client("job-a")
    held = await a.acquire("pool")
    newer = await world.client("job-a", session=a.session)
    assert newer.welcome is not None
    assert newer.welcome.held
    async with asyncio.timeout(20):
        await a.ended.wait()
    status = await newer.group("pool")
    assert status.state == "held"
    await newer.yielded(held)


async def test_a_repeated_acquire_gets_the_same_grant(world: World) -> None:
    await world.start()
    await world.agent()
    a = await world.client("job-a")
    request = await a.ask("pool")
    first = await a.granted(request)
    a.forget(request)
    await a.ask("pool", request=request)
    again = await a.granted(request)
    assert again.leases[0].epoch == first.leases[0].epoch


async def test_a_repeated_yield_succeeds_and_yields_once(world: World) -> None:
    await world.start()
    await world.agent()
    a, b = await world.client("job-a"), await world.client("job-b")
    held = await a.acquire("pool")
    wants = await b.ask("pool")
    await a.yielded(held, request="give-1")
    theirs = await b.granted(wants)
    await a.yielded(held, request="give-1")
    status = await a.group("pool")
    assert (status.state, status.job, status.epoch) == ("held", "job-b", theirs.leases[0].epoch)


async def test_processes_of_one_incarnation_share_a_lease(world: World) -> None:
    await world.start()
    await world.agent()
    ranks = [await world.client("job-a") for _ in range(2)]
    other = await world.client("job-b")
    grants = [await rank.granted(await rank.ask("pool", world=2)) for rank in ranks]
    assert grants[0].leases[0].epoch == grants[1].leases[0].epoch
    wants = await other.ask("pool")
    await other.until("pool", lambda group: len(group.waiters) == 1)
    await ranks[0].yielded(grants[0])
    assert (await other.group("pool")).state == "held"
    await ranks[1].yielded(grants[1])
    assert await other.granted(wants)


async def test_notes_reach_the_journal(world: World, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    await world.start(journal=str(path))
    await world.agent()
    a = await world.client("job-a")
    await a.send(note=pb.Note(name="reward", value=0.5, step=3))
    await a.yielded(await a.acquire("pool"))
    await world.app.stop()
    records = read_journal(path).records
    notes = [record["note"] for record in records if "note" in record]
    assert [(note["job"], note["name"], note["value"], note["step"]) for note in notes] == [
        ("job-a", "reward", 0.5, 3)
    ]
    kinds = [record["event"]["type"] for record in records if "event" in record]
    assert "AcquireRequested" in kinds
    assert "LeaseYielded" in kinds


async def test_a_session_that_is_given_up_is_freed_without_the_garbage_collector(world: World) -> None:
    """It would have to look at every session that is left."""
    app = await world.start(session_grace=0.05)
    await world.agent()
    a, b = await world.client("job-a"), await world.client("job-b")
    await a.yielded(await a.acquire("pool"))
    shown = app._shown
    assert shown is not None
    gone = next(weakref.ref(session) for session in shown.sessions.connected() if session.who.job == "job-a")
    gc.disable()
    try:
        a.kill()
        await b.until("pool", lambda group: [job.job for job in group.jobs if job.sessions] == [])
        async with asyncio.timeout(10):
            while gone() is not None:  # noqa: ASYNC110  what is freed tells nobody
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
