"""Two jobs of llm-d's protocols, unchanged, on `coslice up`: the lock from the orchestrator, the state by the
channel to the agent; and a native job between them."""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from agent.conftest import MIB, PATIENCE, Node
from agent.test_upstream import SIZE, Caller, workload

import coslice
from coslice.wire.upstream import timeslice_orchestrator_pb2 as up
from coslice.wire.upstream.timeslice_orchestrator_pb2_grpc import TimeSliceOrchestratorServiceStub

GROUP = "default"


class Orchestrator:
    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self._stub: Any = TimeSliceOrchestratorServiceStub(self.channel)

    async def acquire(self, job: str) -> up.AcquireResponse:
        request = up.AcquireRequest(job_id=job, group_id=GROUP)
        return await self._stub.Acquire(request, timeout=PATIENCE)

    async def told(self) -> dict[str, int]:
        request = up.GetGroupStatusRequest(group_id=GROUP)
        return {s.job_id: s.job_state for s in (await self._stub.GetGroupStatus(request)).agent_job_states}

    async def give(self, job: str) -> up.YieldResponse:
        return await self._stub.Yield(up.YieldRequest(job_id=job, group_id=GROUP), timeout=PATIENCE)


@pytest.fixture
async def started(node: Node) -> Any:
    """``coslice up``; the node's agent, as far as workloads see it."""
    arguments = ("up", "--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0", "--json")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "coslice.cli.main", *arguments, "--device", "host", "--memory", "1GiB"),
        *("--state", str(node.folder / "up")),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            addresses = json.loads(await process.stdout.readline())
        node.agent = SimpleNamespace(address=addresses["agent"], stop=process.wait)  # type: ignore[assignment]
        yield addresses
    finally:
        process.terminate()
        await process.wait()


async def test_two_jobs_of_theirs_and_one_of_ours_take_turns(node: Node, started: Any) -> None:
    lock = Orchestrator(started["orchestrator"])
    first = await workload(node, "job-a", group=GROUP)
    caller = Caller(node)
    assert not (await lock.acquire("job-a")).context_restored
    second = await workload(node, "job-b", group=GROUP)
    names = up.SnapshotAgentJobState
    async with asyncio.timeout(PATIENCE):
        while len(told := await lock.told()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # upstream tells nobody of a state
    assert told == {"job-a": names.STATE_RUNNING, "job-b": names.STATE_RUNNING}, (
        "on the device, nothing moves"
    )
    assert await caller.states() == {"job-a": "RUNNING", "job-b": "RUNNING"}
    waiting = asyncio.create_task(lock.acquire("job-b"))
    await lock.give("job-a")
    assert not (await waiting).context_restored, "its state was here already"
    assert await caller.states() == {"job-a": "SAVED", "job-b": "RUNNING"}
    waiting = asyncio.create_task(lock.acquire("job-a"))
    await lock.give("job-b")
    assert (await waiting).context_restored
    assert (await first.until("restored"))["intact"]
    assert await caller.states() == {"job-a": "RUNNING", "job-b": "SAVED"}
    native = coslice.AsyncClient(started["orchestrator"], job="ours", groups=[GROUP], need=MIB)
    between = asyncio.create_task(native.acquire(GROUP))
    await lock.give("job-a")
    await between
    assert await caller.states() == {"job-a": "SAVED", "job-b": "SAVED"}
    waiting = asyncio.create_task(lock.acquire("job-b"))
    await native.yield_(GROUP)
    assert (await waiting).context_restored
    assert (await second.until("restored"))["intact"]
    await native.close()
    assert {m.state_bytes for m in (await node.status()).members} == {0}, "measured, never declared"
    on_device = sum(member.device_bytes for member in (await node.status()).members)
    assert on_device == pytest.approx(SIZE, rel=0.05)
