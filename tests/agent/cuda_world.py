"""The cuda backend on a fake node: real helpers, real bindings, jobs that check their device memory."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from agent.process_world import lone_member, node_context

from coslice.agent.backends import cuda
from coslice.agent.discovery.surveyor import Surveyor
from coslice.agent.members import Member
from coslice.agent.processes import start_time
from coslice.store import make_store
from coslice.testing import gpu_job
from coslice.testing.fake_cuda import CannotBuild, FakeNode, build

MIB = 1 << 20
PATIENCE = 30.0
CONTEXT = 1 << 20
"""What a context takes on the fake device, beside the job's own bytes."""


def libraries(factory: pytest.TempPathFactory) -> Path:
    """The fakes, built once a test session; skips where they cannot be built."""
    try:
        import cuda.bindings  # noqa: F401
        import pynvml  # noqa: F401
    except ImportError as error:
        pytest.skip(f"coslice[cuda] is not installed: {error}")
    try:
        return build(factory.getbasetemp().parent / "coslice-fakes")
    except CannotBuild as error:
        pytest.skip(str(error))


async def look_again() -> None:
    """Logs, shared memory and processes of others tell nobody when they change."""
    await asyncio.sleep(0.01)


class Rank:
    """One process on the fake device."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    async def until(self, event: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            while True:
                line = await self.process.stdout.readline()
                assert line, f"the process ended before it said {event}"
                said: dict[str, Any] = json.loads(line)
                if said["event"] == event:
                    return said

    async def intact(self) -> bool:
        self.tell("check")
        return bool((await self.until("checked"))["ok"])

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class Job:
    def __init__(self, members: list[Member], ranks: list[Rank]) -> None:
        self.members, self.ranks = members, ranks

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self.ranks]

    async def intact(self) -> bool:
        return all([await rank.intact() for rank in self.ranks])


class CudaWorld:
    def __init__(self, node: FakeNode | None, folder: Path) -> None:
        self._node, self.folder = node, folder
        self.surveyor = Surveyor()
        self.ranks: list[Rank] = []
        self.members: list[Member] = []
        self.backends: list[cuda.CudaBackend] = []
        self.backend: cuda.CudaBackend

    @property
    def node(self) -> FakeNode:
        assert self._node is not None
        return self._node

    async def start(self, settings: Mapping[str, object] | None = None, **config: Any) -> cuda.CudaBackend:
        """A backend on the state of the last one, as after a restart of the agent."""
        if self.backends:
            await self.stop_backend()
        self.store = make_store(self.folder / "agent.sqlite", flush=False)
        found = await self.store.load()
        context = node_context(self.folder, self.store, found, surveyor=self.surveyor, **config)
        chosen = {"margin": 0, "calls": "bindings", "lock_timeout": 10, **(settings or {})}
        self.backend = cuda.make(context, chosen)
        self.backends.append(self.backend)
        await self.backend.start()
        return self.backend

    async def stop_backend(self) -> None:
        await self.backend.close()
        await self.store.close()

    async def agent(self, ops: str, job: "Job") -> asyncio.subprocess.Process:
        """Another agent on the same state, in a process that a test may kill."""
        await self.stop_backend()
        self.backends.clear()
        script = Path(__file__).with_name("cuda_agent.py")
        path = os.pathsep.join((str(script.parents[1]), *filter(None, sys.path)))
        return await asyncio.create_subprocess_exec(
            *(sys.executable, str(script), str(self.folder), ops, *map(str, job.pids)),
            env={**self.node.environment(), "PYTHONPATH": path},
            stdout=asyncio.subprocess.PIPE,
        )

    async def called(self, op: str, pid: int, times: int = 1) -> int:
        """Until so many calls have begun; returns the pid of the last caller."""
        async with asyncio.timeout(PATIENCE):
            while len(calls := self.node.calls(f"begin-{op}", pid)) < times:
                await look_again()
        return calls[-1].caller

    async def rank(
        self, *flags: str, size: int = 4 * MIB, device: int = 0, env: dict[str, str] | None = None
    ) -> Rank:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            gpu_job.__file__,
            *("--bytes", str(size), "--device", str(device), *flags),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**self.node.environment(), **(env or {})},
        )
        rank = Rank(process)
        self.ranks.append(rank)
        return rank

    async def job(
        self,
        name: str = "a",
        *,
        ranks: int = 1,
        size: int = 4 * MIB,
        flags: tuple[str, ...] = (),
        **more: Any,
    ) -> Job:
        started = [await self.rank(*flags, size=size, **more) for _ in range(ranks)]
        for rank in started:
            await rank.until("ready")
        return Job([self.member(name, rank.pid) for rank in started], started)

    def member(self, job: str, pid: int) -> Member:
        member = lone_member(job, pid, backend="cuda")
        self.members.append(member)
        return member

    def state(self, pid: int) -> str:
        return self.node.slots()[pid].state

    async def until(self, pid: int, state: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.state(pid) != state:
                await look_again()

    @staticmethod
    async def ended(pid: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while start_time(pid) is not None:
                await look_again()

    async def until_working(self, pid: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while not self.node.slots()[pid].working:
                await look_again()

    async def stop(self) -> None:
        self.node.release()
        self.node.idle()
        self.node.heal()
        for rank in self.ranks:
            await rank.kill()
        if self.backends:
            await self.stop_backend()
        await self.surveyor.close()
        for member in self.members:
            member.close()


@asynccontextmanager
async def cuda_world(
    folder: Path, libraries: Path, patch: pytest.MonkeyPatch, **config: object
) -> AsyncIterator[CudaWorld]:
    node = FakeNode(folder / "node", libraries=libraries, **{"context_bytes": CONTEXT, **config})
    for key, value in node.environment().items():
        if os.environ.get(key) != value:
            patch.setenv(key, value)
    world = CudaWorld(node, folder)
    await world.start()
    try:
        yield world
    finally:
        await world.stop()
