"""Workloads that lie, hang, refuse or die: nobody else suffers, and the report says who and how much."""

import asyncio
import os
import re
import signal

import pytest
from agent.conftest import GROUP, MIB, Node, contexts
from agent.fake_orchestrator import PATIENCE

from coslice.agent.backends.app_channel import AppChannelBackend
from coslice.agent.backends.base import MoveError
from coslice.agent.config import GroupDevices
from coslice.core.ids import GroupId


async def test_a_process_that_frees_nothing_fails_with_the_figures(node: Node) -> None:
    await node.start(on_stuck="wait", settle=0.1)
    liar = await node.workload("job-a", "--lie")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    failed = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).failed
    assert (failed.culprit, failed.stuck, failed.pid) == ("job-a", True, liar.pid)
    assert "95 MiB of 100 MiB registered must leave" in failed.reason
    assert re.search(r"freed [\d.]+ (B|KiB) of 100 MiB", failed.reason)


async def test_a_process_that_frees_nothing_is_killed_when_it_is_stuck(node: Node) -> None:
    await node.start(on_stuck="kill", stuck_grace=0.0, settle=0.1)
    liar = await node.workload("job-a", "--lie")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    done = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).done
    assert done.op
    assert await liar.ended() == -signal.SIGKILL
    assert contexts(done.residency) == {"job-a": "LOST"}
    assert "registered must leave" in done.residency.contexts[0].reason


@pytest.mark.parametrize("lie", [False, True])
async def test_on_cuda_the_allocators_figures_decide(node: Node, lie: bool) -> None:
    """No device is needed: the agent opens none and takes the figures that the workload's allocator gives."""
    cuda = GroupDevices(group=GroupId(GROUP), accelerator="cuda", device_budget=160 * MIB)
    await node.start(groups=(cuda,), on_stuck="wait", settle=0.0)
    await node.workload("job-a", "--device", "cuda", *(["--lie"] if lie else []))
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    report = await node.orchestrator.make_resident(GROUP, "job-b", 2)
    assert bool(report.failed.op) is lie
    assert contexts(report.done.residency) == ({} if lie else {"job-a": "SAVED"})
    left = (await node.status()).members[0].device_bytes
    assert left == (100 * MIB if lie else MIB)


async def test_a_process_that_never_answers_is_killed_in_bounded_time(node: Node) -> None:
    await node.start(on_stuck="kill", stuck_grace=0.0, move_timeout=0.5)
    hanging = await node.workload("job-a", "--hang")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    assert (await node.orchestrator.make_resident(GROUP, "job-b", 2)).done.op
    assert await hanging.ended() == -signal.SIGKILL


async def test_state_that_left_on_an_order_without_an_answer_has_left(node: Node) -> None:
    """A process that is stopped in the middle of its move, and goes on, frees less on the next order."""
    agent = await node.start(settle=0.1)
    held = await node.workload("job-a", "--hold")
    buffers, (member,) = agent.groups[GroupId(GROUP)]._buffers, tuple(agent.members)
    first = asyncio.create_task(AppChannelBackend(buffers, move_timeout=1.0).snapshot([member], op="first"))
    await held.until("moved_out")
    with pytest.raises(MoveError, match="did not answer"):
        await first
    second = asyncio.create_task(AppChannelBackend(buffers, settle=0.1).snapshot([member], op="second"))
    held.tell("go")
    async with asyncio.timeout(PATIENCE):
        assert (await second).bytes == 100 * MIB
    assert member.parked


async def test_state_that_came_back_into_memory_that_was_kept_may_leave_again(node: Node) -> None:
    """An allocator that keeps a part makes the state's coming and leaving look smaller than it is."""
    await node.start(on_stuck="kill", stuck_grace=0.0, settle=0.1)
    keeps = await node.workload("job-a", "--keep", str(30 * MIB))
    await keeps.do(f"use {30 * MIB}")  # before its first move: memory that is free, and still its own
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    for epoch in (2, 4):
        away = (await node.orchestrator.make_resident(GROUP, "job-b", epoch)).done
        assert contexts(away.residency) == {"job-a": "SAVED"}
        assert (await node.orchestrator.make_resident(GROUP, "job-a", epoch + 1)).done.restored
    assert keeps.process.returncode is None


