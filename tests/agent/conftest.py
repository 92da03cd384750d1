"""One node for a test: a fake orchestrator, an agent, and workload processes that end with the test."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from agent.fake_orchestrator import PATIENCE, FakeOrchestrator
from forked import AsyncForked
from msgspec.structs import replace

from coslice.agent.app import AgentApp
from coslice.agent.config import AgentConfig, GroupDevices
from coslice.core.ids import GroupId, NodeId
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

MIB = 1 << 20
GROUP = "train"


def contexts(residency: pb.Residency) -> dict[str, str]:
    return {context.job: pb.ContextState.Name(context.state) for context in residency.contexts}


class Process:
    """A fake workload and what it said."""

    def __init__(self, process: asyncio.subprocess.Process | AsyncForked) -> None:
        self.process, self.said = process, list[dict[str, Any]]()

    @property
    def pid(self) -> int:
        return self.process.pid

    async def until(self, event: str, **facts: object) -> dict[str, Any]:
        """The next line with this event (and these facts)."""
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            while True:
                line = await self.process.stdout.readline()
                assert line, f"the workload ended before it said {event}: {self.said}"
                self.said.append(json.loads(line))
                if self.said[-1]["event"] == event and facts.items() <= self.said[-1].items():
                    return self.said[-1]

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")

    async def do(self, command: str) -> None:
        self.tell(command)
        await self.until("did", word=command.split()[0])

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()


class Node:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.orchestrator = FakeOrchestrator()
        self.agent: AgentApp | None = None
        self.processes: list[Process] = []
        self.config: AgentConfig | None = None

    async def start(self, *, budget: int = 160 * MIB, host: int = 1024 * MIB, **settings: Any) -> AgentApp:
        if not self.orchestrator.address:
            await self.orchestrator.start()
        values: dict[str, Any] = {
            "node": NodeId("node-0"),
            "state_dir": str(self.folder / "state"),
            "runtime_dir": str(self.folder / "run"),
            "orchestrator": self.orchestrator.address,
            "listen": "127.0.0.1:0",
            "host_budget": host,
            "groups": (GroupDevices(group=GroupId(GROUP), device_budget=budget, cpus=(0,)),),
            "retries": 0,
        }
        self.config = AgentConfig(**{**values, **settings})
        return await self.run(self.config)

    async def run(self, config: AgentConfig) -> AgentApp:
        self.agent = AgentApp(config)
        await self.agent.start()
        async with asyncio.timeout(PATIENCE):
            await self.agent.wait_ready()
        return self.agent

    async def run_again(self, **settings: Any) -> AgentApp:
        """A new agent on the state of the last one."""
        assert self.config is not None
        return await self.run(replace(self.config, **settings))

    async def sampled(self, group: str, *, at_least: int) -> None:
        """Until the sampler has seen so much in use. Memory use notifies nobody, so this looks."""
        assert self.agent is not None
        async with asyncio.timeout(PATIENCE):
            while self.agent.peak_device_bytes[GroupId(group)] < at_least:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def workload(
        self, job: str, *flags: str, size: int = 100 * MIB, group: str = GROUP, wait: bool = True
    ) -> Process:
        assert self.agent is not None
        process = await AsyncForked.start(
            Path(__file__).with_name("fake_workload.py"),
            *("--agent", self.agent.address, "--job", job, "--group", group, "--bytes", str(size), *flags),
        )
        self.processes.append(Process(process))
        if wait:
            await self.processes[-1].until("registered")
        return self.processes[-1]

    async def status(self) -> pb.GetNodeStatusResponse:
        async with grpc.aio.insecure_channel(self.agent.address) as channel:
            return await rpc.AgentStub(channel).GetNodeStatus(pb.GetNodeStatusRequest(), timeout=PATIENCE)

    async def stop(self) -> None:
        for process in self.processes:
            if process.process.returncode is None:
                process.process.kill()
            await process.process.wait()
        if self.agent is not None:
            await self.agent.stop()
        await self.orchestrator.stop()


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    with tempfile.TemporaryDirectory(prefix="coslice-") as folder:  # short: it holds a unix socket
        served = Node(Path(folder))
        try:
            yield served
        finally:
            await served.stop()
