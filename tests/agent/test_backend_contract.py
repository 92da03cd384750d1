"""Every backend keeps the one contract: the app channel over a real agent, cuda on the fake driver, tpu on a
fake tool."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from agent.conftest import MIB, Node, Process
from agent.cuda_world import CudaWorld, cuda_world, libraries
from agent.cuda_world import Job as CudaJob
from agent.process_world import node_context
from agent.test_tpu import TpuWorld

from coslice.agent.backends import app_channel, cuda, tpu
from coslice.agent.backends.base import Backend
from coslice.agent.members import Member
from coslice.core.ids import GroupId, JobId
from coslice.store import make_store
from coslice.testing.backend_contract import BackendContract, Job


class ChannelJob:
    def __init__(self, node: Node, name: str, process: Process) -> None:
        self._process = process
        assert node.agent is not None
        self.members = node.agent.members.of_job(GroupId(""), JobId(name))

    async def intact(self) -> bool:
        self._process.tell("check")
        return bool((await self._process.until("checked"))["intact"])

    def device_bytes(self) -> int:
        return sum(member.memory.exact() - member.baseline for member in self.members)

    async def kill(self) -> None:
        self._process.process.kill()
        await self._process.ended()
        for member in self.members:
            assert member.process is not None
            await member.process.ended.wait()

    async def break_next_snapshot(self) -> None:
        await self._process.do("busy 1")


class ChannelWorld:
    def __init__(self, node: Node, folder: Path) -> None:
        self._node, self._folder = node, folder
        assert node.agent is not None
        self.backend: Backend = node.agent.backends.named("app_channel")

    async def job(self, name: str) -> ChannelJob:
        process = await self._node.workload(name, size=32 * MIB, group="")
        return ChannelJob(self._node, name, process)

    async def break_next_snapshot(self, job: Job) -> None:
        assert isinstance(job, ChannelJob)
        await job.break_next_snapshot()

    def make(self, settings: Mapping[str, object]) -> Backend:
        store = make_store(":memory:")
        return app_channel.make(node_context(self._folder, store, {}), settings)


class TestAppChannel(BackendContract):
    @pytest.fixture
    async def world(self, node: Node, tmp_path: Path) -> ChannelWorld:
        await node.start(groups=())
        return ChannelWorld(node, tmp_path)


class MeasuredJob:
    def __init__(self, world: CudaWorld, job: CudaJob) -> None:
        self._world, self._job = world, job

    @property
    def members(self) -> list[Member]:
        return self._job.members

    async def intact(self) -> bool:
        return await self._job.intact()

    def device_bytes(self) -> int:
        slots = self._world.node.slots()
        return sum(sum(slots[pid].bytes) for pid in self._job.pids)

    async def kill(self) -> None:
        for rank in self._job.ranks:
            await rank.kill()


class CudaContractWorld:
    def __init__(self, world: CudaWorld) -> None:
        self._world = world

    @property
    def backend(self) -> Backend:
        return self._world.backend

    async def job(self, name: str) -> MeasuredJob:
        return MeasuredJob(self._world, await self._world.job(name, ranks=2, size=2 * MIB))

    async def break_next_snapshot(self, job: Job) -> None:
        self._world.node.fault("checkpoint", job.members[1].pid, "error", 801, count=1)

    def make(self, settings: Mapping[str, object]) -> Backend:
        return cuda.make(node_context(self._world.folder, self._world.store, {}), settings)


class TestCuda(BackendContract):
    calls = "bindings"

    @pytest.fixture
    async def world(
        self, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[CudaContractWorld]:
        found = libraries(tmp_path_factory)
        async with cuda_world(tmp_path, found, monkeypatch, capacity=32 * MIB) as world:
            if self.calls == "program":
                await world.start({"calls": "program", "program": str(world.node.binary)})
            yield CudaContractWorld(world)


@pytest.mark.cuda
class TestCudaByTheProgram(TestCuda):
    calls = "program"


class TpuJob:
    def __init__(self, world: TpuWorld, members: list[Member]) -> None:
        self._world, self.members = world, members

    async def intact(self) -> bool:
        return all(where == "attached" for where in self._world.where(self.members))

    def device_bytes(self) -> None:
        return None

    async def kill(self) -> None:
        for process in self._world.processes:
            if process.pid in {member.pid for member in self.members}:
                process.kill()
                await process.wait()


class TpuContractWorld:
    def __init__(self, world: TpuWorld) -> None:
        self._world = world
        self._chips = iter(range(16))

    @property
    def backend(self) -> Backend:
        return self._world.backend

    async def job(self, name: str) -> TpuJob:
        return TpuJob(self._world, await self._world.job(name, next(self._chips), next(self._chips)))

    async def break_next_snapshot(self, job: Job) -> None:
        for member in job.members:
            for _ in range(2):  # it is tried once more
                self._world.fail("checkpoint", member.pid)

    def make(self, settings: Mapping[str, object]) -> Backend:
        assert self._world.store is not None
        return tpu.make(node_context(self._world.folder, self._world.store, {}), settings)


class TestTpu(BackendContract):
    @pytest.fixture
    async def world(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TpuContractWorld]:
        made = TpuWorld(tmp_path)
        monkeypatch.setenv("COSLICE_FAKE_TPU", str(made.node))
        await made.start()
        try:
            yield TpuContractWorld(made)
        finally:
            await made.stop()
