"""One process of the load of ``coslice bench scale``: jobs with a connection each, agents that only say yes.

Speaks the wire itself, because thousands of client libraries with their threads would be what is measured.
Takes commands as JSON lines on standard input, and answers each with one JSON line.

A group's jobs take turns. Whoever is granted holds until the group's next moment to yield (moments are spread
evenly over all groups), and asks again at once, so that all others of the group always wait.
"""

import asyncio
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio

from coslice.agent.processes import start_time
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc

KEEPALIVE_S = 30
AT_ONCE = 64
"""Connections that are being opened at the same time."""
STARTED = start_time(os.getpid()) or 0


def options() -> list[tuple[str, int]]:
    return [
        ("grpc.use_local_subchannel_pool", 1),  # a TCP connection of its own for every channel
        ("grpc.keepalive_time_ms", 1000 * KEEPALIVE_S),
        ("grpc.keepalive_timeout_ms", 1000 * KEEPALIVE_S),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


class Stream:
    """A bidirectional stream: what is put goes out, what comes is handed to ``hear``."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=options())
        self.stub = pb_grpc.OrchestratorStub(self._channel)
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

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
    def __init__(self, address: str, name: str, turns: "Turns") -> None:
        super().__init__(address)
        self.name, self.turns = name, turns
        self.welcome = asyncio.Event()
        self._requests = 0
        self.lease: pb.LeaseRef | None = None

    async def connect(self) -> None:
        hello = pb.Hello(
            job=self.name,
            incarnation=secrets.token_hex(8),
            session=secrets.token_hex(8),
            node="bench",
            pid=os.getpid(),
            start_time=STARTED,
        )
        self.put(pb.ClientMessage(hello=hello))
        self.task = asyncio.create_task(self._hear())
        await self.welcome.wait()

    async def _hear(self) -> None:
        async for message in self.stub.Session(self.outgoing()):
            match message.WhichOneof("kind"):
                case "welcome":
                    self.welcome.set()
                case "granted":
                    lease = message.granted.leases[0]
                    self.lease = pb.LeaseRef(group=lease.group, epoch=lease.epoch)
                    self.put(pb.ClientMessage(confirm=pb.Confirm(request=message.granted.request)))
                    self.turns.granted(self, time.monotonic())
                case "refused" | "lease_lost":
                    self.turns.troubles.append(str(message)[:200])
                case _:
                    pass

    def acquire(self) -> None:
        self._requests += 1
        ask = pb.Acquire(request=str(self._requests), groups=[self.turns.group])
        self.put(pb.ClientMessage(acquire=ask))

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
        self.yielded: float | None = None
        self.took: list[float] = []
        self.troubles: list[str] = []
        self.missed = 0
        """Moments at which the last hand-over was not over yet."""

    def granted(self, job: Job, at: float) -> None:
        if self.holder is not None:
            self.troubles.append(f"{job.name} was granted {self.group} while {self.holder.name} holds it")
        self.holder = job
        if self.yielded is not None:
            self.took.append((at - self.yielded) * 1e3)
            self.yielded = None

    def pass_on(self) -> None:
        job, self.holder = self.holder, None
        if job is None:
            self.missed += 1
            return
        self.yielded = time.monotonic()
        job.give()
        job.acquire()


class Agent(Stream):
    """A node whose devices have room for everybody: each command is answered at once."""

    def __init__(self, address: str, node: str, groups: list[str]) -> None:
        super().__init__(address)
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
        self.put(pb.AgentMessage(hello=hello))
        self.task = asyncio.create_task(self._hear())
        await self.welcome.wait()

    async def _hear(self) -> None:
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


class Load:
    def __init__(self, address: str, first: int, groups: int, jobs: int, nodes: int) -> None:
        """``first``: number of the first group; ``jobs``: of each group; ``nodes``: that serve the groups."""
        self._address = address
        self.turns = [Turns(f"g{first + i}") for i in range(groups)]
        for turns in self.turns:
            turns.jobs = [Job(address, f"{turns.group}-j{k}", turns) for k in range(jobs)]
        names = [turns.group for turns in self.turns]
        self.agents = [Agent(address, f"n{first}-{k}", names[k::nodes]) for k in range(nodes)]

    async def connect(self) -> dict[str, Any]:
        for agent in self.agents:
            await agent.connect()
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(job: Job) -> None:
            async with gate:
                await job.connect()

        await asyncio.gather(*(one(job) for turns in self.turns for job in turns.jobs))
        return {"jobs": sum(len(turns.jobs) for turns in self.turns)}

    async def run(self, seconds: float, period: float, offset: float) -> dict[str, Any]:
        """Every group passes its lock on once a ``period``; the groups' moments begin at ``offset``."""
        for turns in self.turns:
            for job in turns.jobs:
                job.acquire()
        begin = time.monotonic() + 5.0  # all have asked by then
        pace = period / len(self.turns)
        end = begin + seconds
        for number in _numbers():
            at = begin + offset + number * pace
            if at >= end:
                break
            await asyncio.sleep(max(0.0, at - time.monotonic()))  # the pace of the load
            self.turns[number % len(self.turns)].pass_on()
        await asyncio.sleep(1.0)  # the last answers
        return {
            "took": [took for turns in self.turns for took in turns.took],
            "missed": sum(turns.missed for turns in self.turns),
            "troubles": [trouble for turns in self.turns for trouble in turns.troubles][:20],
        }

    async def close(self) -> dict[str, Any]:
        streams: list[Stream] = [*self.agents, *(job for turns in self.turns for job in turns.jobs)]
        await asyncio.gather(*(stream.close() for stream in streams))
        return {}


def _numbers() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


async def main() -> None:
    address, *numbers = sys.argv[1:]
    load = Load(address, *(int(number) for number in numbers))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        answer = await getattr(load, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
