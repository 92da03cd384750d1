"""One process of the load of ``coslice bench scale``: jobs with a connection each, agents that only say yes.

Speaks the wire itself, because thousands of client libraries with their threads would be what is measured.
Takes commands as JSON lines on standard input, and answers each with one JSON line.

A group's jobs take turns. Whoever is granted holds until the group's next moment to yield (moments are spread
evenly over all groups), and asks again at once, so that all others of the group always wait.

How late this process itself comes to what is due is told beside: it is part of every time taken here.
"""

import asyncio
import gc
import json
import math
import os
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import grpc.aio

from coslice.agent.processes import start_time
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc

Stretch = tuple[float, float]
KEEPALIVE_S = 30
AT_ONCE = 64
"""Jobs that connect, or ask for the first time, at the same time."""
NICE = 10
"""Its processor time is not counted: it gives way to the orchestrator where cores are few."""
STARTED = start_time(os.getpid()) or 0
PROBE = "asked"
TICK_S = 0.01
"""Between two looks at how late the loop comes."""
LATE_S = 0.005
"""A hand-over during which the loop came later than this is told apart."""


def options() -> list[tuple[str, int]]:
    return [
        ("grpc.use_local_subchannel_pool", 1),  # a TCP connection of its own for every channel
        ("grpc.keepalive_time_ms", 1000 * KEEPALIVE_S),
        ("grpc.keepalive_timeout_ms", 1000 * KEEPALIVE_S),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.bdp_probe", 0),  # as jobs and agents have it
    ]


class Stream(ABC):
    """A bidirectional stream: what is put goes out, what comes is handed to ``hear``."""

    def __init__(self, address: str, broken: asyncio.Future[None]) -> None:
        """``broken`` is told if it ends by itself."""
        self._broken = broken
        self._channel = grpc.aio.insecure_channel(address, options=options())
        self.stub = pb_grpc.OrchestratorStub(self._channel)
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    @abstractmethod
    async def hear(self) -> None: ...

    def open(self, hello: Any) -> None:
        self.put(hello)
        self.task = asyncio.create_task(self.hear())
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._broken.done():
            self._broken.set_exception(task.exception() or EOFError("the orchestrator ended a stream"))

    def put(self, message: Any) -> None:
        self._out.put_nowait(message)

    async def outgoing(self) -> AsyncIterator[Any]:
        while True:
            yield await self._out.get()

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self._channel.close(None)


class Job(Stream):
    def __init__(self, address: str, broken: asyncio.Future[None], name: str, turns: "Turns") -> None:
        super().__init__(address, broken)
        self.name, self.turns = name, turns
        self.welcome = asyncio.Event()
        self._requests = 0
        self.lease: pb.LeaseRef | None = None
        self.asked = asyncio.Event()
        """What it asked for at first was heard, and is saved."""

    async def connect(self) -> None:
        hello = pb.Hello(
            job=self.name,
            incarnation=secrets.token_hex(8),
            session=secrets.token_hex(8),
            node="bench",
            pid=os.getpid(),
            start_time=STARTED,
        )
        self.open(pb.ClientMessage(hello=hello))
        await self.welcome.wait()

    async def hear(self) -> None:
        async for message in self.stub.Session(self.outgoing()):
            match message.WhichOneof("kind"):
                case "welcome":
                    self.welcome.set()
                case "granted":
                    lease = message.granted.leases[0]
                    self.lease = pb.LeaseRef(group=lease.group, epoch=lease.epoch)
                    self.put(pb.ClientMessage(confirm=pb.Confirm(request=message.granted.request)))
                    self.turns.granted(self, time.monotonic())
                case "refused" if message.refused.request == PROBE:
                    self.asked.set()
                case "refused" | "lease_lost":
                    self.turns.troubles.append(str(message)[:200])
                case _:
                    pass

    def acquire(self) -> None:
        self._requests += 1
        ask = pb.Acquire(request=str(self._requests), groups=[self.turns.group])
        self.put(pb.ClientMessage(acquire=ask))

    def probe(self) -> None:
        """Messages of a session are answered one after another: the refusal of this one tells that the
        acquire before it was taken, which nothing else tells while it waits."""
        message = pb.ClientMessage()
        getattr(message, "yield").request = PROBE
        self.put(message)

    def give(self) -> None:
        assert self.lease is not None
        self._requests += 1
        message = pb.ClientMessage()
        getattr(message, "yield").CopyFrom(pb.Yield(request=str(self._requests), leases=[self.lease]))
        self.lease = None
        self.put(message)


