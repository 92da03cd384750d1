"""The direct API, for services that schedule themselves."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from agent.conftest import GROUP, MIB, PATIENCE, Node

from coslice.agent.direct import DirectApi
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc


async def snapshot(node: Node, **fields) -> pb.MoveResponse:
    async with grpc.aio.insecure_channel(node.agent.address) as channel:
        return await rpc.AgentStub(channel).Snapshot(pb.SnapshotRequest(**fields), timeout=PATIENCE)


async def restore(node: Node, **fields) -> pb.MoveResponse:
    async with grpc.aio.insecure_channel(node.agent.address) as channel:
        return await rpc.AgentStub(channel).Restore(pb.RestoreRequest(**fields), timeout=PATIENCE)


async def test_a_job_without_a_group_goes_out_and_comes_back(node: Node) -> None:
    await node.start(orchestrator=None)
    process = await node.workload("job-a", group="")
    assert (await snapshot(node, job="job-a")).bytes == 100 * MIB
    assert (await node.status()).direct[0].state == pb.SAVED
    assert (await restore(node, job="job-a")).bytes == 100 * MIB
    assert (await process.until("moved_in"))["intact"]
    assert (await node.status()).direct[0].state == pb.LIVE


async def test_repeating_a_move_moves_nothing_and_says_so(node: Node) -> None:
    await node.start()
    await node.workload("job-a", group="", size=MIB)
    nothing = await restore(node, job="job-a")
    assert (nothing.bytes, "already" in nothing.reason) == (0, True)
    await snapshot(node, job="job-a")
    again = await snapshot(node, job="job-a")
    assert (again.bytes, "already" in again.reason) == (0, True)


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"job": "shared"}, grpc.StatusCode.FAILED_PRECONDITION, "orchestrated group train"),
        ({"job": "alone", "pids": [1]}, grpc.StatusCode.PERMISSION_DENIED, "needs the admin role"),
        ({"job": "alone", "mode": "discard"}, grpc.StatusCode.INVALID_ARGUMENT, "offload"),
        ({"job": "nobody"}, grpc.StatusCode.NOT_FOUND, "registers with this agent first"),
        ({"job": ""}, grpc.StatusCode.INVALID_ARGUMENT, "job name"),
    ],
)
async def test_what_is_not_allowed_is_refused_with_the_reason(node: Node, fields, status, words) -> None:
    await node.start()
    await node.workload("shared", group=GROUP, size=MIB)
    await node.workload("alone", group="", size=MIB)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await snapshot(node, **fields)
    assert refused.value.code() is status
    assert words in refused.value.details()


async def test_a_snapshot_that_takes_too_long_leaves_the_job_as_it_was(node: Node) -> None:
    await node.start()
    process = await node.workload("job-a", "--slow", "1", group="", size=MIB)
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await snapshot(node, job="job-a", timeout_s=0.3)
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await process.until("moved_in"))["intact"]


async def test_host_memory_is_checked_before_the_process_is_touched(node: Node) -> None:
    await node.start(host=10 * MIB)
    process = await node.workload("job-a", group="", size=20 * MIB)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await snapshot(node, job="job-a")
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "host memory budget" in refused.value.details()
    await process.do("drop")
    assert not any(said["event"] == "moved_out" for said in process.said)


async def test_a_move_whose_caller_went_away_is_over_before_the_next_begins(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who called next was told that the job is on the device already, while its state was leaving."""
    made: list[DirectApi] = []

    class Kept(DirectApi):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr("coslice.agent.app.DirectApi", Kept)
    await node.start(orchestrator=None)
    process = await node.workload("job-a", "--hold", group="", size=MIB)
    (direct,) = made
    gone = asyncio.create_task(direct.snapshot("job-a", mode="", tags=(), timeout=0.0, pids=()))
    await process.until("moved_out")  # all but its word for it
    gone.cancel()
    await asyncio.wait((gone,))
    assert direct.moving("job-a")
    back = asyncio.create_task(direct.restore("job-a", timeout=0.0))
    await asyncio.sleep(0)  # it has asked for its turn
    process.tell("go")
    moved, reason = await back
    assert (moved.bytes, reason) == (MIB, "")
    assert (await process.until("moved_in"))["intact"]
    assert not direct.moving("job-a")
