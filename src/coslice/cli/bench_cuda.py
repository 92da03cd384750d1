"""What a whole-process swap costs beside the driver: the agent's own part of a ``cuda`` hand-over.

Everything is real but the driver: helpers, the ledger on disk, NVML surveys, preflight of every process. The
driver's share is taken out as the time of the slowest process in each step, as its calls ran at once.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from msgspec import Struct

from coslice.agent.backends import cuda
from coslice.agent.backends.base import NodeContext
from coslice.agent.buffers import HostBuffers
from coslice.agent.config import AgentConfig
from coslice.agent.discovery.surveyor import Surveyor
from coslice.agent.host import AnonymousMemory
from coslice.agent.members import Member, member_id
from coslice.agent.processes import start_time
from coslice.core.ids import GroupId, Incarnation, JobId, NodeId
from coslice.store import make_store
from coslice.testing import gpu_job
from coslice.testing.fake_cuda import FakeNode

MIB = 1 << 20


class CudaOverhead(Struct, frozen=True, kw_only=True):
    processes: int
    swaps: int
    overhead_ms: float
    """Snapshot and restore together, without the driver; the median of the swaps."""
    snapshot_ms: float
    restore_ms: float
    driver_ms: float


def measure_cuda_overhead(*, processes: int = 8, swaps: int = 20, size: int = MIB) -> CudaOverhead:
    """Raises ``fake_cuda.CannotBuild`` where the fake driver cannot be built. Takes a few seconds."""
    with tempfile.TemporaryDirectory(prefix="coslice-") as folder:
        node = FakeNode(
            Path(folder) / "node", capacity=4 * processes * (size + MIB), context_bytes=4096, log=0
        )
        with _environment(node.environment()):
            return asyncio.run(_measure(Path(folder), processes, swaps, size))


async def _measure(folder: Path, processes: int, swaps: int, size: int) -> CudaOverhead:
    store = make_store(folder / "agent.sqlite", flush=False)
    surveyor = Surveyor()
    context = NodeContext(
        config=AgentConfig(
            node=NodeId("bench"),
            state_dir=str(folder),
            runtime_dir=str(folder / "run"),
            host_budget=1 << 40,
        ),
        buffers=HostBuffers(1 << 40),
        surveyor=surveyor,
        store=store,
        found=await store.load(),
    )
    backend = cuda.make(context, {"calls": "bindings", "margin": 0})
    ranks = [_start(size) for _ in range(processes)]
    members = [_member(rank.pid) for rank in ranks]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            await asyncio.to_thread(rank.stdout.readline)
        outs, backs, driver = list[float](), list[float](), list[float]()
        for swap in range(swaps + 1):  # the first starts the helpers
            spent = backend.driver_seconds
            began = time.perf_counter()
            await backend.snapshot(members, op=f"{swap}/out")
            middle, spent_out = time.perf_counter(), backend.driver_seconds - spent
            await backend.restore(members, op=f"{swap}/in")
            spent_in = backend.driver_seconds - spent - spent_out
            outs.append(middle - began - spent_out)
            backs.append(time.perf_counter() - middle - spent_in)
            driver.append(spent_out + spent_in)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
        await backend.close()
        await surveyor.close()
        await store.close()
        for member in members:
            member.close()
    both = [out + back for out, back in zip(outs[1:], backs[1:], strict=True)]
    return CudaOverhead(
        processes=processes,
        swaps=swaps,
        overhead_ms=1e3 * median(both),
        snapshot_ms=1e3 * median(outs[1:]),
        restore_ms=1e3 * median(backs[1:]),
        driver_ms=1e3 * median(driver[1:]),
    )


def _start(size: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-S", gpu_job.__file__, "--bytes", str(size)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _member(pid: int) -> Member:
    started = start_time(pid)
    assert started is not None
    job, incarnation = JobId("bench"), Incarnation("bench-1")
    return Member(
        id=member_id(job, incarnation, pid, started),
        job=job,
        incarnation=incarnation,
        group=GroupId(""),
        pid=pid,
        started=started,
        memory=AnonymousMemory(pid),
        device="cuda",
        backend="cuda",
    )


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """For programs that are started in it."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
