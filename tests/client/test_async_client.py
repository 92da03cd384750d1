"""``AsyncClient`` has the semantics of ``Client``, on an event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from client.fake_server import BOUND, FakeOrchestrator

import coslice
from coslice import errors
from coslice.client import aio_link
from coslice.client.holder import caller
from coslice.gate import GATE

Connect = Callable[..., coslice.AsyncClient]


@pytest.fixture
async def connect(fake: FakeOrchestrator) -> AsyncIterator[Connect]:
    clients: list[coslice.AsyncClient] = []

    def connect(job: str = "job-1", **settings: Any) -> coslice.AsyncClient:
        settings = {"groups": "a", "reconnect_timeout": 20.0, **settings}
        clients.append(coslice.AsyncClient(fake.address, job=job, **settings))
        return clients[-1]

    yield connect
    for client in clients:
        await client.close()
    assert GATE.active == 0


@pytest.fixture
def client(connect: Connect) -> coslice.AsyncClient:
    return connect()


async def off_loop(wait: Callable[..., None], *args: Any) -> None:
    await asyncio.to_thread(wait, *args)


async def test_acquire_and_yield(fake: FakeOrchestrator, client: coslice.AsyncClient) -> None:
    grant = await client.acquire()
    assert grant.leases[0].group == "a"
    assert fake.holder("a")
    assert await client.yield_() is True
    assert fake.holder("a") is None


async def test_reentry_is_counted_across_tasks(fake: FakeOrchestrator, client: coslice.AsyncClient) -> None:
    inside = asyncio.Barrier(3)

    async def work() -> None:
        async with client.on_accelerators():
            await inside.wait()

    async with asyncio.timeout(BOUND):
        await asyncio.gather(work(), work(), work())
    await off_loop(fake.until_free, "a")
    assert fake.count("acquire") == fake.yields_applied == 1


async def test_decorated_coroutines_and_async_generators_hold_while_they_run(
    fake: FakeOrchestrator, client: coslice.AsyncClient
) -> None:
    @client.on_accelerators
    async def generate() -> str | None:
        await asyncio.sleep(0)
        return fake.holder("a")

    @client.on_accelerators(phase="stream")
    async def rollouts() -> AsyncIterator[str | None]:
        yield fake.holder("a")

    assert await generate()
    assert fake.holder("a") is None
    assert [held is not None async for held in rollouts()] == [True]
    assert fake.holder("a") is None
    assert [asked.phase for asked in fake.contents("acquire")] == ["generate", "stream"]


async def test_plain_functions_and_plain_with_are_refused(client: coslice.AsyncClient) -> None:
    with pytest.raises(TypeError, match=r"coslice\.connect"):
        client.on_accelerators(lambda: None)
    with pytest.raises(TypeError, match="async with"), client.on_accelerators():
        pass


async def test_cancelling_leaves_no_waiter(fake: FakeOrchestrator, client: coslice.AsyncClient) -> None:
    fake.take("a")
    task = asyncio.create_task(client.acquire())
    await off_loop(fake.until_waiting, "a", 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await off_loop(fake.until_waiting, "a", 0)


async def test_a_cancelled_body_yields(fake: FakeOrchestrator, client: coslice.AsyncClient) -> None:
    inside = asyncio.Event()

    @client.on_accelerators
    async def generate() -> None:
        inside.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(generate())
    async with asyncio.timeout(BOUND):
        await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await off_loop(fake.until_free, "a")


async def test_bounds(fake: FakeOrchestrator, client: coslice.AsyncClient) -> None:
    fake.take("a")
    with pytest.raises(errors.AcquireTimeout):
        await client.acquire(timeout=0.05)
    nobody = coslice.AsyncClient("127.0.0.1:1", job="j", groups="a", connect_timeout=0.2)
    with pytest.raises(errors.OrchestratorUnreachable, match="coslice up"):
        await nobody.acquire()
    with pytest.raises(errors.OrchestratorUnreachable, match="coslice up"):
        await nobody.status(timeout=1.0)
    await nobody.close()


async def test_refusals(fake: FakeOrchestrator, client: coslice.AsyncClient) -> None:
    with pytest.raises(errors.UnknownGroup, match="a,b,c"):
        await client.acquire("nope")
    with pytest.raises(errors.UnknownGroup, match="a,b,c"):
        await client.status("nope")
    with pytest.raises(errors.NotHeld):
        await client.yield_()


async def test_the_users_exception_stays_primary(fake: FakeOrchestrator, client: coslice.AsyncClient) -> None:
    @client.on_accelerators
    async def train() -> None:
        fake.lose_silently("a")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as raised:
        await train()
    assert any("not held" in note for note in raised.value.__notes__)


async def test_lost_answers_and_outages(fake: FakeOrchestrator, client: coslice.AsyncClient) -> None:
    fake.unavailable = 2
    fake.break_after("acquire")
    await client.acquire()
    assert fake.groups["a"].epoch == 1
    fake.break_after("yield")
    assert await client.yield_()
    await off_loop(fake.until, lambda: fake.count("yield") == 2)
    assert fake.yields_applied == 1
    assert len({hello.session for hello in fake.hellos}) == 1


async def test_a_waiter_keeps_its_place_over_a_restart(
    fake: FakeOrchestrator, client: coslice.AsyncClient
) -> None:
    give = fake.take("a")
    task = asyncio.create_task(client.acquire())
    await off_loop(fake.until_waiting, "a", 1)
    await off_loop(fake.kill)
    fake.start()
    await off_loop(fake.until, lambda: fake.count("acquire") == 2)
    give()
    async with asyncio.timeout(BOUND):
        await task
    assert await client.yield_()


async def test_several_groups(fake: FakeOrchestrator, client: coslice.AsyncClient) -> None:
    await client.acquire(["a", "b"])
    assert await client.yield_("a")
    assert fake.holder("b")
    assert await client.yield_()
    assert fake.holder("b") is None


async def test_lost_leases_and_should_yield(fake: FakeOrchestrator, client: coslice.AsyncClient) -> None:
    await client.acquire()
    fake.ask_to_yield("a")
    fake.lose("a", "overrun")
    client.note("reward", 1.0)
    await off_loop(fake.until, lambda: fake.count("note") == 1)
    with pytest.raises(errors.LeaseLost):
        await client.yield_()
    assert await client.yield_()


async def test_closing_gives_everything_back(fake: FakeOrchestrator, connect: Connect) -> None:
    async with connect() as client:
        await client.acquire(["a", "b"])
    await off_loop(fake.until, lambda: fake.count("goodbye") == 1)
    assert fake.holder("a") is fake.holder("b") is None


def test_the_end_of_the_loop_gives_everything_back(fake: FakeOrchestrator) -> None:
    async def main() -> None:
        await coslice.AsyncClient(fake.address, job="j", groups="a").acquire()

    asyncio.run(main())
    fake.until(lambda: fake.count("goodbye") == 1)
    assert fake.holder("a") is None
    GATE.leave()


def test_loops_that_are_closed_are_let_go(fake: FakeOrchestrator) -> None:
    async def step() -> None:
        async with coslice.AsyncClient(fake.address, job="j", groups="a").on_accelerators():
            pass

    for _ in range(3):  # as a job that has a loop for each of its steps
        asyncio.run(step())
    assert sum(loop.is_closed() for loop in aio_link._links) == 1, "the last one goes with the next"


async def test_two_tasks_of_which_one_has_the_number_of_the_other_are_two() -> None:
    async def one() -> tuple[int, object]:
        return id(asyncio.current_task()), caller()

    first, who = await asyncio.create_task(one())
    for _ in range(1000):
        later, other = await asyncio.create_task(one())
        assert other != who
        if later == first:
            break
    me = caller()
    assert me == caller()


async def test_without_an_address_it_does_nothing() -> None:
    client = coslice.AsyncClient(None)
    async with client.on_accelerators() as grant:
        assert grant.leases == ()
        assert GATE.active == 1
    assert await client.acquire() == coslice.Grant()
    assert await client.yield_()
    assert await client.status() == coslice.Status()
    assert not client.should_yield()
    client.note("reward", 1.0)
    await client.close()
    assert GATE.active == 0
