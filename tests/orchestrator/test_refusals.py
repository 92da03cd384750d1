"""Who is told no, in which words, and that it leaves nothing behind."""

import asyncio

import grpc
import grpc.aio
import pytest
from orchestrator.raw_client import BOUND, RawClient
from orchestrator.world import World

from coslice.orchestrator.config import GroupConfig
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc


async def test_unknown_group_names_the_known_ones(world: World) -> None:
    await world.start(groups=(GroupConfig(id="trainers"), GroupConfig(id="samplers")))
    client = await world.client("job-a")
    refused = await client.refused(await client.ask("trianers"))
    assert refused.code == pb.UNKNOWN_GROUP
    assert set(refused.data["known_groups"].split(", ")) == {"trainers", "samplers"}
    assert "trainers" in refused.message


async def test_unknown_group_of_a_question_names_the_known_ones(world: World) -> None:
    await world.start()
    client = await world.client("job-a")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.group("loop")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "pool" in (caught.value.details() or "")


async def test_a_group_without_nodes_says_so(world: World) -> None:
    await world.start()
    client = await world.client("job-a")
    refused = await client.refused(await client.ask("pool"))
    assert refused.code == pb.GROUP_EMPTY
    assert "coslice" in refused.message


async def test_second_incarnation_is_refused_at_hello_naming_the_first(world: World) -> None:
    await world.start()
    first = RawClient(world.app.address, "job-a", incarnation="one")
    second = RawClient(world.app.address, "job-a", incarnation="two")
    try:
        await first.connect(pid=4242, node="host-a")
        await second.connect(pid=4343)
        assert second.hello_refused is not None
        assert second.hello_refused.code == pb.JOB_RUNNING
        assert second.hello_refused.data["pid"] == "4242"
        assert second.hello_refused.data["node"] == "host-a"
        assert "--job" in second.hello_refused.message
        await first.goodbye()
        again = await second.connect(pid=4343)
        assert again.welcome is not None
    finally:
        await first.close()
        await second.close()


async def test_second_incarnation_is_refused_while_the_first_may_return(world: World) -> None:
    await world.start(session_grace=30)
    await world.agent()
    first = await world.client("job-a", incarnation="one")
    await first.acquire("pool")
    first.kill()
    await first.ended.wait()
    second = await world.client("job-a", incarnation="two")
    # At the hello if the server has not noticed the end of the first stream yet, else at the acquire.
    refused = second.hello_refused or await second.refused(await second.ask("pool"))
    assert refused.code == pb.JOB_RUNNING


@pytest.mark.parametrize(
    "hello",
    [
        pb.Hello(job="", session="s"),
        pb.Hello(job="job a", session="s"),
        pb.Hello(job="job-a", session=""),
        pb.Hello(job="job-a", session="s" * 300),
        pb.Hello(job="job-a", session="s", incarnation="x\ny"),
    ],
)
async def test_malformed_hello_is_refused(world: World, hello: pb.Hello) -> None:
    await world.start()
    async with grpc.aio.insecure_channel(world.app.address) as channel:
        stream = pb_grpc.OrchestratorStub(channel).Session(iter([pb.ClientMessage(hello=hello)]))
        async with asyncio.timeout(BOUND):
            answers = [answer async for answer in stream]
    assert [answer.refused.code for answer in answers] == [pb.INVALID]


async def test_a_stream_that_never_says_hello_ends(world: World) -> None:
    await world.start(hello_timeout=0.1)
    async with grpc.aio.insecure_channel(world.app.address) as channel:
        stream = pb_grpc.OrchestratorStub(channel).Session()
        with pytest.raises(grpc.aio.AioRpcError) as told:
            async with asyncio.timeout(BOUND):
                assert [answer async for answer in stream] == []
    assert told.value.code() is grpc.StatusCode.UNAVAILABLE  # no refusal: it was perhaps only late


async def test_yield_without_a_lease_is_refused_by_its_request(world: World) -> None:
    await world.start()
    await world.agent()
    client = await world.client("job-a")
    answer = await client.give(pb.Granted(leases=[pb.Lease(group="pool", epoch=1)]))
    assert answer.refused.code == pb.NOT_HELD


async def test_stale_epoch_is_refused_with_the_current_one(world: World) -> None:
    await world.start()
    await world.agent()
    a, b = await world.client("job-a"), await world.client("job-b")
    old = await a.acquire("pool")
    await a.yielded(old)
    new = await b.acquire("pool")
    await b.yielded(new)
    other = await world.client("job-a")
    answer = await other.give(old)
    assert answer.refused.code == pb.STALE_LEASE
    assert answer.refused.data["current_epoch"] == str(new.leases[0].epoch)


async def test_a_session_over_the_limit_is_refused(world: World) -> None:
    await world.start(max_sessions=1)
    await world.client("job-a")
    refused = (await world.client("job-b")).hello_refused
    assert refused is not None
    assert refused.code == pb.LIMIT


async def test_malformed_acquire_is_refused_and_the_session_goes_on(world: World) -> None:
    await world.start()
    await world.agent()
    client = await world.client("job-a")
    assert (await client.refused(await client.ask())).code == pb.INVALID
    assert (await client.refused(await client.ask("pool", world=-1))).code == pb.INVALID
    assert (await client.acquire("pool")).leases[0].group == "pool"


async def test_a_group_before_one_that_is_held_is_refused(world: World) -> None:
    await world.start(groups=(GroupConfig(id="a", rank=2), GroupConfig(id="b", rank=1)))
    await world.agent(groups=("a", "b"))
    client = await world.client("job-a")
    held = await client.acquire("a")
    refused = await client.refused(await client.ask("b"))
    assert refused.code == pb.LOCK_ORDER
    assert refused.data["held"] == "a"
    await client.yielded(held)
    await client.acquire("b")
    assert (await client.acquire("a")).leases
