"""One machine in this process: orchestrator, agent and their pages on one port, and real workloads."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import agent.fake_workload
import httpx
import pytest
from agent.conftest import MIB, Process
from orchestrator.raw_client import RawClient
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from coslice.agent.app import AgentApp
from coslice.agent.config import AgentConfig, GroupDevices
from coslice.core.ids import GroupId, NodeId
from coslice.observe.board import Board
from coslice.observe.http import HttpServer
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import GroupConfig, OrchestratorConfig

GROUP = "train"


class Seen:
    """A scrape."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples: list[Sample] = [each for family in self.families for each in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Of the one series with these labels (and perhaps more); 0 if there is none."""
        found = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert len(found) <= 1, found
        return found[0] if found else 0.0

    def total(self, name: str, **labels: str) -> float:
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())


class Machine:
    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self.board = Board()
        self.http = HttpServer(self.board, "127.0.0.1:0")
        self.orchestrator: OrchestratorApp
        self.agent: AgentApp
        self.processes: list[Process] = []

    async def start(self, *, budget: int, **apps: Any) -> None:
        """``apps``: what both apps are given further."""
        await self.http.start()
        self._stack.push_async_callback(self.http.stop)
        config = OrchestratorConfig(listen="127.0.0.1:0", stop_grace=0.2, groups=(GroupConfig(id=GROUP),))
        self.orchestrator = OrchestratorApp(config, board=self.board, **apps)
        await self.orchestrator.start()
        self._stack.push_async_callback(self.orchestrator.stop)
        self.agent = AgentApp(
            AgentConfig(
                node=NodeId("node-0"),
                state_dir=":memory:",
                runtime_dir=str(self._folder / "run"),
                orchestrator=self.orchestrator.address,
                listen="127.0.0.1:0",
                host_budget=1024 * MIB,
                groups=(GroupDevices(group=GroupId(GROUP), device_budget=budget, cpus=(0,)),),
            ),
            board=self.board,
            **apps,
        )
        await self.agent.start()
        self._stack.push_async_callback(self.agent.stop)
        await self.agent.wait_ready()

    async def workload(self, job: str, *flags: str, size: int) -> Process:
        """A process with so much state, known to the agent."""
        script = str(Path(agent.fake_workload.__file__))
        arguments = ["--agent", self.agent.address, "--job", job, "--group", GROUP, "--bytes", str(size)]
        process = Process(
            await asyncio.create_subprocess_exec(
                *(sys.executable, script, *arguments, *flags),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )
        self.processes.append(process)
        await process.until("admitted")
        return process

    async def client(self, job: str) -> RawClient:
        client = RawClient(self.orchestrator.address, job, incarnation="")
        self._stack.push_async_callback(client.close)
        return await client.connect()

    async def scrape(self) -> Seen:
        async with httpx.AsyncClient(base_url=self.http.url) as http:
            answer = await http.get("/metrics", timeout=20)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        return Seen(answer.text)

    async def stop(self) -> None:
        for process in self.processes:
            if process.process.returncode is None:
                process.process.kill()
            await process.process.wait()


@pytest.fixture
async def machine() -> AsyncIterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="coslice-") as folder:  # short: it holds a unix socket
        async with AsyncExitStack() as stack:
            made = Machine(stack, Path(folder))
            stack.push_async_callback(made.stop)
            yield made