async def test_state_that_left_after_the_deadline_is_brought_back(node: Node) -> None:
    """The agent had given it up and says that the job is on the device: then it shall be."""
    await node.start(on_stuck="wait", move_timeout=0.3)
    late = await node.workload("job-a", "--slow", "1")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    failed = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).failed
    assert f"process {late.pid} did not answer within 0.3 s" in failed.reason
    assert (await late.until("moved_in"))["intact"]


async def test_a_busy_process_is_asked_again(node: Node) -> None:
    await node.start(retries=3)
    await node.workload("job-a", "--busy", "2")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    done = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).done
    assert done.bytes_out == 100 * MIB


async def test_a_process_that_dies_while_it_moves_blocks_nobody(node: Node) -> None:
    await node.start()
    await node.workload("job-a", "--die")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    done = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).done
    assert done.op
    assert "job-a" not in contexts(done.residency)


async def test_when_one_process_refuses_the_others_are_moved_back(node: Node) -> None:
    await node.start(on_stuck="wait")
    willing = await node.workload("job-a", "--rank", "0", size=50 * MIB)
    await node.workload("job-a", "--rank", "1", "--busy", "9", size=50 * MIB)
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    failed = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).failed
    assert "inside an accelerator section" in failed.reason
    assert (await willing.until("moved_in"))["intact"]
    parked = {member.pid: member.device_bytes for member in (await node.status()).members}
    assert parked[willing.pid] > 45 * MIB


async def test_a_killed_live_job_leaves_nothing_behind(node: Node) -> None:
    await node.start()
    process = await node.workload("job-a")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    os.kill(process.pid, signal.SIGKILL)
    gone = await node.orchestrator.until(lambda m: m.HasField("residency") and not m.residency.contexts)
    assert gone.residency.device_used_bytes == 0


async def test_a_killed_saved_job_gives_its_host_memory_back(node: Node) -> None:
    await node.start()
    process = await node.workload("job-a")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    saved = await node.orchestrator.make_resident(GROUP, "job-b", 2)
    assert saved.done.residency.host_used_bytes == 100 * MIB
    begun = len(node.orchestrator.reports)
    os.kill(process.pid, signal.SIGKILL)
    gone = await node.orchestrator.until(lambda m: m.HasField("residency"), since=begun)
    assert not gone.residency.contexts
    assert gone.residency.host_used_bytes == 0


async def test_a_restore_that_fails_names_the_process(node: Node) -> None:
    await node.start()
    process = await node.workload("job-a", "--refuse-back")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    await node.orchestrator.make_resident(GROUP, "job-b", 2)
    failed = (await node.orchestrator.make_resident(GROUP, "job-a", 3)).failed
    assert failed.culprit == "job-a"
    assert f"process {process.pid}" in failed.reason
    assert "cannot map the state" in failed.reason


async def test_without_host_memory_nothing_is_touched(node: Node) -> None:
    await node.start(host=50 * MIB)
    process = await node.workload("job-a")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    failed = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).failed
    assert "host" in failed.reason
    assert "50 MiB" in failed.reason
    assert contexts(failed.residency) == {"job-a": "LIVE"}
    await process.do("drop")
    assert not any(said["event"] == "moved_out" for said in process.said)


async def test_a_job_that_outgrows_the_device_is_killed_as_out_of_memory(node: Node) -> None:
    agent = await node.start(budget=160 * MIB)
    process = await node.workload("job-a")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    process.tell(f"use {120 * MIB}")
    assert await process.ended() == -signal.SIGKILL
    lost = await node.orchestrator.until(
        lambda m: m.HasField("residency") and contexts(m.residency) == {"job-a": "LOST"}
    )
    assert "out of device memory" in lost.residency.contexts[0].reason
    assert "160 MiB" in lost.residency.contexts[0].reason
    assert agent.peak_device_bytes[GROUP] > 160 * MIB


async def test_memory_of_a_parked_process_is_its_own(node: Node) -> None:
    """Work on the CPU while off the accelerator is no use of the device, however much memory it takes."""
    agent = await node.start(budget=160 * MIB)
    parked = await node.workload("job-a")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    await node.orchestrator.make_resident(GROUP, "job-b", 2)
    holder = await node.workload("job-b")
    await parked.do(f"use {300 * MIB}")
    await holder.do(f"use {30 * MIB}")
    await node.sampled(GROUP, at_least=125 * MIB)
    assert agent.peak_device_bytes[GROUP] <= 160 * MIB
    assert holder.process.returncode is None
