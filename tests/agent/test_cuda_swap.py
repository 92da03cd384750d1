"""The cuda backend on the fake driver: what a swap does, and what is left after whatever goes wrong in it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent.cuda_world import CONTEXT, MIB, PATIENCE, CudaWorld, cuda_world, libraries, look_again

from coslice.agent.backends.base import MoveError

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return libraries(tmp_path_factory)


@pytest.fixture
async def world(tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CudaWorld]:
    async with cuda_world(tmp_path, fakes, monkeypatch, capacity=16 * MIB) as made:
        yield made


async def test_a_job_leaves_the_device_and_comes_back_bit_equal(world: CudaWorld) -> None:
    job = await world.job(ranks=2)
    done = await world.backend.snapshot(job.members, op="1")
    assert done.bytes == 2 * (4 * MIB + CONTEXT)
    assert done.residual == 0
    survey = await world.surveyor.survey()
    assert survey.gpus[0].used == 0
    assert [world.state(pid) for pid in job.pids] == ["checkpointed"] * 2
    back = await world.backend.restore(job.members, op="2")
    assert back.bytes == done.bytes
    assert [world.state(pid) for pid in job.pids] == ["running"] * 2
    assert await job.intact()


async def test_all_ranks_are_locked_before_the_first_is_checkpointed(world: CudaWorld) -> None:
    job = await world.job(ranks=2)
    await world.backend.snapshot(job.members, op="1")
    calls = [call.op for call in world.node.calls() if call.code is not None]
    assert calls.count("lock") == 2
    assert max(i for i, op in enumerate(calls) if op == "lock") < calls.index("checkpoint")


async def test_two_jobs_take_turns_on_a_device_that_holds_one(world: CudaWorld) -> None:
    a = await world.job("a", size=10 * MIB)
    await world.backend.snapshot(a.members, op="1")
    b = await world.job("b", size=10 * MIB)
    for turn in range(3):
        await world.backend.snapshot(b.members, op=f"{turn}/b")
        await world.backend.restore(a.members, op=f"{turn}/a")
        assert await a.intact()
        await world.backend.snapshot(a.members, op=f"{turn}/a/out")
        await world.backend.restore(b.members, op=f"{turn}/b/in")
        assert await b.intact()
    assert world.node.poisonings == 0


async def test_without_room_nothing_is_restored_and_the_process_in_the_way_is_named(
    world: CudaWorld,
) -> None:
    await world.start({"settle": 0.1})
    a = await world.job("a", size=10 * MIB)
    await world.backend.snapshot(a.members, op="1")
    b = await world.job("b", size=10 * MIB)
    with pytest.raises(MoveError, match=str(b.pids[0])) as caught:
        await world.backend.restore(a.members, op="2")
    assert not caught.value.lost
    assert world.node.calls("begin-restore") == []
    await b.ranks[0].kill()
    await world.backend.restore(a.members, op="3")
    assert await a.intact()
    assert world.node.poisonings == 0


async def test_a_process_that_is_working_is_busy_and_goes_on(world: CudaWorld) -> None:
    await world.start({"lock_timeout": 0.2})
    job = await world.job(ranks=2)
    job.ranks[0].tell("work")
    await world.until_working(job.pids[0])
    with pytest.raises(MoveError) as caught:
        await world.backend.snapshot(job.members, op="1")
    assert caught.value.busy
    assert [world.state(pid) for pid in job.pids] == ["running"] * 2
    world.node.idle()
    await job.ranks[0].until("worked")
    await world.start()
    await world.backend.snapshot(job.members, op="2")
    await world.backend.restore(job.members, op="3")
    assert await job.intact()


@pytest.mark.parametrize("code", [1, 2, 304, 401, 801, 999])
async def test_a_failed_checkpoint_leaves_every_rank_running(world: CudaWorld, code: int) -> None:
    job = await world.job(ranks=2)
    world.node.fault("checkpoint", job.pids[1], "error", code)
    with pytest.raises(MoveError) as caught:
        await world.backend.snapshot(job.members, op="1")
    assert not caught.value.busy
    assert str(job.pids[1]) in str(caught.value)
    assert [world.state(pid) for pid in job.pids] == ["running"] * 2
    world.node.heal()
    assert await job.intact()
    await world.backend.snapshot(job.members, op="2")
    await world.backend.restore(job.members, op="3")
    assert await job.intact()


@pytest.mark.parametrize("op", ["lock", "checkpoint", "restore", "unlock"])
async def test_an_error_of_something_that_was_done_is_seen_through(world: CudaWorld, op: str) -> None:
    job = await world.job()
    world.node.fault(op, None, "after", 999)
    await world.backend.snapshot(job.members, op="1")
    await world.backend.restore(job.members, op="2")
    assert await job.intact()
    assert len(world.node.calls(f"begin-{op}")) == 1


async def test_a_restore_out_of_memory_is_final(world: CudaWorld) -> None:
    job = await world.job()
    await world.backend.snapshot(job.members, op="1")
    world.node.fault("restore", job.pids[0], "error", 2)
    for attempt in ("2", "3"):
        with pytest.raises(MoveError) as caught:
            await world.backend.restore(job.members, op=attempt)
        assert caught.value.lost
    assert len(world.node.calls("begin-restore")) == 1


@pytest.mark.parametrize("code", [1, 304, 999])
async def test_a_restore_that_began_nothing_may_be_asked_for_again(world: CudaWorld, code: int) -> None:
    """Checkpointed by the driver's word, and nothing on the device by NVML's."""
    job = await world.job()
    await world.backend.snapshot(job.members, op="1")
    world.node.fault("restore", job.pids[0], "error", code)
    with pytest.raises(MoveError) as caught:
        await world.backend.restore(job.members, op="2")
    assert not caught.value.lost
    world.node.heal()
    await world.backend.restore(job.members, op="3")
    assert await job.intact()


async def test_nor_is_a_way_back_that_began_nothing_a_loss(world: CudaWorld) -> None:
    """One process does not leave, and the other, that had left, cannot go back yet."""
    job = await world.job(ranks=2)
    world.node.fault("checkpoint", job.pids[1], "error", 801)
    world.node.fault("restore", job.pids[0], "error", 801)
    with pytest.raises(MoveError):
        await world.backend.snapshot(job.members, op="1")
    assert world.state(job.pids[0]) == "checkpointed"
    world.node.heal()
    await world.backend.restore(job.members, op="2")
    assert await job.intact()


async def test_a_process_that_the_driver_gave_up_is_lost(world: CudaWorld) -> None:
    job = await world.job()
    await world.backend.snapshot(job.members, op="1")
    world.node.fault("restore", job.pids[0], "poison", count=1)
    for attempt in ("2", "3"):
        with pytest.raises(MoveError) as caught:
            await world.backend.restore(job.members, op=attempt)
        assert caught.value.lost
    assert len(world.node.calls("begin-restore")) == 1


async def test_a_hanging_call_is_a_fault_and_the_other_job_goes_on(world: CudaWorld) -> None:
    await world.start({"base_seconds": 1.0})
    a, b = await world.job("a", ranks=2, size=2 * MIB), await world.job("b", size=2 * MIB)
    world.node.fault("checkpoint", a.pids[0], "hang", count=1)
    with pytest.raises(MoveError, match="did not checkpoint"):
        await world.backend.snapshot(a.members, op="1")
    assert world.state(a.pids[1]) == "running"
    with pytest.raises(MoveError, match="out of reach"):
        await world.backend.snapshot(a.members, op="2")
    await world.backend.snapshot(b.members, op="3")
    await world.backend.restore(b.members, op="4")
    assert await b.intact()
    world.node.release()
    async with asyncio.timeout(PATIENCE):
        while world.backend.out_of_reach(a.pids[0]):
            await look_again()
    assert world.state(a.pids[0]) == "checkpointed"
    await world.backend.restore(a.members, op="5")
    assert await a.intact()


async def test_a_stopped_process_is_refused_with_the_remedy(world: CudaWorld) -> None:
    job = await world.job()
    job.ranks[0].process.send_signal(19)
    with pytest.raises(MoveError, match="kill -CONT"):
        await world.backend.snapshot(job.members, op="1")
    job.ranks[0].process.send_signal(18)
    assert world.node.calls("begin-lock") == []


async def test_a_target_that_dies_in_the_driver_is_reported_and_its_peer_goes_on(world: CudaWorld) -> None:
    job = await world.job(ranks=2)
    world.node.fault("checkpoint", job.pids[0], "die", count=1)
    with pytest.raises(MoveError, match=f"process {job.pids[0]} ended"):
        await world.backend.snapshot(job.members, op="1")
    assert world.state(job.pids[1]) == "running"
    assert await job.ranks[1].intact()


async def test_children_of_the_registered_process_move_with_it(world: CudaWorld) -> None:
    leader = await world.rank("--children", "2")
    ranks = [(await leader.until("ready"))["pid"] for _ in range(2)]
    member = world.member("a", leader.pid)
    await world.backend.snapshot([member], op="1")
    assert [world.state(pid) for pid in ranks] == ["checkpointed"] * 2
    assert member.parked
    await world.backend.restore([member], op="2")
    assert not member.parked
    leader.tell("check")
    assert [(await leader.until("checked"))["ok"] for _ in range(2)] == [True, True]


async def test_a_process_without_device_memory_is_left_alone(world: CudaWorld) -> None:
    job = await world.job()
    probe = await world.rank("--probe")
    await probe.until("ready")
    members = [*job.members, world.member("a", probe.pid)]
    await world.backend.snapshot(members, op="1")
    assert world.node.calls("begin-lock", probe.pid) == []
    await world.backend.restore(members, op="2")
    assert await job.intact()
