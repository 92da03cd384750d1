"""Two versions of the wire: what is new and unknown is ignored, what cannot work is refused by name."""

import grpc
import grpc.aio
import pytest
from orchestrator.raw_client import BOUND
from orchestrator.world import World

from coslice.wire.protocol import PROTOCOL
from coslice.wire.v1 import coslice_pb2 as pb

NEW_FIELD = b"\xba\x3e\x05fresh"
"""Field 999, a string: of a version that is still to come."""
HELLO = pb.Hello(job="job-a", incarnation="one", session="s-1")
OFFER = pb.GroupOffer(group="pool", residency=pb.Residency(group="pool", version=1))


def methods(channel: grpc.aio.Channel, name: str) -> grpc.aio.StreamStreamMultiCallable:
    """A stream of bytes, so that a message can have fields that our classes do not."""
    return channel.stream_stream(f"/coslice.v1.Orchestrator/{name}")


async def first_answer(world: World, name: str, message: bytes) -> bytes:
    async with grpc.aio.insecure_channel(world.app.address) as channel:
        call = methods(channel, name)(timeout=BOUND)
        await call.write(message)
        answer: bytes = await call.read()
        call.cancel()
        return answer


def enveloped(hello: bytes) -> bytes:
    """As ``hello`` of a client's or an agent's message (field 1 of both), with a new field beside it."""
    return b"\x0a" + bytes([len(hello)]) + hello + NEW_FIELD


async def test_fields_of_a_newer_version_are_ignored(world: World) -> None:
    await world.start()
    said = await first_answer(world, "Session", enveloped(HELLO.SerializeToString() + NEW_FIELD))
    assert pb.ServerMessage.FromString(said).welcome.protocol == PROTOCOL
    agent = pb.AgentHello(node="n0", groups=[OFFER], instance="one", protocol=PROTOCOL)
    said = await first_answer(world, "Attach", enveloped(agent.SerializeToString() + NEW_FIELD))
    assert pb.AgentCommand.FromString(said).welcome.protocol == PROTOCOL


async def test_who_says_no_version_speaks_the_first(world: World) -> None:
    await world.start()
    said = await first_answer(world, "Session", pb.ClientMessage(hello=HELLO).SerializeToString())
    assert pb.ServerMessage.FromString(said).HasField("welcome") is (PROTOCOL == 1)


async def test_a_client_of_another_version_is_refused_naming_both(world: World) -> None:
    await world.start()
    newer = pb.Hello(protocol=PROTOCOL + 1)
    newer.MergeFrom(HELLO)
    said = await first_answer(world, "Session", pb.ClientMessage(hello=newer).SerializeToString())
    refused = pb.ServerMessage.FromString(said).refused
    assert refused.code == pb.INVALID
    assert f"version {PROTOCOL + 1} of coslice's wire" in refused.message
    assert f"version {PROTOCOL}: upgrade this orchestrator" in refused.message


async def test_an_agent_of_another_version_is_refused_naming_both(world: World) -> None:
    await world.start()
    agent = pb.AgentHello(node="n0", groups=[OFFER], instance="one", protocol=PROTOCOL + 1)
    async with grpc.aio.insecure_channel(world.app.address) as channel:
        call = methods(channel, "Attach")(timeout=BOUND)
        await call.write(pb.AgentMessage(hello=agent).SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert f"version {PROTOCOL}: upgrade this orchestrator" in (caught.value.details() or "")
    client = await world.client("job-a")
    assert [node.node for node in (await client.group("pool")).nodes] == []