class Turns:
    """One group: who has it, and how long each hand-over took."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.jobs: list[Job] = []
        self.holder: Job | None = None
        self.held = asyncio.Event()
        self.yielded: float | None = None
        self.took: list[tuple[float, float]] = []
        """When the lock was given, and when its next holder heard of it."""
        self.troubles: list[str] = []
        self.missed = 0
        """Moments at which the last hand-over was not over yet."""

    def granted(self, job: Job, at: float) -> None:
        if self.holder is not None:
            self.troubles.append(f"{job.name} was granted {self.group} while {self.holder.name} holds it")
        self.holder = job
        self.held.set()
        if self.yielded is not None:
            self.took.append((self.yielded, at))
            self.yielded = None

    def pass_on(self) -> None:
        job, self.holder = self.holder, None
        if job is None:
            self.missed += 1
            return
        self.held.clear()
        self.yielded = time.monotonic()
        job.give()
        job.acquire()


class Agent(Stream):
    """A node whose devices have room for everybody: each command is answered at once."""

    def __init__(self, address: str, broken: asyncio.Future[None], node: str, groups: list[str]) -> None:
        super().__init__(address, broken)
        self._node, self._groups = node, groups
        self._version = 1
        self.welcome = asyncio.Event()

    async def connect(self) -> None:
        offers = [
            pb.GroupOffer(group=group, epoch=0, residency=pb.Residency(group=group, version=1))
            for group in self._groups
        ]
        hello = pb.AgentHello(
            node=self._node, groups=offers, accelerator="host", instance=secrets.token_hex(8)
        )
        self.open(pb.AgentMessage(hello=hello))
        await self.welcome.wait()

    async def hear(self) -> None:
        async for command in self.stub.Attach(self.outgoing()):
            match command.WhichOneof("kind"):
                case "welcome":
                    self.welcome.set()
                case "make_resident":
                    told = command.make_resident
                    self._version += 1
                    residency = pb.Residency(group=told.group, version=self._version)
                    done = pb.OpDone(op=told.op, group=told.group, epoch=told.epoch, residency=residency)
                    self.put(pb.AgentMessage(done=done))
                case "echo":
                    self.put(pb.AgentMessage(echo=command.echo))
                case _:
                    pass


class Lag:
    """How late the loop of this process comes, looked at every ``TICK_S``."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        """When a look was due, and how late it was."""

    async def run(self) -> None:
        while True:  # only a timer that comes late shows it
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.found.append((due, time.monotonic() - due))

    def late(self) -> list[tuple[float, float]]:
        """From when to when it was late, in order."""
        return [(due, due + late) for due, late in self.found if late > LATE_S]


class Load:
    def __init__(self, address: str, first: int, groups: int, jobs: int, nodes: int) -> None:
        """``first``: number of the first group; ``jobs``: of each group; ``nodes``: that serve the groups."""
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises once a stream ended by itself."""
        self.turns = [Turns(f"g{first + i}") for i in range(groups)]
        for turns in self.turns:
            turns.jobs = [Job(address, self.broken, f"{turns.group}-j{k}", turns) for k in range(jobs)]
        names = [turns.group for turns in self.turns]
        self.agents = [Agent(address, self.broken, f"n{first}-{k}", names[k::nodes]) for k in range(nodes)]

    async def connect(self) -> dict[str, Any]:
        for agent in self.agents:
            await agent.connect()
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(job: Job) -> None:
            async with gate:
                await job.connect()

        jobs = [job for turns in self.turns for job in turns.jobs]
        await asyncio.gather(*(one(job) for job in jobs))
        return {"jobs": len(jobs)}

    async def ask(self) -> dict[str, Any]:
        """Every job asks; returns when each has been heard, and somebody of each group has its lock."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(job: Job) -> None:
            async with gate:
                job.acquire()
                job.probe()
                await job.asked.wait()
                await job.turns.held.wait()

        await asyncio.gather(*(one(job) for turns in self.turns for job in turns.jobs))
        return {}

    async def run(self, begin: float, seconds: float, period: float, offset: float) -> dict[str, Any]:
        """Every group passes its lock on once a ``period``; the groups' moments begin ``offset`` after
        ``begin``, on this machine's monotonic clock."""
        for turns in self.turns:
            turns.took, turns.missed = [], 0
        lag = Lag()
        ticking = asyncio.create_task(lag.run())
        pace = period / len(self.turns)
        for number in range(math.ceil((seconds - offset) / pace)):
            at = begin + offset + number * pace
            await asyncio.sleep(max(0.0, at - time.monotonic()))  # the pace of the load
            self.turns[number % len(self.turns)].pass_on()
        for turns in self.turns:
            await turns.held.wait()  # the last answers
        ticking.cancel()
        took = sorted(took for turns in self.turns for took in turns.took)
        return {
            "took": [(until - since) * 1e3 for since, until in took],
            "took_in_time": [(until - since) * 1e3 for since, until in apart(took, lag.late())],
            "lag": [late * 1e3 for _, late in lag.found],
            "missed": sum(turns.missed for turns in self.turns),
            "troubles": [trouble for turns in self.turns for trouble in turns.troubles][:20],
        }

    async def close(self) -> dict[str, Any]:
        streams: list[Stream] = [*self.agents, *(job for turns in self.turns for job in turns.jobs)]
        await asyncio.gather(*(stream.close() for stream in streams))
        return {}


def apart(took: Iterable[Stretch], late: Sequence[Stretch]) -> Iterator[Stretch]:
    """Those of ``took`` that share no moment with any of ``late``. Both in order, ``late`` without
    overlaps."""
    first = 0
    for since, until in took:
        while first < len(late) and late[first][1] < since:
            first += 1
        if first == len(late) or late[first][0] > until:
            yield since, until


async def main() -> None:
    address, *numbers = sys.argv[1:]
    os.nice(NICE)
    load = Load(address, *(int(number) for number in numbers))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        if command["do"] == "run":
            gc.freeze()
            gc.disable()  # its pauses would be measured as the orchestrator's
        doing = asyncio.ensure_future(getattr(load, command.pop("do"))(**command))
        await asyncio.wait((doing, load.broken), return_when=asyncio.FIRST_COMPLETED)
        if load.broken.done():
            load.broken.result()
        print(json.dumps(doing.result()), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
