"""Agents that come, go, fail, offer what they should not, and groups of several nodes."""

import asyncio

import grpc
import pytest
from orchestrator.world import World

from coslice.orchestrator.config import GroupConfig
from coslice.testing.fake_agent import failing, gated, slow
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1.coslice_pb2_grpc import OrchestratorStub


async def test_an_offer_opens_a_group(world: World) -> None:
    await world.start(groups=())
    await world.agent(groups=("fresh",))
    a = await world.client("job-a")
    assert (await a.acquire("fresh")).leases


async def test_closed_groups_are_listed_back(world: World) -> None:
    await world.start(groups=(GroupConfig(id="pool"),), open_groups=False)
    agent = await world.agent(groups=("pool", "fresh"))
    assert agent.unknown_groups == ("fresh",)
    a = await world.client("job-a")
    assert (await a.refused(await a.ask("fresh"))).code == pb.UNKNOWN_GROUP
    assert (await a.acquire("pool")).leases


async def test_only_the_nodes_that_were_named_may_join(world: World) -> None:
    await world.start(groups=(GroupConfig(id="pool", nodes=("n0",)),))
    stranger = await world.agent(node="n7")
    assert stranger.unknown_groups == ("pool",)
    member = await world.agent(node="n0")
    assert member.unknown_groups == ()
    a = await world.client("job-a")
    assert [node.node for node in (await a.group("pool")).nodes] == ["n0"]


async def test_a_second_agent_of_a_node_is_refused_naming_the_first(world: World) -> None:
    await world.start()
    await world.agent(node="n0", instance="first")
    second = await world.agent(node="n0", instance="second")
    assert second.refused is not None
    assert second.refused.code() is grpc.StatusCode.ALREADY_EXISTS
    assert "first" in (second.refused.details() or "")


async def test_a_restarted_agent_takes_over(world: World) -> None:
    await world.start()
    first = await world.agent(node="n0", instance="first")
    await first.stop()
    a = await world.client("job-a")
    await a.until("pool", lambda group: not group.nodes[0].attached)
    await world.agent(node="n0", instance="second")
    assert (await a.acquire("pool")).leases


async def test_a_grant_waits_for_every_node(world: World) -> None:
    gate = asyncio.Event()
    await world.start(groups=(GroupConfig(id="pool", nodes=("n0", "n1")),))
    n0 = await world.agent(node="n0")
    n1 = await world.agent(node="n1", behaviour=gated(gate))
    a, b = await world.client("job-a"), await world.client("job-b")
    await a.yielded(await a.acquire("pool"))
    wants = await b.ask("pool")
    await n0.wait_commands(1)
    await n1.wait_commands(1)
    swapping = await a.until("pool", lambda group: "n1" in group.waiters[0].reason)
    assert swapping.state == "swapping"
    assert not b.answered(wants)
    gate.set()
    assert await b.granted(wants)


async def test_a_command_waits_for_a_node_that_is_away(world: World) -> None:
    gate = asyncio.Event()
    await world.start()
    agent = await world.agent(behaviour=gated(gate))
    a, b = await world.client("job-a"), await world.client("job-b")
    held = await a.acquire("pool")
    wants = await b.ask("pool")
    await agent.stop()
    await a.until("pool", lambda group: not group.nodes[0].attached)
    await a.yielded(held)
    status = await a.until("pool", lambda group: group.state == "swapping")
    assert status.waiters[0].job == "job-b"
    gate.set()
    await agent.start()
    assert await b.granted(wants)


async def test_a_command_is_repeated_on_a_new_stream_and_answered_once(world: World) -> None:
    gate = asyncio.Event()
    await world.start()
    agent = await world.agent(behaviour=gated(gate))
    a, b = await world.client("job-a"), await world.client("job-b")
    await a.yielded(await a.acquire("pool"))
    wants = await b.ask("pool")
    await agent.wait_commands(1)
    agent.drop()
    await agent.wait_commands(2)
    assert {command.op for command in agent.commands} == {agent.commands[0].op}
    gate.set()
    grant = await b.granted(wants)
    assert grant.leases[0].epoch == agent.commands[0].epoch


async def test_a_job_whose_swap_fails_is_refused_and_the_next_is_served(world: World) -> None:
    await world.start()
    await world.agent(behaviour=failing(times=1, reason="no memory for it"))
    a, b, c = [await world.client(job) for job in ("job-a", "job-b", "job-c")]
    held = await a.acquire("pool")
    wants_b = await b.ask("pool")
    await a.until("pool", lambda group: len(group.waiters) == 1)
    wants_c = await c.ask("pool")
    await a.yielded(held)
    refused = await b.refused(wants_b)
    assert refused.code == pb.JOB_FAULTED
    assert "no memory for it" in refused.message
    assert await c.granted(wants_c)


