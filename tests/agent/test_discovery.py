"""Discovery: cgroups of both versions, processes and pid namespaces, surveys of a fake NVML, its events."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from agent.cuda_world import MIB, PATIENCE, CudaWorld, cuda_world, libraries, look_again
from msgspec.structs import replace

from coslice.agent import cuda
from coslice.agent.discovery import cgroups, procfs
from coslice.agent.discovery.survey import Gpu, Holder, Survey
from coslice.agent.host import AnonymousMemory
from coslice.agent.members import Member, Members
from coslice.agent.occupancy import Occupancy, belongs
from coslice.agent.processes import start_time
from coslice.core.ids import GroupId, Incarnation, JobId, MemberId
from coslice.security import fingerprint
from coslice.testing.fake_cuda import FakeNode, uuid

POD = "0a1b2c3d-4e5f-6789-abcd-ef0123456789"
OTHER = "0a1b2c3d-4e5f-6789-abcd-ef012345678a"
ID = "0123456789abcdef" * 4


# ── cgroups ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "pod", "container"),
    [
        # v2, systemd driver, containerd
        (
            "0::/kubepods.slice/kubepods-burstable.slice/"
            f"kubepods-burstable-pod{POD.replace('-', '_')}.slice/cri-containerd-{ID}.scope\n",
            POD,
            ID,
        ),
        # v1, cgroupfs driver: the same path under every controller
        (
            f"12:memory:/kubepods/besteffort/pod{POD}/{ID}\n3:cpu,cpuacct:/kubepods/besteffort/pod{POD}/{ID}\n",
            POD,
            ID,
        ),
        # v2, guaranteed class, cri-o, with a cgroup of the job's own below
        (f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/crio-{ID}.scope/job\n", POD, ID),
        # containerd's systemd form without the systemd driver
        (
            f"0::/system.slice/containerd.service/kubepods-burstable-pod{POD}.slice:cri-containerd:{ID}\n",
            "",
            ID,
        ),
        # docker without Kubernetes
        (f"0::/system.slice/docker-{ID}.scope\n", "", ID),
        (f"11:freezer:/docker/{ID}\n0::/\n", "", ID),
        # cri-o's monitor is no container, and a login session is none
        (f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/crio-conmon-{ID}.scope\n", POD, ""),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "", ""),
        ("not a cgroup file", "", ""),
        ("", "", ""),
    ],
)
def test_pods_and_containers(text: str, pod: str, container: str) -> None:
    found = cgroups.placement_of(text)
    assert (found.pod, found.container) == (pod, container)


def test_ids_are_matched_whole() -> None:
    """A UID or container id that only begins like another is another."""
    assert cgroups.placement_of(f"0::/kubepods/pod{POD}x/{ID}\n").pod == ""
    assert cgroups.placement_of(f"0::/kubepods/pod{POD}/{ID}0\n").container == ""
    assert cgroups.placement_of(f"0::/kubepods/pod{OTHER}/{ID}\n").pod != POD


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_memory_left_is_the_least_of_the_cgroups_above(tmp_path: Path) -> None:
    v2 = tmp_path / "v2"
    write(v2 / "pod" / "memory.max", str(100 * MIB))
    write(v2 / "pod" / "memory.current", str(70 * MIB))
    write(v2 / "pod" / "job" / "memory.max", "max")
    write(v2 / "pod" / "job" / "memory.current", str(10 * MIB))
    assert cgroups.memory_left("0::/pod/job\n", sys=v2) == 30 * MIB
    assert cgroups.memory_left("0::/elsewhere\n", sys=v2) is None
    v1 = tmp_path / "v1"
    write(v1 / "memory" / "job" / "memory.limit_in_bytes", str(8 * MIB))
    write(v1 / "memory" / "job" / "memory.usage_in_bytes", str(9 * MIB))
    write(v1 / "memory" / "free" / "memory.limit_in_bytes", str((1 << 63) - 4096))
    write(v1 / "memory" / "free" / "memory.usage_in_bytes", "1")
    assert cgroups.memory_left("4:memory:/job\n", sys=v1) == 0
    assert cgroups.memory_left("4:memory:/free\n", sys=v1) is None


def test_freezers_of_both_versions_and_of_hybrids(tmp_path: Path) -> None:
    v1, v2, hybrid = tmp_path / "v1", tmp_path / "v2", tmp_path / "hybrid"
    write(v1 / "freezer" / "a" / "freezer.state", "FROZEN")
    write(v2 / "pod" / "cgroup.freeze", "1")
    write(v2 / "pod" / "job" / "cgroup.freeze", "0")
    write(hybrid / "unified" / "a" / "cgroup.freeze", "1")
    assert cgroups.frozen("9:freezer:/a\n", sys=v1)
    assert not cgroups.frozen("9:freezer:/b\n", sys=v1)
    assert cgroups.frozen("0::/pod/job\n", sys=v2)
    assert not cgroups.frozen("0::/other\n", sys=v2)
    assert cgroups.frozen("0::/a\n", sys=hybrid)


# ── processes ──────────────────────────────────────────────────────────────


def proc_entry(proc: Path, pid: int, *, started: int, namespaced: str, tgid: int | None = None) -> None:
    fields = ["S", "1", *["0"] * 17, str(started), *["0"] * 30]
    write(proc / str(pid) / "stat", f"{pid} (a (strange) name) {' '.join(fields)}")
    write(proc / str(pid) / "status", f"Name:\tx\nTgid:\t{tgid or pid}\nNSpid:\t{namespaced}")


def test_a_pid_of_a_container_is_found_by_its_start_time(tmp_path: Path) -> None:
    proc_entry(tmp_path, 4001, started=77, namespaced="4001 12")
    proc_entry(tmp_path, 4002, started=78, namespaced="4002 12")  # another container's 12
    proc_entry(tmp_path, 12, started=5, namespaced="12")
    assert procfs.host_pid(12, 77, proc=tmp_path) == 4001
    assert procfs.host_pid(12, 78, proc=tmp_path) == 4002
    assert procfs.host_pid(12, 5, proc=tmp_path) == 12
    assert procfs.host_pid(12, 79, proc=tmp_path) is None


def test_a_thread_is_told_from_a_process(tmp_path: Path) -> None:
    proc_entry(tmp_path, 51, started=5, namespaced="51", tgid=50)
    seen = procfs.process(51, proc=tmp_path)
    assert seen is not None
    assert (seen.group, seen.started, seen.state) == (50, 5, "S")
    assert procfs.process(52, proc=tmp_path) is None


def test_this_process_and_its_parents() -> None:
    seen = procfs.process(os.getpid())
    assert seen is not None
    assert (seen.group, seen.parent, seen.started) == (os.getpid(), os.getppid(), start_time(os.getpid()))
    assert list(procfs.line(os.getpid()))[:2] == [os.getpid(), os.getppid()]
    assert procfs.available_memory() > 0


def test_a_process_belongs_to_the_member_that_its_ancestor_is(tmp_path: Path) -> None:
    members = Members()
    assert belongs(os.getpid(), list(members)) is None


def test_a_process_that_left_its_tree_is_of_its_own_job_though_two_have_one_token() -> None:
    """As a script's that exports ``COSLICE_INCARNATION`` once, and runs two."""
    nobody = 1 << 22  # no pid is so large
    two = [
        Member(
            id=MemberId(job),
            job=JobId(job),
            incarnation=Incarnation(fingerprint.incarnation("one")),
            group=GroupId("g"),
            pid=nobody,
            started=0,
            memory=AnonymousMemory(os.getpid()),
        )
        for job in ("a", "b")
    ]
    for job, found in (("b", two[1]), ("a", two[0]), ("", two[0])):
        environment = {"COSLICE_INCARNATION": "one", "COSLICE_JOB": job}
        with subprocess.Popen(
            ["sh", "-c", "echo; read end"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()  # from here on it has its environment
            assert belongs(process.pid, two) is found
            process.communicate()
    for member in two:
        member.memory.close()


# ── surveys ────────────────────────────────────────────────────────────────


def test_sums_of_a_survey() -> None:
    gpus = (
        Gpu(index=0, uuid="GPU-0", holders=(Holder(pid=1, bytes=10), Holder(pid=2, bytes=None))),
        Gpu(index=1, uuid="GPU-1", holders=(Holder(pid=1, bytes=5),)),
    )
    survey = Survey(driver="575.57.08", gpus=gpus)
    assert survey.usage() == {1: {"GPU-0": 10, "GPU-1": 5}, 2: {"GPU-0": None}}
    assert survey.bytes_of([1, 3]) == 15
    assert survey.driver_version == (575, 57, 8)
    assert Survey(driver="x").driver_version == ()


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return libraries(tmp_path_factory)


@pytest.fixture
async def world(tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CudaWorld]:
    async with cuda_world(tmp_path, fakes, monkeypatch, capacity=16 * MIB, devices=2) as made:
        yield made


async def test_a_survey_says_who_is_on_which_device(world: CudaWorld) -> None:
    a = await world.job("a", size=2 * MIB)
    b = await world.job("b", size=3 * MIB, device=1)
    survey = await world.surveyor.survey()
    assert survey.error == ""
    assert [gpu.uuid for gpu in survey.gpus] == [uuid(0), uuid(1)]
    assert survey.usage() == {a.pids[0]: {uuid(0): 3 * MIB}, b.pids[0]: {uuid(1): 4 * MIB}}
    assert [gpu.used for gpu in survey.gpus] == [3 * MIB, 4 * MIB]
    assert all(gpu.total == 16 * MIB and gpu.free == gpu.total - gpu.used for gpu in survey.gpus)


async def test_a_survey_that_does_not_come_is_no_information(world: CudaWorld) -> None:
    world.surveyor._timeout = 1.0
    world.node.fault("nvml", None, "hang", count=1)
    first = await world.surveyor.survey()
    assert "did not answer" in first.error
    assert first.gpus == ()
    second = await world.surveyor.survey()
    assert "does not answer" in second.error
    world.node.release()
    async with asyncio.timeout(PATIENCE):
        while (await world.surveyor.survey()).error:
            await look_again()


async def test_devices_that_are_lost_are_an_error_in_the_log(
    world: CudaWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """A container can lose them while it runs (nvidia-container-toolkit issue 48)."""
    await world.surveyor.survey()
    world.node.fault("nvml", None, "error", 999)
    for _ in range(3):
        await world.surveyor.survey()
    assert caplog.text.count("devices can no longer be read") == 1
    world.node.heal()
    await world.surveyor.survey()
    assert "devices can be read again" in caplog.text


async def test_a_helper_that_ended_is_started_again(world: CudaWorld) -> None:
    assert (await world.surveyor.survey()).gpus
    os.kill(world.surveyor.pid, 9)
    async with asyncio.timeout(PATIENCE):
        while (await world.surveyor.survey()).error:
            await look_again()


async def test_xid_and_ecc_errors_go_to_the_log(world: CudaWorld, caplog: pytest.LogCaptureFixture) -> None:
    await world.surveyor.survey()
    world.node.configure(ecc_uncorrected_1=3)
    with caplog.at_level(logging.ERROR, "coslice"):
        await world.surveyor.survey()
        await world.surveyor.survey()
        async with asyncio.timeout(PATIENCE):
            while world.surveyor.xids != {uuid(1): 79}:
                world.node.xid(1, 79)  # until the helper listens
                await asyncio.sleep(0.1)
    said = [record.getMessage() for record in caplog.records]
    assert sum("3 uncorrected ECC errors" in line for line in said) == 1
    assert any("Xid 79" in line and "fallen off the bus" in line for line in said)


async def test_occupancy_finds_the_jobs_processes(world: CudaWorld) -> None:
    leader = await world.rank("--children", "2", size=2 * MIB)
    for _ in range(2):
        await leader.until("ready")
    stranger = await world.job("b", size=2 * MIB, device=1)
    members = Members()
    member = world.member("a", leader.pid)
    members.add(member)
    occupancy = Occupancy(members, world.surveyor)
    survey = await occupancy.refresh()
    assert occupancy.bytes_of(member) == 2 * 3 * MIB
    jobs = {occupancy.job_of(pid) for pid in survey.usage()}
    assert jobs == {"a", None}
    assert occupancy.job_of(stranger.pids[0]) is None
    assert occupancy.known_bytes_of(member) == 2 * 3 * MIB
    silent = tuple(
        replace(gpu, holders=tuple(replace(h, bytes=None) for h in gpu.holders)) for gpu in survey.gpus
    )
    for last in (replace(survey, gpus=silent), Survey(error="NVML does not answer")):
        world.surveyor.last = last
        assert occupancy.known_bytes_of(member) is None


def test_devices_are_found_before_the_agent_serves(
    tmp_path: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = FakeNode(tmp_path / "node", libraries=fakes, devices=2, capacity=16 * MIB, capacity_1=8 * MIB)
    for key, value in node.environment().items():
        monkeypatch.setenv(key, value)
    assert [device.total_bytes for device in cuda.devices()] == [16 * MIB, 8 * MIB]
    assert cuda.device_memory() == 24 * MIB


def test_without_a_driver_there_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody waits for an import of torch to hear that."""

    def imported(name: str) -> None:
        raise AssertionError(f"{name} was imported")

    code = "from coslice.agent.discovery.nvml import Nvml; print(Nvml().survey().error)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if not said.stdout.startswith("NVML"):
        pytest.skip("there is a driver here")
    monkeypatch.setattr(cuda.importlib, "import_module", imported)
    assert cuda.devices() == ()
