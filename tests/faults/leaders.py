"""Several orchestrators on one store, and a crowd of jobs that take turns, each turn witnessed.

The witness is not the orchestrator's: a job inside its turn is written down here, in the process of all jobs.
"""

import asyncio
import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

import grpc
from faults.cluster import BOUND, Process
from ports import Kept

from coslice.client.aio import AsyncClient
from coslice.testing.fake_agent import FakeAgent
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc


class Orchestrators:
    """``folder`` keeps their logs. Addresses stay the same over restarts."""

    def __init__(self, folder: Path, store: str, *, ttl: float, **settings: object) -> None:
        self.folder, self._store, self._ttl, self._settings = folder, store, ttl, settings
        self.processes: dict[str, Process] = {}
        self._places: list[Kept] = []

    def start(self, listen: str = "") -> str:
        if not listen:
            self._places.append(Kept())
            listen = self._places[-1].address
        config = {"listen": listen, "store": self._store, "leader_ttl": self._ttl, **self._settings}
        command = ["serve.py", "orchestrator", json.dumps(config)]
        process = Process(command, self.folder / f"orchestrator-{len(self.processes)}.log")
        address = str(process.hear()["orchestrator"])
        self.processes[address] = process
        return address

    @property
    def addresses(self) -> str:
        return ",".join(self.processes)

    async def leader(self, *, other_than: str = "") -> str:
        """Whoever answers as one."""
        async with asyncio.timeout(BOUND):
            while True:
                for address, process in self.processes.items():
                    if address == other_than or process.process.poll() is not None:
                        continue
                    if await asked(address) is not None:
                        return address
                await asyncio.sleep(0.05)  # an election is not announced to strangers

    def signal(self, address: str, signum: signal.Signals) -> None:
        os.kill(self.processes[address].pid, signum)

    def close(self) -> None:
        for process in self.processes.values():
            process.end()


async def asked(address: str, timeout: float = 2.0) -> pb.GetStatusResponse | None:
    """Its status; None from one that stands by, or is not there."""
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            return await rpc.OrchestratorStub(channel).GetStatus(pb.GetStatusRequest(), timeout=timeout)  # type: ignore[no-any-return, misc, unused-ignore]
    except grpc.aio.AioRpcError:
        return None


class Crowd:
    """In each group a holder and ``waiters`` jobs behind it; each has one turn and goes."""

    def __init__(self, addresses: str, groups: int, waiters: int) -> None:
        self._addresses = addresses
        self.groups = [f"g{number:03}" for number in range(groups)]
        self._waiters = waiters
        self._inside: dict[str, set[str]] = defaultdict(set)
        self.doubles: list[str] = []
        self.turns: dict[str, list[str]] = defaultdict(list)
        """Per group, in the order of the grants; the holder is not among them."""
        self.epochs: dict[str, list[int]] = defaultdict(list)
        self.first: dict[str, float] = {}
        """When the first waiter of a group was granted."""
        self._agents: list[FakeAgent] = []
        self._clients: dict[str, AsyncClient] = {}
        self._turns: list[asyncio.Task[None]] = []

    async def arrive(self) -> dict[str, list[str]]:
        """The holders hold, the others wait. Returns each group's queue, as the orchestrator has it."""
        some = [self.groups[n::4] for n in range(min(4, len(self.groups)))]
        self._agents = [
            FakeAgent(self._addresses, node=f"n{number}", groups=groups) for number, groups in enumerate(some)
        ]
        await asyncio.gather(*(agent.start() for agent in self._agents))
        await asyncio.gather(*(self._enter(group, f"{group}-holder") for group in self.groups))
        waiting = [(group, f"{group}-w{n}") for group in self.groups for n in range(self._waiters)]
        self._turns = [asyncio.create_task(self._take_turn(*who)) for who in waiting]
        async with asyncio.timeout(2 * BOUND):
            while True:
                found = await self._status()
                queues = {group.group: [one.job for one in group.waiters] for group in found.groups}
                if sum(map(len, queues.values())) == len(waiting):
                    return queues
                await asyncio.sleep(0.1)  # a status is not pushed while nobody leads

    async def go_on(self) -> None:
        """The holders yield; then each waiter has its turn."""
        async with asyncio.timeout(5 * BOUND):
            await asyncio.gather(*(self._leave(group, f"{group}-holder") for group in self.groups))
            await asyncio.gather(*self._turns)

    async def close(self) -> None:
        async with asyncio.timeout(BOUND):
            for turn in self._turns:
                turn.cancel()
            await asyncio.gather(*self._turns, return_exceptions=True)
            await asyncio.gather(*(client.close() for client in self._clients.values()))
            await asyncio.gather(*(agent.stop() for agent in self._agents))

    async def _status(self) -> pb.GetStatusResponse:
        for address in self._addresses.split(","):
            if (found := await asked(address, BOUND)) is not None:
                return found
        raise AssertionError("nobody leads")

    async def _take_turn(self, group: str, job: str) -> None:
        epoch = await self._enter(group, job)
        self.first.setdefault(group, time.monotonic())
        self.turns[group].append(job)
        self.epochs[group].append(epoch)
        await asyncio.sleep(0)  # lets others in, as computing would
        await self._leave(group, job)

    async def _enter(self, group: str, job: str) -> int:
        client = self._clients[job] = AsyncClient(
            self._addresses,
            job=job,
            groups=group,
            incarnation="1",
            connect_timeout=5 * BOUND,
            reconnect_timeout=5 * BOUND,
        )
        grant = await client.acquire(timeout=5 * BOUND)
        if self._inside[group]:
            self.doubles.append(f"{job} beside {self._inside[group]}")
        self._inside[group].add(job)
        return grant.leases[0].epoch

    async def _leave(self, group: str, job: str) -> None:
        self._inside[group].discard(job)
        await self._clients[job].yield_()

    def check(self, queues: dict[str, list[str]]) -> None:
        """Nobody lost, nobody twice, nobody out of his turn."""
        assert not self.doubles
        assert {group: self.turns[group] for group in self.groups} == queues
        for epochs in self.epochs.values():
            assert epochs == sorted(set(epochs))
