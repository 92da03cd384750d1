"""The agent's parts on their own: measuring, processes, buffers, the sampler."""

import asyncio
import gc
import json
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent.conftest import PATIENCE
from agent.fake_workload import fill

from coslice.agent import processes
from coslice.agent.buffers import BufferServer, HostBuffers, NoHostMemory
from coslice.agent.host import PAGE, AnonymousMemory, Gone, counter_error
from coslice.agent.members import Member
from coslice.agent.processes import Process
from coslice.agent.sampler import OVER, UsageSampler
from coslice.agent.tickets import Tickets
from coslice.core.ids import GroupId, Incarnation, JobId, MemberId

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_is_collected() -> Iterator[None]:
    """Our own memory is measured: tensors of earlier tests may lie in circles, and would go meanwhile."""
    gc.disable()
    yield
    gc.enable()


async def sleeper() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


# ── measuring ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("read", [AnonymousMemory.fast, AnonymousMemory.exact])
def test_anonymous_memory_is_seen_to_come_and_go(read: Callable[[AnonymousMemory], int]) -> None:
    memory = AnonymousMemory(os.getpid())
    before = read(memory)
    held = fill(64 * MIB, 1)
    assert read(memory) - before == pytest.approx(64 * MIB, rel=0.05)
    held.close()
    assert read(memory) - before < 4 * MIB
    memory.close()


def test_shared_memory_is_not_device_memory() -> None:
    memory = AnonymousMemory(os.getpid())
    before = memory.exact()
    fd = os.memfd_create("test")
    os.posix_fallocate(fd, 0, 64 * MIB)
    with mmap.mmap(fd, 64 * MIB) as shared:
        shared[:] = bytes(1) * len(shared)
        del shared
    assert memory.exact() - before < 4 * MIB
    os.close(fd)
    memory.close()


def test_the_counters_error_is_the_kernels_batch_on_every_core() -> None:
    assert counter_error(2) == 32 * 2 * PAGE
    assert counter_error(64) == 128 * 64 * PAGE


async def test_an_ended_process_is_gone_and_not_zero() -> None:
    process = await sleeper()
    memory = AnonymousMemory(process.pid)
    await end(process)
    with pytest.raises(Gone):
        memory.fast()
    with pytest.raises(Gone):
        memory.exact()
    with pytest.raises(Gone):
        AnonymousMemory(process.pid)
    memory.close()


# ── processes ──────────────────────────────────────────────────────────────


async def test_the_end_of_a_process_is_told_once() -> None:
    process = await sleeper()
    ends: list[int] = []
    started = processes.start_time(process.pid)
    assert started is not None
    watched = Process.watch(process.pid, started, lambda: ends.append(process.pid))
    assert watched is not None
    assert watched.kill()
    async with asyncio.timeout(PATIENCE):
        await watched.ended.wait()
    assert await process.wait() == -signal.SIGKILL
    assert ends == [process.pid]
    assert not watched.kill()


async def test_a_pid_with_another_start_time_is_never_watched_nor_killed() -> None:
    process = await sleeper()
    started = processes.start_time(process.pid)
    assert started is not None
    assert Process.watch(process.pid, started + 1, lambda: None) is None
    assert process.returncode is None
    await end(process)
    assert processes.start_time(process.pid) is None
    assert Process.watch(process.pid, started, lambda: None) is None


# ── buffers ────────────────────────────────────────────────────────────────


async def test_a_buffer_grows_keeps_its_content_and_never_shrinks() -> None:
    buffers = HostBuffers(64 * MIB)
    await buffers.reserve("a", 4 * MIB)
    os.pwrite(buffers.descriptor("a"), b"content", MIB)
    await buffers.reserve("a", 8 * MIB)
    await buffers.reserve("a", MIB)
    assert buffers.size("a") == 8 * MIB
    assert os.pread(buffers.descriptor("a"), 7, MIB) == b"content"
    buffers.close()
    assert buffers.used == 0


async def test_what_does_not_fit_is_refused_with_the_figures_and_changes_nothing() -> None:
    buffers = HostBuffers(10 * MIB)
    await buffers.reserve("a", 6 * MIB)
    with pytest.raises(
        NoHostMemory, match=r"5 MiB of state do not fit, 6 MiB of 10 MiB .* 1 MiB are missing"
    ):
        await buffers.reserve("b", 5 * MIB)
    assert buffers.used == 6 * MIB
    buffers.close()


async def test_an_idle_buffer_lends_its_pages_and_gets_them_back() -> None:
    buffers = HostBuffers(10 * MIB)
    await buffers.reserve("a", 6 * MIB)
    with mmap.mmap(buffers.descriptor("a"), 6 * MIB) as mapped:
        buffers.release("a")
        await buffers.reserve("b", 8 * MIB)
        assert (buffers.size("a"), buffers.used) == (0, 8 * MIB)
        assert mapped[5 * MIB] == 0  # no bus error for who still maps it
        buffers.release("b")
        await buffers.reserve("a", 6 * MIB)
        mapped[5 * MIB] = 7
        assert os.pread(buffers.descriptor("a"), 1, 5 * MIB) == b"\x07"
    assert buffers.used <= 10 * MIB
    buffers.close()


