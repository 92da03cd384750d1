"""Operations and saved state of llm-d's agent protocol over a SIGKILL of the agent: real processes."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from agent.conftest import MIB, PATIENCE, Node
from agent.test_upstream import SIZE, Caller, workload
from ports import Kept

from coslice.wire.upstream import snapshot_agent_pb2 as up


class Killable:
    """An agent in a process of its own, always at one address; stands where a test's node has its agent."""

    def __init__(self, folder: Path) -> None:
        self._place = Kept()
        self.folder, self.address = folder, self._place.address
        self.process: Any = None

    async def start(self) -> None:
        arguments = ("agent", "--direct", "--listen", self.address, "--node", "n", "--device", "host")
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "coslice.cli.main", *arguments, "--json"),
            *("--state", str(self.folder / "agent")),
            stdout=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(PATIENCE):
            self.address = json.loads(await self.process.stdout.readline())["agent"]

    async def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        await self.process.wait()

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            await self.kill()


@pytest.fixture
async def killable(node: Node) -> Any:
    agent = Killable(node.folder)
    await agent.start()
    node.agent = agent  # type: ignore[assignment]  # as far as clients and workloads see it
    yield agent
    await agent.stop()


async def test_saved_state_and_finished_operations_are_known_after_a_kill(
    node: Node, killable: Killable
) -> None:
    process = await workload(node, "job-a", group="one-that-upstream-knows")
    caller = Caller(node)
    operation = await caller.snapshot("job-a")
    before = await caller.ended(operation)
    process.process.send_signal(
        signal.SIGSTOP
    )  # its stream stays away: upstream's client dials again at leisure
    await killable.kill()
    await killable.start()
    caller = Caller(node)
    assert await caller.operation(operation) == before
    assert await caller.states() == {"job-a": "SAVED"}
    operation = await caller.restore("job-a")
    assert (await caller.operation(operation)).status == up.OPERATION_STATUS_PENDING
    process.process.send_signal(signal.SIGCONT)
    restored = await caller.ended(operation)
    assert restored.snapshot_device_bytes == pytest.approx(SIZE, rel=0.01)
    assert (await process.until("restored"))["intact"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_an_operation_that_was_interrupted_is_carried_to_its_end(
    node: Node, killable: Killable, how: signal.Signals
) -> None:
    """Its state had left, and nobody had heard of it: memory tells, nothing is ordered twice."""
    process, caller = await workload(node, "job-a", "--hold"), Caller(node)
    operation = await caller.snapshot("job-a")
    await process.until("told")
    await killable.kill(how)
    process.tell("go")
    await killable.start()
    caller = Caller(node)
    assert (await caller.operation(operation)).status == up.OPERATION_STATUS_PENDING
    ended = await caller.ended(operation)
    assert ended.status == up.OPERATION_STATUS_COMPLETE
    assert ended.storage_bytes == pytest.approx(SIZE, rel=0.01)
    assert await caller.states() == {"job-a": "SAVED"}
    assert (await caller.ended(await caller.restore("job-a"))).status == up.OPERATION_STATUS_COMPLETE
    assert (await process.until("restored"))["intact"]


async def test_a_restore_that_a_kill_interrupted_is_not_ordered_twice(node: Node, killable: Killable) -> None:
    """A workload may well refuse what it has done already."""
    process, caller = await workload(node, "job-a", "--hold-back"), Caller(node)
    await caller.ended(await caller.snapshot("job-a"))
    operation = await caller.restore("job-a")
    await process.until("back")
    await killable.kill()
    process.tell("go")
    await killable.start()
    caller = Caller(node)
    ended = await caller.ended(operation)
    assert ended.status == up.OPERATION_STATUS_COMPLETE, ended.error
    assert ended.snapshot_device_bytes == pytest.approx(SIZE, rel=0.01)
    assert await caller.states() == {"job-a": "RUNNING"}
    process.tell("check")
    assert (await process.until("checked"))["intact"]


async def test_an_operation_whose_process_died_with_the_agent_fails(node: Node, killable: Killable) -> None:
    process, caller = await workload(node, "job-a", "--hold", size=MIB), Caller(node)
    operation = await caller.snapshot("job-a")
    await process.until("told")
    await killable.kill()
    process.process.kill()
    await process.ended()
    await killable.start()
    failed = await Caller(node).ended(operation)
    assert failed.status == up.OPERATION_STATUS_FAILED
    assert "job-a" in failed.error
