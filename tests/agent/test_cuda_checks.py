"""What the cuda backend refuses before it touches a process, each with its remedy; settings; devices to
restore onto; the driver's own refusals."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent.cuda_world import MIB, PATIENCE, CudaWorld, cuda_world, libraries, look_again
from agent.process_world import node_context

from coslice.agent.backends import cuda, cuda_checks
from coslice.agent.backends.base import MoveError
from coslice.agent.backends.cuda_settings import read_pairs
from coslice.agent.backends.process_ledger import Target
from coslice.agent.backends.resolve import parse_backend
from coslice.agent.discovery import procfs
from coslice.agent.discovery.survey import Gpu, Survey
from coslice.agent.privileged import run_program
from coslice.agent.processes import kill
from coslice.errors import ConfigError
from coslice.testing.fake_cuda import uuid

pytestmark = pytest.mark.cuda

NCCL = "/dev/shm/nccl-coslice-test"


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return libraries(tmp_path_factory)


@pytest.fixture
async def world(tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CudaWorld]:
    async with cuda_world(tmp_path, fakes, monkeypatch, capacity=16 * MIB, devices=2) as made:
        yield made


async def refused(world: CudaWorld, words: str, *, ranks: int = 1, **job: object) -> MoveError:
    """A snapshot is refused with these words, and nothing was asked of the driver that changes anything."""
    made = await world.job(ranks=ranks, **job)  # type: ignore[arg-type]
    with pytest.raises(MoveError, match=words) as caught:
        await world.backend.snapshot(made.members, op="1")
    assert world.node.calls("begin-lock") == []
    assert await made.intact()
    return caught.value


async def test_mig(world: CudaWorld) -> None:
    world.node.configure(mig=1)
    await refused(world, "MIG mode.*turn MIG off")


async def test_mps(world: CudaWorld) -> None:
    job = await world.job()
    world.node.configure(mps=job.pids[0])
    with pytest.raises(MoveError, match=r"MPS.*start the job without it"):
        await world.backend.snapshot(job.members, op="1")


async def test_a_process_that_another_program_locked(world: CudaWorld) -> None:
    job = await world.job(ranks=2)
    binary = str(world.node.binary)
    locked = job.pids[1]
    await run_program([binary, "--action", "lock", "--pid", str(locked), "--timeout", "1000"])
    with pytest.raises(MoveError, match=f"{locked} is locked already.*--action unlock --pid {locked}"):
        await world.backend.snapshot(job.members, op="1")
    assert [world.state(pid) for pid in job.pids] == ["running", "locked"]
    await run_program([binary, "--action", "unlock", "--pid", str(locked)])
    await world.backend.snapshot(job.members, op="2")
    await world.backend.restore(job.members, op="3")
    assert await job.intact()


async def test_what_this_agent_could_not_unlock_it_still_moves(world: CudaWorld) -> None:
    job = await world.job()
    world.node.fault("checkpoint", job.pids[0], "error", 801, count=1)
    world.node.fault("unlock", job.pids[0], "error", 801, count=1)
    with pytest.raises(MoveError):
        await world.backend.snapshot(job.members, op="1")
    assert world.state(job.pids[0]) == "locked"
    await world.backend.snapshot(job.members, op="2")
    await world.backend.restore(job.members, op="3")
    assert await job.intact()


async def test_nothing_found_is_not_nothing_there_where_pids_are_another_namespaces(
    world: CudaWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.start({"settle": 0.1})
    other, rank = await world.job("b"), await world.rank("--probe")
    await rank.until("ready")
    idle = world.member("a", rank.pid)
    assert (await world.backend.snapshot([idle], op="1")).bytes == 0
    real = procfs.process
    monkeypatch.setattr(procfs, "process", lambda pid: None if pid in other.pids else real(pid))
    monkeypatch.setattr(procfs, "sees_every_process", lambda: False)
    with pytest.raises(MoveError, match=f"process {other.pids[0]}, which is not in this pid .*hostPID"):
        await world.backend.snapshot([idle], op="2")
    monkeypatch.setattr(procfs, "sees_every_process", lambda: True)  # the driver lists one that has ended
    assert (await world.backend.snapshot([idle], op="3")).bytes == 0


async def test_the_program_without_persistence_mode(world: CudaWorld) -> None:
    """There a restore by it was seen to end the process; helpers that started CUDA themselves may go on."""
    world.node.configure(persistence=0)
    await world.start({"calls": "program", "program": str(world.node.binary)})
    await refused(world, r"nvidia-smi -pm 1.*cuda-bindings")
    await world.start()
    await world.backend.snapshot(world.members[:1], op="2")
    await world.backend.restore(world.members[:1], op="3")


async def test_a_call_that_takes_long_is_spoken_of_before_it_counts_as_hanging(
    world: CudaWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("coslice.agent.backends.cuda_moves.SLOW", 0.002)
    job = await world.job()
    world.node.fault("checkpoint", job.pids[0], "hang", count=1)
    moving = asyncio.ensure_future(world.backend.snapshot(job.members, op="1"))
    async with asyncio.timeout(PATIENCE):
        while "the checkpoint of process" not in caplog.text:
            await look_again()
    world.node.release()
    await moving
    assert world.state(job.pids[0]) == "checkpointed"


async def test_an_old_driver(world: CudaWorld) -> None:
    world.node.configure(driver="550.54.15", cuda_version=12040)
    await refused(world, "550.54.15.*570 .*or later")


async def test_a_profiler(world: CudaWorld) -> None:
    await refused(world, "profiler.*without it", env={"CUDA_INJECTION64_PATH": "/opt/tool.so"})


async def test_no_information_is_not_idle(world: CudaWorld) -> None:
    job = await world.job()
    world.node.fault("nvml", None, "error", 999)
    with pytest.raises(MoveError, match=r"not known .*Unknown"):
        await world.backend.snapshot(job.members, op="1")
    world.node.heal()
    await world.backend.snapshot(job.members, op="2")
    world.node.fault("nvml", None, "error", 999)
    with pytest.raises(MoveError, match="not known") as caught:
        await world.backend.restore(job.members, op="3")
    assert not caught.value.lost
    assert world.node.calls("begin-restore") == []
    world.node.heal()
    await world.backend.restore(job.members, op="4")
    assert await job.intact()


async def test_no_host_memory(world: CudaWorld) -> None:
    await world.start(host_budget=4 * MIB)
    error = await refused(world, "host budget")
    assert error.no_room


async def test_no_host_memory_on_the_node(world: CudaWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coslice.agent.discovery.procfs.available_memory", lambda: MIB)
    error = await refused(world, "node has 1 MiB")
    assert error.no_room


async def test_no_host_memory_in_the_jobs_cgroup(world: CudaWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coslice.agent.discovery.cgroups.memory_left", lambda text: MIB)
    error = await refused(world, "own cgroup")
    assert error.no_room


async def test_live_communicators_between_processes(world: CudaWorld) -> None:
    """NCCL's shared-memory transport leaves segments mapped in both. What the environment says decides."""
    Path(NCCL).write_bytes(bytes(4096))  # noqa: ASYNC240
    try:
        flags = ("--map", NCCL)
        error = await refused(world, r"live NCCL.*on_snapshot.*NCCL_NVLS_ENABLE=0", ranks=2, flags=flags)
        assert error.pid
        env = {"NCCL_NVLS_ENABLE": "0", "NCCL_P2P_DISABLE": "1"}
        job = await world.job("b", ranks=2, size=MIB, flags=flags, env=env)
        await world.backend.snapshot(job.members, op="2")
        await world.backend.restore(job.members, op="3")
        assert await job.intact()
    finally:
        os.unlink(NCCL)


