"""A successor on the same store takes up every group where it was left."""

import asyncio
from pathlib import Path

import grpc
import pytest
from orchestrator.world import World

from coslice.errors import ConfigError
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import OrchestratorConfig
from coslice.testing.fake_agent import gated


async def test_lock_queue_order_and_epochs_survive(world: World, store: str) -> None:
    await world.start(store=store, session_grace=3600)
    agent = await world.agent()
    a, b, c = [await world.client(job) for job in ("job-a", "job-b", "job-c")]
    held = await a.acquire("pool")
    wants_b = await b.ask("pool")
    await a.until("pool", lambda group: len(group.waiters) == 1)
    wants_c = await c.ask("pool")
    before = await a.until("pool", lambda group: len(group.waiters) == 2)
    welcomed = agent.welcomed
    await world.restart()
    for client in (a, b, c):
        await client.ended.wait()
        assert client.status is grpc.StatusCode.UNAVAILABLE
        await client.connect()
    after = await a.group("pool")
    assert (after.state, after.job, after.epoch) == (before.state, before.job, before.epoch)
    assert [waiter.job for waiter in after.waiters] == ["job-b", "job-c"]
    assert a.welcome is not None
    assert [ref.epoch for ref in a.welcome.held] == [held.leases[0].epoch]
    await c.ask("pool", request=wants_c)  # whoever asks again first gains nothing by it
    await b.ask("pool", request=wants_b)
    await agent.wait_for(lambda: agent.welcomed > welcomed)
    await a.yielded(held)
    second = await b.granted(wants_b)
    assert not c.answered(wants_c)
    await b.yielded(second)
    third = await c.granted(wants_c)
    epochs = [grant.leases[0].epoch for grant in (held, second, third)]
    assert epochs == sorted(set(epochs))


async def test_a_swap_that_was_on_is_told_to_the_node_again(world: World, store: str) -> None:
    gate = asyncio.Event()
    await world.start(store=store, session_grace=3600)
    agent = await world.agent(behaviour=gated(gate))
    a, b = await world.client("job-a"), await world.client("job-b")
    await a.yielded(await a.acquire("pool"))
    wants = await b.ask("pool")
    await agent.wait_commands(1)
    await world.restart()
    await agent.wait_commands(2)
    assert agent.commands[0].op == agent.commands[1].op
    await b.connect()
    await b.ask("pool", request=wants)
    gate.set()
    assert await b.granted(wants)


async def test_a_yield_repeated_after_a_restart_succeeds(world: World, store: str) -> None:
    await world.start(store=store, session_grace=3600)
    await world.agent()
    a = await world.client("job-a")
    held = await a.acquire("pool")
    await a.yielded(held, request="give-1")
    await world.restart()
    await a.connect()
    await a.yielded(held, request="give-1")
    assert (await a.group("pool")).state != "held"


async def test_a_restored_backup_cannot_reuse_an_epoch_that_an_agent_has_seen(
    world: World, store: str
) -> None:
    await world.start(store=store, session_grace=3600)
    agent = await world.agent()
    a, b = await world.client("job-a"), await world.client("job-b")
    for _ in range(3):
        await a.yielded(await a.acquire("pool"))
        await b.yielded(await b.acquire("pool"))
    seen = max(command.epoch for command in agent.commands)
    await world.app.stop()
    for file in Path(store).parent.glob("state.db*"):  # the oldest backup of all: none
        file.unlink()
    welcomed = agent.welcomed
    await world.start(store=store, listen=world.app.address)
    await agent.wait_for(lambda: agent.welcomed > welcomed)
    await a.connect()
    await a.until("pool", lambda group: bool(group.nodes))
    assert (await a.acquire("pool")).leases[0].epoch > seen


async def test_a_second_orchestrator_on_the_store_is_told_who_has_it(world: World, store: str) -> None:
    await world.start(store=store)
    second = OrchestratorApp(OrchestratorConfig(listen="127.0.0.1:0", store=store))
    with pytest.raises(ConfigError, match="in use by process"):
        await second.start()
