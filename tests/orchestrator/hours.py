"""Hours of real jobs in a second: orchestrator, agent and clients are real and talk over sockets; only what
the orchestrator takes for the time is ours.

Jobs compute and wait by that clock, each in its own order. Between two moments everything that was said is
heard and answered; a verdict that is on its way is waited for. So nothing depends on how fast the machine is.
"""

import asyncio
import heapq
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio

import coslice
from coslice.agent.app import AgentApp
from coslice.agent.config import AgentConfig, GroupDevices
from coslice.core import events as ev
from coslice.core.group import next_deadline
from coslice.core.ids import GroupId, NodeId
from coslice.errors import CosliceError
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import GroupConfig, OrchestratorConfig
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

BOUND = 60.0
NEVER = 1e9
FIRST = asyncio.FIRST_COMPLETED


class Hand:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at


class Job:
    """``on``, ``off``: seconds of a cycle alone, from its next phase on."""

    def __init__(self, name: str, address: str, on: float, off: float, profile: str) -> None:
        self.name, self.on, self.off = name, on, off
        self.client = coslice.AsyncClient(
            address, job=name, groups="pool", incarnation=f"{name}-1", node="n0", profile=profile
        )
        self.asked: asyncio.Task[object] | None = None
        self.turns = 0
        self.changes: dict[int, float] = {}
        """After so many turns its phases take so many times as long."""
        self.error: CosliceError | None = None


class Hours:
    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder
        self.clock = Hand()
        self.jobs: dict[str, Job] = {}
        self.status = pb.GroupStatus()
        self._news = asyncio.Event()
        self._due: list[tuple[float, int, str, Job]] = []
        self._count = 0

    async def start(
        self, *, policy: str = "fifo", max_slowdown: float = 1.1, queue_limit: float = NEVER
    ) -> None:
        group = GroupConfig(id="pool", admission="enforce", max_slowdown=max_slowdown, policy=policy)
        # The clock moves by minutes between two words, so what is to be quick is not measured by it.
        config = OrchestratorConfig(
            listen="127.0.0.1:0", store=str(self._folder / "state.db"), groups=(group,), stop_grace=0.2,
            queue_limit=queue_limit, confirm_timeout=NEVER, quantum=NEVER, max_hold=NEVER, op_timeout=NEVER,
        )  # fmt: skip
        app = self._app = OrchestratorApp(config, clock=self.clock)
        await app.start()
        self._stack.push_async_callback(app.stop)
        self.address = app.address
        devices = GroupDevices(group=GroupId("pool"), device_budget=64 << 20)
        agent = AgentApp(
            AgentConfig(
                node=NodeId("n0"), state_dir=str(self._folder / "agent"), listen="127.0.0.1:0",
                runtime_dir=str(self._folder / "run"), host_budget=64 << 20, groups=(devices,),
                orchestrator=app.address,
            )
        )  # fmt: skip
        await agent.start()
        self._stack.push_async_callback(agent.stop)
        channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(app.address))
        self._stub = rpc.OrchestratorStub(channel)
        watch = asyncio.create_task(self._watch())
        self._stack.callback(watch.cancel)
        await self.until(lambda status: any(node.attached for node in status.nodes))

    async def _watch(self) -> None:
        async for _ in self._stub.WatchStatus(pb.GetStatusRequest(group="pool")):
            self._news.set()

    async def until(
        self, condition: Callable[[pb.GroupStatus], bool], asked: "asyncio.Task[object] | None" = None
    ) -> pb.GroupStatus:
        """The first status that fulfils it, or the one when this request was answered."""
        async with asyncio.timeout(BOUND):
            while True:
                self._news.clear()  # what is pushed from here on may be newer than what is read now
                answer = await self._stub.GetStatus(pb.GetStatusRequest(group="pool"))
                self.status = answer.groups[0]
                if condition(self.status) or (asked is not None and asked.done()):
                    return self.status
                news = asyncio.ensure_future(self._news.wait())
                await asyncio.wait([news, *([asked] if asked is not None else [])], return_when=FIRST)
                news.cancel()

    def job(self, name: str, on: float, off: float, *, profile: str = "") -> Job:
        """It asks for its first turn now, and goes on until ``error`` says why it cannot."""
        job = self.jobs[name] = Job(name, self.address, on, off, profile)
        self._stack.push_async_callback(job.client.close)
        self._later(0.0, "ask", job)
        return job

    def _later(self, seconds: float, what: str, job: Job) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.clock.at + seconds, self._count, what, job))

    async def play(self, done: Callable[[list[str]], bool], *, steps: int = 400) -> list[str]:
        """Until the codes of what was decided so far fulfil it; ``kept`` is left out: when members are judged
        once more, and nothing follows, nobody waits for it."""
        for _ in range(steps):
            codes = [code for code in _codes(self.status) if code != "kept"]
            if done(codes):
                return codes
            lock = self._app._shown.groups.get("pool")
            if (timer := next_deadline(lock.state)) is not None and timer <= self._due[0][0]:
                self.clock.at = timer  # the loop's timer knows nothing of this clock
                await lock.post(ev.DeadlinePassed(at=timer))
                await self._settled()
                continue
            at, _, what, job = heapq.heappop(self._due)
            self.clock.at = at
            if what == "ask":
                await self._ask(job)
            else:
                await job.client.yield_()
                job.turns += 1
                factor = job.changes.get(job.turns, 1.0)
                job.on, job.off = factor * job.on, factor * job.off
                self._later(job.off, "ask", job)
                await self._settled()
        raise AssertionError(f"not within {steps} steps: {self.status}")

    async def _ask(self, job: Job) -> None:
        job.asked = asyncio.create_task(job.client.acquire(timeout=BOUND))
        await self.until(lambda status: _waits(status, job.name), job.asked)
        await self._settled()

    async def _settled(self) -> None:
        """No verdict is on its way, and whoever can hold does."""
        shown = self._app._shown
        lock = shown.groups.get("pool")
        await self.until(lambda status: True)  # all is heard
        await asyncio.wait_for(shown.admission.idle.wait(), BOUND)
        status = await self.until(
            lambda status: not status.waiters or status.state == "held" or lock.state.reserved is not None
        )
        for job in self.jobs.values():
            if job.asked is None:
                continue
            if status.state == "held" and status.job == job.name:
                async with asyncio.timeout(BOUND):
                    await asyncio.wait([job.asked])
            if job.asked.done():
                asked, job.asked = job.asked, None
                if isinstance(error := asked.exception(), CosliceError):
                    job.error = error
                else:
                    asked.result()
                    self._later(job.on, "yield", job)

    async def explain(self, job: str = "") -> str:
        answer = await self._stub.Explain(pb.ExplainRequest(group="pool", job=job), timeout=BOUND)
        return "\n".join(answer.lines)


def _waits(status: pb.GroupStatus, job: str) -> bool:
    waits = any(waiter.job == job for waiter in status.waiters)
    return waits or any(m.job == job and m.state in ("applying", "queued") for m in status.admission.members)


def _codes(status: pb.GroupStatus) -> list[str]:
    return [text.partition(":")[0] for text in status.admission.decisions]
