"""An orchestrator with a shared store, before it is elected."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orchestrator.world import World

from coslice.agent.link import Link
from coslice.errors import ConfigError
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import OrchestratorConfig
from coslice.store import MemoryStore, Seat, Tenure
from coslice.store.election import Alone
from coslice.wire.leader import LEADER, LEADER_FOR_AGENTS, LEADER_ID, SILENT
from coslice.wire.outgoing import Outgoing
from coslice.wire.protocol import PROTOCOL
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

NOWHERE = "etcd://127.0.0.1:1/nobody"
"""Nobody is ever elected there."""


async def test_it_is_healthy_and_serves_nothing(world: World) -> None:
    app = await world.start(store=NOWHERE)
    async with grpc.aio.insecure_channel(app.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name, word in (("", "SERVING"), ("coslice.v1.Orchestrator", "NOT_SERVING")):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == word
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await rpc.OrchestratorStub(channel).GetStatus(pb.GetStatusRequest())
        assert told.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no leader" in str(told.value.details())


async def test_it_says_where_the_leader_is(world: World) -> None:
    app = await world.start(store=NOWHERE)
    assert app._election is not None
    await app._standing.stop()  # it hears what we say, and nothing else
    app._election.hearsay.leader = Seat("leader:1", "leader:2", "it")
    async with grpc.aio.insecure_channel(app.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as told:
            async for _ in rpc.OrchestratorStub(channel).Session(iter([])):  # type: ignore[attr-defined]
                pass
    assert dict(told.value.trailing_metadata()) == {
        LEADER: "leader:1",
        LEADER_FOR_AGENTS: "leader:2",
        LEADER_ID: "it",
    }
    assert told.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_who_found_the_leader_silent_is_answered_once_there_is_another(world: World) -> None:
    app = await world.start(store=NOWHERE)
    assert app._election is not None
    await app._standing.stop()
    hearsay = app._election.hearsay
    hearsay.leader = Seat("old:1", id="old")
    async with grpc.aio.insecure_channel(app.address) as channel:
        call = rpc.OrchestratorStub(channel).Session(iter([]), metadata=((SILENT, "old"),))  # type: ignore[call-arg, arg-type]
        await asyncio.sleep(0.2)  # time for an answer that must not come
        assert not call.done()
        hearsay.leader = Seat("new:1", id="new")
        assert dict(await call.trailing_metadata())[LEADER] == "new:1"  # type: ignore[misc, call-overload]


async def test_who_waits_where_the_leader_is_elected_is_served_there(world: World) -> None:
    app = await world.start(store=NOWHERE)
    assert app._election is not None
    await app._standing.stop()
    seat = Seat("127.0.0.1:1", id="old")
    app._election.hearsay.leader = seat
    async with grpc.aio.insecure_channel(app.address) as channel:
        stub: Any = rpc.OrchestratorStub(channel)
        hello = pb.Hello(job="a", incarnation="1", session="s")
        words = [pb.ClientMessage(hello=hello), pb.ClientMessage(goodbye=pb.Goodbye())]
        call = stub.Session(iter(words), metadata=((SILENT, "old"),))
        answers = asyncio.ensure_future(_all(call))
        while not app._election.hearsay.callers:  # noqa: ASYNC110  # who waits is announced to nobody
            await asyncio.sleep(0.01)
        await app._begin_term(Tenure(), MemoryStore())
        app._election.hearsay.leader = Seat(app.address, id="new")
        (welcome,) = await answers
    assert welcome.welcome.orchestrator == app.instance


async def _all(call: Any) -> list[pb.ServerMessage]:
    return [message async for message in call]


async def test_a_refusal_is_heard_by_one_who_has_much_to_say(world: World) -> None:
    """In grpc.aio it may be lost where it crosses with a message, so it is tried often."""
    app = await world.start(store=NOWHERE)
    assert app._election is not None
    await app._standing.stop()
    app._election.hearsay.leader = Seat("leader:1", id="it")
    async with grpc.aio.insecure_channel(app.address) as channel:
        stub: Any = rpc.OrchestratorStub(channel)
        for _ in range(50):
            words: Outgoing[pb.ClientMessage] = Outgoing()
            words.put(pb.ClientMessage(hello=pb.Hello()))
            for number in range(5):
                words.put(pb.ClientMessage(acquire=pb.Acquire(request=str(number))))
            call = stub.Session(words)
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await _all(call)
            words.answered()
            assert dict(told.value.trailing_metadata())[LEADER] == "leader:1"


async def test_one_that_cannot_read_what_a_newer_one_saved_does_not_stay_the_leader(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    await store.save("group/pool", b'{"kind":"group","schema":99,"state":{}}', expect=0)
    closed: list[str] = []

    class Elected(Alone):
        async def close(self) -> None:
            closed.append("gives the lead up")

    monkeypatch.setattr("coslice.orchestrator.app.make_election", lambda *_, **__: Elected(store))
    app = await world.start(store=NOWHERE)
    async with asyncio.timeout(20):
        with pytest.raises(
            ConfigError, match=r"group/pool in the store: .* schema 99 .* use the newer coslice"
        ):
            await app.wait()
    await app.stop()
    assert closed


async def test_an_agent_that_is_refused_again_and_again_leaves_no_task_behind(world: World) -> None:
    """Each would be an error in its log, once it is collected."""
    app = await world.start(store=NOWHERE)
    assert app._election is not None
    await app._standing.stop()
    app._election.hearsay.leader = Seat("leader:1", id="it")
    hellos, often = 0, asyncio.Event()

    def hello() -> pb.AgentHello:
        nonlocal hellos
        hellos += 1
        if hellos == 4:
            often.set()
        return pb.AgentHello(node="n0", protocol=PROTOCOL)

    running = asyncio.create_task(Link(app.address, hello=hello, command=lambda _: None).run())
    async with asyncio.timeout(20):
        await often.wait()
    writing = [task for task in asyncio.all_tasks() if "_consume_request_iterator" in repr(task)]
    running.cancel()
    await asyncio.wait([running])
    assert len(writing) <= 2, "of the last two attempts"


async def test_a_shared_store_is_not_reached_in_the_clear_unasked() -> None:
    config = OrchestratorConfig(listen="127.0.0.1:0", store="etcd://etcd.example:2379/coslice")
    with pytest.raises(ConfigError, match=r"etcd\+tls"):
        await OrchestratorApp(config).start()
