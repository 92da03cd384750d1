"""An operator changes who goes next while the group runs: journaled, and kept over a restart."""

import json
from pathlib import Path

import grpc
import grpc.aio
import pytest
from orchestrator.world import World

from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc


async def set_policy(world: World, policy: str, group: str = "pool") -> str:
    async with grpc.aio.insecure_channel(world.app.address) as channel:
        stub = pb_grpc.OrchestratorStub(channel)
        answer = await stub.SetPolicy(pb.SetPolicyRequest(group=group, policy=policy))
        return str(answer.policy)


async def test_the_next_turn_goes_by_the_new_policy(world: World, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    await world.start(journal=str(journal))
    await world.agent()
    a, b, c = [await world.client(job) for job in ("job-a", "job-b", "job-c")]
    held = await a.acquire("pool")
    wants_b = await b.ask("pool")
    await a.until("pool", lambda group: len(group.waiters) == 1)
    wants_c = await c.ask("pool")
    await a.until("pool", lambda group: len(group.waiters) == 2)
    assert await set_policy(world, "priority:class/job-c=1") == "priority:class/job-c=1"
    assert (await a.group("pool")).policy == "priority:class/job-c=1"
    await a.yielded(held)
    grant = await c.granted(wants_c)
    assert not b.answered(wants_b)
    await c.yielded(grant)
    await b.granted(wants_b)
    await world.app.stop()
    events = [json.loads(line).get("event", {}) for line in journal.read_text().splitlines()]
    assert [e["policy"] for e in events if e.get("type") == "PolicySet"] == ["priority:class/job-c=1"]


async def test_it_is_kept_over_a_restart_until_it_is_taken_back(world: World, store: str) -> None:
    await world.start(store=store)
    await set_policy(world, "least_recent")
    await world.restart()
    a = await world.client("job-a")
    assert (await a.group("pool")).policy == "least_recent"
    assert await set_policy(world, "") == "fifo"


@pytest.mark.parametrize(
    ("policy", "group", "status", "words"),
    [
        ("lifo", "pool", grpc.StatusCode.INVALID_ARGUMENT, "choose one of"),
        ("fifo", "", grpc.StatusCode.INVALID_ARGUMENT, "name it"),
        ("fifo", "other", grpc.StatusCode.NOT_FOUND, "known: pool"),
    ],
)
async def test_a_wrong_one_is_refused_and_changes_nothing(
    world: World, policy: str, group: str, status: grpc.StatusCode, words: str
) -> None:
    await world.start()
    with pytest.raises(grpc.aio.AioRpcError, match=words) as refusal:
        await set_policy(world, policy, group)
    assert refusal.value.code() is status
    a = await world.client("job-a")
    assert (await a.group("pool")).policy == "fifo"
