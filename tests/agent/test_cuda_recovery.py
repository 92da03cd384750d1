"""The cuda backend over faults of its own and a flaky driver: an agent that dies at any point of a swap, a
driver that lies once in twenty calls, a store that cannot be written."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent.cuda_world import MIB, PATIENCE, CudaWorld, cuda_world, libraries, look_again

from coslice.agent.backends import process_ledger
from coslice.agent.backends.base import MoveError

pytestmark = pytest.mark.cuda

HAND_OVERS = 200
FLAKE = 20


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return libraries(tmp_path_factory)


@pytest.fixture
async def world(tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CudaWorld]:
    async with cuda_world(tmp_path, fakes, monkeypatch, capacity=16 * MIB) as made:
        yield made


async def test_200_hand_overs_at_a_flake_rate_of_one_in_twenty(world: CudaWorld) -> None:
    """Errors before or after the work, of every call, with any code. As the core does, a snapshot that failed
    is tried again; a restore never is."""
    a, b = await world.job("a", ranks=2, size=4 * MIB), await world.job("b", ranks=1, size=4 * MIB)
    await world.backend.snapshot(a.members, op="start")
    jobs = [a, b]
    world.node.fault("*", None, "flake", FLAKE)
    for turn in range(HAND_OVERS):
        coming, leaving = jobs[turn % 2], jobs[(turn + 1) % 2]
        for attempt in range(4):
            try:
                await world.backend.snapshot(leaving.members, op=f"{turn}/{attempt}")
                break
            except MoveError:
                assert attempt < 3
        await world.backend.restore(coming.members, op=f"{turn}/in")
    world.node.heal()
    for job in jobs:
        await world.backend.restore(job.members, op="end")
        assert await job.intact()
    assert world.node.poisonings == 0
    failed = [call for call in world.node.calls() if call.code]
    assert len(failed) > HAND_OVERS / 4  # the driver did flake


@pytest.mark.parametrize(
    ("ops", "hangs"),
    [
        ("snapshot", "lock"),
        ("snapshot", "checkpoint"),
        ("snapshot,restore", "restore"),
        ("snapshot,restore", "unlock"),
    ],
)
async def test_an_agent_killed_at_any_step_leaves_a_job_that_the_next_one_moves(
    world: CudaWorld, ops: str, hangs: str
) -> None:
    job = await world.job(ranks=2)
    world.node.fault(hangs, job.pids[0], "hang", count=1)
    agent = await world.agent(ops, job)
    caller = await world.called(hangs, job.pids[0])
    agent.kill()
    await agent.wait()
    os.kill(caller, signal.SIGKILL)
    await world.ended(caller)
    await world.start()
    assert "locked" not in [world.state(pid) for pid in job.pids]
    await world.backend.snapshot(job.members, op="next/out")
    assert [world.state(pid) for pid in job.pids] == ["checkpointed"] * 2
    await world.backend.restore(job.members, op="next/in")
    assert await job.intact()
    assert world.node.poisonings == 0


async def test_the_next_agent_does_not_touch_a_process_whose_restore_still_runs(world: CudaWorld) -> None:
    job = await world.job()
    world.node.fault("restore", job.pids[0], "hang", count=1)
    agent = await world.agent("snapshot,restore", job)
    await world.called("restore", job.pids[0])
    agent.kill()
    await agent.wait()
    await world.start()
    with pytest.raises(MoveError, match="out of reach") as caught:
        await world.backend.restore(job.members, op="1")
    assert len(world.node.calls("begin-restore")) == 1
    assert not caught.value.lost
    world.node.release()
    await world.until(job.pids[0], "locked")
    await world.backend.restore(job.members, op="2")
    assert len(world.node.calls("begin-restore")) == 1
    assert await job.intact()


async def test_what_was_parked_is_known_to_the_next_agent(world: CudaWorld) -> None:
    job = await world.job(ranks=2)
    await world.backend.snapshot(job.members, op="1")
    await world.start()
    assert world.backend.holds(job.members)
    seen = await world.backend.probe(job.members)
    assert (seen.live, seen.parked, seen.device_bytes) == (0, 2, 0)
    await world.backend.restore(job.members, op="2")
    assert await job.intact()


async def test_a_half_done_snapshot_is_finished_by_the_next_agent(world: CudaWorld) -> None:
    """One rank checkpointed, one not: whoever died in between, the next snapshot takes the rest."""
    await world.start({"base_seconds": 1.0})
    job = await world.job(ranks=2)
    world.node.fault("checkpoint", job.pids[0], "hang", count=1)
    with pytest.raises(MoveError):
        await world.backend.snapshot(job.members, op="1")
    world.node.release()
    async with asyncio.timeout(PATIENCE):
        while world.backend.out_of_reach(job.pids[0]):
            await look_again()
    await world.start()
    assert [world.state(pid) for pid in job.pids] == ["checkpointed", "running"]
    await world.backend.snapshot(job.members, op="2")
    assert [world.state(pid) for pid in job.pids] == ["checkpointed"] * 2
    await world.backend.restore(job.members, op="3")
    assert await job.intact()


async def test_a_store_that_fails_between_two_steps_leaves_nobody_locked(
    world: CudaWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await world.job(ranks=2)

    async def full(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(process_ledger.Ledger, "step", full)
    with pytest.raises(OSError, match="disk full"):
        await world.backend.snapshot(job.members, op="1")
    monkeypatch.undo()
    assert [world.state(pid) for pid in job.pids] == ["running"] * 2
    assert await job.intact()


async def test_a_helper_that_dies_in_a_call_is_replaced_and_the_state_decides(world: CudaWorld) -> None:
    job = await world.job()
    await world.backend.snapshot(job.members, op="1")
    await world.backend.restore(job.members, op="2")
    world.node.fault("checkpoint", job.pids[0], "hang", count=1)
    moving = asyncio.ensure_future(world.backend.snapshot(job.members, op="3"))
    os.kill(await world.called("checkpoint", job.pids[0], times=2), signal.SIGKILL)
    async with asyncio.timeout(PATIENCE):
        await moving
    assert world.state(job.pids[0]) == "checkpointed"
    await world.backend.restore(job.members, op="4")
    assert await job.intact()


async def test_a_caller_that_goes_away_leaves_the_move_to_end(world: CudaWorld) -> None:
    job = await world.job()
    world.node.fault("checkpoint", job.pids[0], "sleep", 300)
    moving = asyncio.ensure_future(world.backend.snapshot(job.members, op="1"))
    await world.called("checkpoint", job.pids[0])
    moving.cancel()
    await world.backend.restore(job.members, op="2")  # waits for the snapshot, then undoes it
    assert world.state(job.pids[0]) == "running"
    assert len(world.node.calls("begin-restore")) == 1
    assert await job.intact()
