"""Every limit is refused with its name, and leaves those within it alone."""

import json
from pathlib import Path

import grpc.aio
import pytest
from agent.conftest import MIB, Node
from orchestrator.world import World

from coslice.errors import ConfigError
from coslice.orchestrator.config import OrchestratorConfig, check
from coslice.orchestrator.sessions import Allowance
from coslice.runtime.journal import read_journals
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

BOUND = 20.0


def test_a_limit_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="max_waiters"):
        check(OrchestratorConfig(max_waiters=0))


async def test_waiters_of_a_group(world: World) -> None:
    await world.start(max_waiters=1)
    await world.agent()
    holder = await world.client("job-a")
    granted = await holder.acquire("pool")
    waiter = await world.client("job-b")
    waiting = await waiter.ask("pool")
    await waiter.until("pool", lambda group: len(group.waiters) == 1)
    third = await world.client("job-c")
    refused = await third.refused(await third.ask("pool"))
    assert (refused.code, "1 requests" in refused.message) == (pb.LIMIT, True)
    await holder.yielded(granted)
    await waiter.granted(waiting)


async def test_requests_of_a_session(world: World) -> None:
    await world.start(max_requests=2)
    await world.agent()
    holder = await world.client("job-a")
    granted = await holder.acquire("pool")
    greedy = await world.client("job-b")
    kept = [await greedy.ask("pool") for _ in range(2)]
    refused = await greedy.refused(await greedy.ask("pool"))
    assert (refused.code, refused.data["limit"]) == (pb.LIMIT, "2")
    await greedy.abandon(kept[0])
    third = await greedy.ask("pool")
    await holder.yielded(granted)
    await greedy.granted(third)


async def test_sessions(world: World) -> None:
    await world.start(max_sessions=1)
    await world.client("job-a")
    other = await world.client("job-b")
    assert other.hello_refused is not None
    assert other.hello_refused.code == pb.LIMIT
    assert "max_sessions" in other.hello_refused.message


async def test_groups_that_agents_create(world: World) -> None:
    await world.start(max_groups=2)
    agent = await world.agent(groups=("pool", "extra", "more"))
    async with grpc.aio.insecure_channel(world.app.address) as channel:
        status = await rpc.OrchestratorStub(channel).GetStatus(pb.GetStatusRequest(), timeout=BOUND)
    assert {group.group for group in status.groups} == {"pool", "extra"}
    assert agent.refused is None


async def test_a_message_that_is_too_large(world: World) -> None:
    await world.start(max_message_bytes=1 << 20)
    async with grpc.aio.insecure_channel(world.app.address) as channel:
        request = pb.GetStatusRequest(group="x" * (1 << 21))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc.OrchestratorStub(channel).GetStatus(request, timeout=BOUND)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_long_names_are_refused_and_not_repeated(world: World) -> None:
    await world.start()
    await world.agent()
    long = "n" * 100_000
    client = await world.client(long)
    assert client.hello_refused is not None
    assert client.hello_refused.code == pb.INVALID
    assert len(client.hello_refused.message) < 500
    good = await world.client("job-a")
    refused = await good.refused(await good.ask(long))
    assert refused.code == pb.UNKNOWN_GROUP
    assert len(refused.message) < 500
    request = await good.ask("pool", request="r" * 201)
    assert (await good.refused(request)).code == pb.INVALID


async def test_notes_of_a_session(world: World, tmp_path: Path) -> None:
    """A flood of notes costs notes, and the journal says how many."""
    journal = tmp_path / "journal.jsonl"
    await world.start(journal=str(journal), notes_at_once=5, notes_per_s=1e-9)
    await world.agent()
    noisy, quiet = await world.client("job-a"), await world.client("job-b")
    for step in range(9):
        await noisy.send(note=pb.Note(name="reward", value=1.0, step=step, text="x" * 10_000))
    await quiet.send(note=pb.Note(name="reward", value=2.0))
    for client in (noisy, quiet):
        await client.refused(await client.ask("no-such-group"))  # what was sent before is handled
    await world.app.stop()
    notes = [record["note"] for record in read_journals(journal).records if "note" in record]
    assert [note["job"] for note in notes] == ["job-a"] * 5 + ["job-b"]
    assert all(len(json.dumps(note)) < 5_000 for note in notes)


def test_what_was_left_out_is_counted() -> None:
    notes = Allowance()
    assert [notes.take(0.0, 1.0, 2) for _ in range(4)] == [(True, 0), (True, 0), (False, 0), (False, 0)]
    assert notes.take(1.0, 1.0, 2) == (True, 2)


async def test_jobs_and_processes_of_a_node(node: Node) -> None:
    await node.start(max_jobs=1, max_members=2)
    await node.workload("job-a", size=MIB)
    said = await (await node.workload("job-b", size=MIB, wait=False)).until("refused")
    assert (said["code"], "max_jobs" in said["message"]) == ("LIMIT", True)
    await node.workload("job-a", "--rank", "1", size=MIB)
    said = await (await node.workload("job-a", "--rank", "2", size=MIB, wait=False)).until("refused")
    assert (said["code"], "max_members" in said["message"]) == ("LIMIT", True)


async def test_a_channel_that_says_nothing_is_ended(node: Node) -> None:
    agent = await node.start(hello_timeout=0.2)
    async with grpc.aio.insecure_channel(agent.address) as channel:
        stream = rpc.AgentStub(channel).Channel()
        command = await stream.read()
        assert command.refused.code == pb.INVALID
        assert await stream.read() is grpc.aio.EOF