def ask(path: Path, request: object) -> tuple[dict, list[int]]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(str(path))
        connection.sendall(json.dumps(request).encode() + b"\n")
        data, fds, _, _ = socket.recv_fds(connection, 65536, 1)
    return json.loads(data), fds


async def test_only_the_registered_process_with_its_token_gets_a_buffer(tmp_path: Path) -> None:
    class Owner:
        buffer, parked = "a", False

    buffers = HostBuffers(10 * MIB)
    path = tmp_path / "b.sock"
    server = BufferServer(
        path,
        buffers,
        lambda token, pid: Owner() if (token, pid) == ("secret", os.getpid()) else None,
        Tickets(uid=os.getuid()),
    )
    await server.start()
    assert path.stat().st_mode & 0o777 == 0o600
    refused, fds = await asyncio.to_thread(ask, path, {"token": "guess", "bytes": 1})
    assert (refused["ok"], refused["code"], fds) == (False, "INVALID", [])
    refused, _ = await asyncio.to_thread(ask, path, ["nonsense"])
    assert (refused["ok"], refused["code"]) == (False, "INVALID")
    refused, fds = await asyncio.to_thread(ask, path, {"token": "secret", "bytes": 11 * MIB})
    assert (refused["ok"], refused["code"], fds) == (False, "NO_ROOM", [])
    given, fds = await asyncio.to_thread(ask, path, {"token": "secret", "bytes": 4 * MIB})
    assert given == {"ok": True, "bytes": 4 * MIB, "generation": 0}
    assert os.fstat(fds[0]).st_size == 4 * MIB
    os.close(fds[0])
    await server.stop()
    assert not path.exists()
    buffers.close()


# ── the sampler ────────────────────────────────────────────────────────────


def member(job: str, memory: AnonymousMemory) -> Member:
    return Member(
        id=MemberId(job),
        job=JobId(job),
        incarnation=Incarnation("i"),
        group=GroupId("g"),
        pid=memory.pid,
        started=0,
        memory=memory,
        baseline=memory.fast(),
    )


class Watched:
    def __init__(self, budget: int, members: list[Member], killable: set[str]) -> None:
        self.told: list[tuple[str, int]] = []
        self.killed: list[tuple[str, str]] = []
        self.sampler = UsageSampler(
            GroupId("g"),
            budget=budget,
            interval=0.01,
            members=lambda: members,
            measured=lambda job, used: self.told.append((job, used)),
            out_of_memory=lambda job, why: self.killed.append((job, why)),
            killable=lambda: frozenset(JobId(job) for job in killable),
        )
        self.members = members

    def sample(self, times: int = 1) -> None:
        for _ in range(times):
            self.sampler.sample(self.members)


def test_a_device_over_its_budget_is_out_of_memory_after_a_few_samples_and_once() -> None:
    memory = AnonymousMemory(os.getpid())
    watched = Watched(20 * MIB, [member("job-a", memory)], {"job-a"})
    watched.sample()
    held = fill(40 * MIB, 1)
    watched.sample(OVER - 1)
    assert watched.killed == []
    watched.sample(5)
    assert [job for job, _ in watched.killed] == ["job-a"]
    assert "20 MiB" in watched.killed[0][1]
    held.close()
    assert watched.sampler.peak >= 38 * MIB
    memory.close()


def test_a_job_that_is_not_on_the_device_is_never_the_victim() -> None:
    memory = AnonymousMemory(os.getpid())
    watched = Watched(20 * MIB, [member("job-a", memory)], set())
    held = fill(40 * MIB, 1)
    watched.sample(2 * OVER)
    assert watched.killed == []
    held.close()
    memory.close()


def test_small_changes_are_not_told_and_peaks_are_at_the_next_decision() -> None:
    memory = AnonymousMemory(os.getpid())
    watched = Watched(1 << 40, [member("job-a", memory)], set())
    watched.sample()
    assert watched.told == []
    held = fill(40 * MIB, 1)
    watched.sample(5)
    assert len(watched.told) == 1
    more = fill(40 * MIB, 1)
    watched.sample()
    more.close()
    watched.sample()
    watched.sampler.flush()
    assert max(used for _, used in watched.told) == pytest.approx(80 * MIB, rel=0.05)
    assert watched.told[-1][1] == pytest.approx(40 * MIB, rel=0.1)
    held.close()
    memory.close()


def test_a_sample_of_four_processes_costs_less_than_two_percent_of_a_core() -> None:
    memory = AnonymousMemory(os.getpid())
    watched = Watched(1 << 40, [member(f"job-{i}", memory) for i in range(4)], set())
    began = time.thread_time()
    watched.sample(1000)
    assert (time.thread_time() - began) / 1000 * 20 < 0.02  # at 20 samples a second
    memory.close()
