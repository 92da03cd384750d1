"""An orchestrator on a real socket, and clients and agents that end with the test."""

from contextlib import AsyncExitStack
from typing import Any

from orchestrator.raw_client import RawClient

from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import GroupConfig, OrchestratorConfig
from coslice.runtime.clock import Clock
from coslice.testing.fake_agent import FakeAgent


class World:
    """Everything of one test; closed in reverse order of opening."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.app: OrchestratorApp

    async def start(self, *, clock: Clock | None = None, **config: Any) -> OrchestratorApp:
        config.setdefault("listen", "127.0.0.1:0")
        config.setdefault("stop_grace", 0.2)
        config.setdefault("groups", (GroupConfig(id="pool"),))
        self.app = OrchestratorApp(OrchestratorConfig(**config), clock=clock)
        await self.app.start()
        self._stack.push_async_callback(self.app.stop)
        return self.app

    async def restart(self) -> OrchestratorApp:
        """A successor on the same address and store."""
        await self.app.stop()
        config = self.app.config
        return await self.start(
            listen=self.app.address,
            store=config.store,
            groups=config.groups,
            session_grace=config.session_grace,
        )

    async def agent(self, **options: Any) -> FakeAgent:
        options.setdefault("groups", ("pool",))
        return await self._stack.enter_async_context(FakeAgent(self.app.address, **options))

    async def client(self, job: str, *, pid: int = 0, node: str = "host-a", **options: Any) -> RawClient:
        """``pid``: of its process, which then began at tick ``pid``."""
        client = RawClient(self.app.address, job, **options)
        self._stack.push_async_callback(client.close)
        return await client.connect(pid=pid, node=node, started=pid)