async def test_a_slow_agent_delays_only_its_own_group(world: World) -> None:
    await world.start(groups=(GroupConfig(id="pool"), GroupConfig(id="other")))
    slow_one = await world.agent(node="n0", groups=("pool",), behaviour=slow(3600))
    await world.agent(node="n1", groups=("other",))
    a, b = await world.client("job-a"), await world.client("job-b")
    await a.yielded(await a.acquire("pool"))
    wants = await b.ask("pool")
    await slow_one.wait_commands(1)
    for _ in range(3):
        await a.yielded(await a.acquire("other"))
        await b.yielded(await b.acquire("other"))
    assert not b.answered(wants)


async def test_residency_shows_in_the_status(world: World) -> None:
    await world.start()
    agent = await world.agent(device_budget=1000)
    agent.load("pool", "job-a", 600)
    a = await world.client("job-a")
    status = await a.until("pool", lambda group: bool(group.nodes[0].contexts))
    node = status.nodes[0]
    assert (node.device_budget_bytes, node.device_used_bytes) == (1000, 600)
    assert [(c.job, c.state, c.bytes) for c in node.contexts] == [("job-a", pb.LIVE, 600)]


async def test_explain_says_why_a_job_waits(world: World) -> None:
    await world.start()
    await world.agent()
    a, b = await world.client("job-a"), await world.client("job-b")
    await a.acquire("pool")
    await b.ask("pool")
    await a.until("pool", lambda group: len(group.waiters) == 1)
    lines = await a.explain("pool", "job-b")
    assert "job-b has waited for pool" in lines[0], lines
    assert any("job-a holds the lock" in line for line in lines), lines


@pytest.mark.parametrize("offer", ["", "a b", "-x"])
async def test_an_agent_with_a_malformed_group_is_refused(world: World, offer: str) -> None:
    await world.start()
    agent = await world.agent(groups=(offer,))
    assert agent.refused is not None
    assert agent.refused.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_an_agent_said_before_an_echo_counts_for_whoever_asks_after_it(world: World) -> None:
    """A process that was set aside learns so from its agent, and acquires: nothing is granted without it."""
    await world.start()
    a = await world.client("job-a")
    async with grpc.aio.insecure_channel(world.app.address) as channel:
        stream = OrchestratorStub(channel).Attach(wait_for_ready=True)
        offer = pb.GroupOffer(group="pool", residency=pb.Residency(group="pool", version=1))
        await stream.write(pb.AgentMessage(hello=pb.AgentHello(node="n0", groups=[offer], instance="one")))
        assert (await stream.read()).HasField("welcome")
        context = pb.Context(job="job-a", state=pb.SAVED, bytes=1, incarnation="one")
        residency = pb.Residency(group="pool", version=2, contexts=[context])
        await stream.write(pb.AgentMessage(residency=residency))
        await stream.write(pb.AgentMessage(echo=pb.Echo(number=7)))
        assert (await stream.read()).echo.number == 7
        await a.ask("pool")
        assert (await stream.read()).make_resident.job == "job-a"
        stream.cancel()


async def test_nodes_with_state_on_disk_are_told_who_is_next(world: World) -> None:
    await world.start()
    spills = await world.agent(node="n0")
    spills.on_disk = 1 << 20
    spills.push("pool")
    other = await world.agent(node="n1")
    a, b, c = [await world.client(job) for job in ("job-a", "job-b", "job-c")]
    granted = await a.acquire("pool")
    await b.ask("pool")
    await spills.wait_for(lambda: spills.expected == ["job-b"])
    await c.ask("pool")
    await a.give(granted)
    await spills.wait_for(lambda: spills.expected == ["job-b", "job-c"])
    assert other.expected == []


async def test_a_drained_node_is_not_told_who_is_next(world: World) -> None:
    await world.start()
    out, serves = await world.agent(node="n0"), await world.agent(node="n1")
    for node in (out, serves):
        node.on_disk = 1 << 20
        node.push("pool")
    a, b, c = [await world.client(job) for job in ("job-a", "job-b", "job-c")]
    await a.until("pool", lambda s: all(node.disk_used_bytes for node in s.nodes))
    await a.stub.Drain(pb.DrainRequest(node="n0"))
    granted = await a.acquire("pool")
    await b.ask("pool")
    await serves.wait_for(lambda: serves.expected == ["job-b"])
    await a.stub.Drain(pb.DrainRequest(node="n0", undo=True))
    await c.ask("pool")
    await a.give(granted)
    await out.wait_for(lambda: bool(out.expected))
    assert out.expected == ["job-c"]