async def test_managed_memory_is_refused_by_the_driver_and_explained(world: CudaWorld) -> None:
    job = await world.job(flags=("--managed",))
    with pytest.raises(MoveError, match="cudaMallocManaged"):
        await world.backend.snapshot(job.members, op="1")
    assert world.state(job.pids[0]) == "running"
    assert await job.intact()


async def test_a_driver_that_cannot_checkpoint_here_is_asked_once(world: CudaWorld) -> None:
    world.node.configure(no_checkpoint=1)
    job = await world.job()
    with pytest.raises(MoveError, match="arm64"):
        await world.backend.snapshot(job.members, op="1")
    assert len(world.node.calls("begin-checkpoint")) == 1
    assert world.state(job.pids[0]) == "running"


async def test_a_thread_is_not_a_process(world: CudaWorld) -> None:
    job = await world.job()
    threads = {int(name) for name in os.listdir(f"/proc/{job.pids[0]}/task")} - set(job.pids)
    target = Target(pid=min(threads), started=job.members[0].started)
    survey = await world.surveyor.survey()
    with pytest.raises(MoveError, match=r"has ended|is a thread"):
        cuda_checks.check_processes([target], survey)


async def test_a_frozen_cgroup(world: CudaWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coslice.agent.discovery.cgroups.frozen", lambda text: True)
    await refused(world, "frozen by its cgroup.*thaw")


async def test_cuda_that_does_not_start_is_said_and_tried_again(world: CudaWorld) -> None:
    job = await world.job()
    world.node.fault("init", None, "error", 803)
    with pytest.raises(MoveError, match="the CUDA driver does not start"):
        await world.backend.snapshot(job.members, op="1")
    world.node.heal()
    await world.backend.snapshot(job.members, op="2")
    assert world.state(job.pids[0]) == "checkpointed"


async def test_a_job_comes_back_onto_another_device(world: CudaWorld) -> None:
    old, new = uuid(0), uuid(1)
    await world.start({"remap": f"{old}={new} {new}={old}"})
    job = await world.job()
    await world.backend.snapshot(job.members, op="1")
    await world.backend.restore(job.members, op="2")
    assert await job.intact()
    survey = await world.surveyor.survey()
    assert [bool(gpu.holders) for gpu in survey.gpus] == [False, True]


async def test_room_is_measured_on_the_device_that_it_comes_back_to(world: CudaWorld) -> None:
    old, new = uuid(0), uuid(1)
    await world.start({"remap": f"{old}={new} {new}={old}", "settle": 0.1})
    job = await world.job(size=10 * MIB)
    await world.backend.snapshot(job.members, op="1")
    other = await world.job("b", size=10 * MIB, device=1)
    with pytest.raises(MoveError, match=f"process {other.pids[0]}"):
        await world.backend.restore(job.members, op="2")
    assert world.node.poisonings == 0


@pytest.mark.parametrize(
    ("remap", "config", "words"),
    [
        ("{0}={1} {1}={0}", {"driver": "575.57.08", "cuda_version": 12090}, "580 .*or later"),
        ("{0}={1} {1}={0}", {"name_1": "Other GPU"}, "same kind"),
        ("{0}={1} {1}={0}", {"capacity_1": 8 * MIB}, "same kind and size"),
        ("{0}={2} {2}={0}", {}, "which is not here"),
    ],
)
async def test_a_map_that_no_restore_could_follow(
    world: CudaWorld, remap: str, config: dict[str, object], words: str
) -> None:
    world.node.configure(**config)
    await world.start({"remap": remap.format(*map(uuid, range(3)))})
    await refused(world, words)


async def test_the_driver_is_given_every_device_of_the_node(world: CudaWorld) -> None:
    world.node.configure(devices=3)
    await world.start({"remap": f"{uuid(0)}={uuid(1)} {uuid(1)}={uuid(0)}"})
    job = await world.job()
    await world.backend.snapshot(job.members, op="1")
    await world.backend.restore(job.members, op="2")
    assert await job.intact()


def test_a_map_of_devices_needs_bindings_that_can(world: CudaWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "12.9.10")
    with pytest.raises(ConfigError, match=r"13.4 or later, and 12\.9\.10"):
        cuda.make(
            node_context(world.folder, world.store, {}), {"remap": f"{uuid(0)}={uuid(1)} {uuid(1)}={uuid(0)}"}
        )


def test_a_map_of_devices_is_a_permutation_or_refused() -> None:
    assert read_pairs(parse_backend("cuda:remap=GPU-a=GPU-b GPU-b=GPU-a,tries=2").settings["remap"]) == (
        ("GPU-a", "GPU-b"),
        ("GPU-b", "GPU-a"),
    )
    assert read_pairs("GPU-a=GPU-a GPU-b=GPU-b") == ()  # stay off the driver's way of moving processes
    for text in ("GPU-a", "GPU-a=1", "GPU-a=GPU-b", "GPU-a=GPU-b GPU-b=GPU-b"):
        with pytest.raises(ConfigError):
            read_pairs(text)


@pytest.mark.parametrize(
    "settings",
    [
        {"lock_timout": 3},
        {"lock_timeout": "soon"},
        {"lock_timeout": 0},
        {"lock_timeout": "inf"},
        {"settle": -1},
        {"tries": 0},
        {"calls": "magic"},
        {"calls": "program", "program": "no-such-program"},
    ],
)
async def test_settings_that_make_no_sense_are_refused(world: CudaWorld, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="backend cuda"):
        cuda.make(node_context(world.folder, world.store, {}), settings)


def test_advice_names_what_works_badly() -> None:
    gpus = tuple(Gpu(index=i, uuid=f"GPU-{i}", persistence=False) for i in range(2))
    (partial, persistence) = cuda_checks.advice(Survey(driver="570.86.10", cuda=12080, gpus=gpus))
    assert "575.57.08" in partial
    assert "nvidia-smi -pm 1" in persistence
    good = tuple(Gpu(index=i, uuid=f"GPU-{i}", persistence=True) for i in range(2))
    assert cuda_checks.advice(Survey(driver="580.95.05", cuda=13000, gpus=good)) == []
    for driver, words in {"595.71.05": "hang the whole node", "570.158.01": "575.57.08"}.items():
        assert any(words in text for text in cuda_checks.advice(Survey(driver=driver, cuda=13000)))


async def test_a_job_that_is_killed_is_checkpointed_first(world: CudaWorld) -> None:
    """Ending a live process that was restored was seen to hang a node (cuda-checkpoint issue 53)."""
    leader = await world.rank("--children", "2")
    ranks = {(await leader.until("ready"))["pid"] for _ in range(2)}
    further = await world.backend.retire([world.member("a", leader.pid)])
    assert {each.pid for each in further} == ranks
    assert {world.state(pid) for pid in ranks} == {"checkpointed"}
    for each in further:
        assert kill(each.pid, each.started)
        await world.ended(each.pid)
