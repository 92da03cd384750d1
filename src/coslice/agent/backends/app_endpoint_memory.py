"""How much of the device an engine uses: all its processes together, measured and never asked."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from coslice.agent.discovery.surveyor import Surveyor
from coslice.agent.host import AnonymousMemory, Gone


class Measure(Protocol):
    async def used(self, pids: Sequence[int]) -> int | None:
        """Bytes of device memory that these processes use; None: it cannot be told."""
        ...

    async def room(self, pids: Sequence[int]) -> int | None:
        """Bytes that are free for them; None: the device has no bound of its own, or it cannot be told."""
        ...


class HostMeasure:
    """The host accelerator: the group's budget bounds it, and the caller keeps those books."""

    async def used(self, pids: Sequence[int]) -> int | None:
        return await asyncio.to_thread(host_memory, pids)  # walks page tables: some milliseconds a GiB

    async def room(self, pids: Sequence[int]) -> int | None:
        return None


class DeviceMeasure:
    """GPUs, by NVML. A process that the driver does not list uses nothing; no survey is no information."""

    def __init__(self, surveyor: Surveyor) -> None:
        self._surveyor = surveyor

    async def used(self, pids: Sequence[int]) -> int | None:
        survey = await self._surveyor.survey()
        usage = survey.usage()
        if survey.error or any(size is None for pid in pids for size in usage.get(pid, {}).values()):
            return None
        return survey.bytes_of(pids)

    async def room(self, pids: Sequence[int]) -> int | None:
        """On the devices that they are on: an engine that sleeps keeps a context there."""
        survey = await self._surveyor.survey()
        usage = survey.usage()
        devices = {uuid for pid in pids for uuid in usage.get(pid, {})}
        if survey.error or not devices:
            return None
        return sum(gpu.free for gpu in survey.gpus if gpu.uuid in devices)


CONTEXT = 4 << 30
"""What one process may leave on a GPU: context, graphs, communication buffers (0.3–4 GB were measured)."""
HALF, ENOUGH = 0.5, 0.9


def host_memory(pids: Sequence[int]) -> int:
    """On the host accelerator: anonymous memory, by walking page tables. Processes that end count nothing."""
    total = 0
    for pid in pids:
        try:
            memory = AnonymousMemory(pid)
        except Gone:
            continue
        try:
            total += memory.exact()
        except Gone:
            continue
        finally:
            memory.close()
    return total


def must_leave(used: int, *, declared: int, last_asleep: int, device: str, processes: int) -> int:
    """Bytes by which the use must fall for a sleep to count.

    ``declared``: state in bytes, 0: unknown. ``last_asleep``: use when it slept the last time, -1: never did.
    """
    if last_asleep >= 0:
        return int(ENOUGH * max(0, used - last_asleep))
    if declared:
        return int(ENOUGH * min(declared, used))
    if device == "host":
        return int(HALF * used)
    return int(max(HALF * used, ENOUGH * (used - CONTEXT * processes)))


def environ(pids: Sequence[int]) -> dict[str, str]:
    """The environment that these processes were started with, the eldest's word first; {} if unreadable."""
    found: dict[str, str] = {}
    for pid in pids:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                pairs = file.read().split(b"\0")
        except OSError:
            continue
        for name, equals, value in (pair.decode(errors="replace").partition("=") for pair in pairs):
            if equals:
                found.setdefault(name, value)
    return found


def allocator_refusal(env: Mapping[str, str]) -> str:
    """Why torch_memory_saver cannot pause anything in such a process; empty: nothing known against it."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in env.get(name, "").lower().replace(" ", ""):
            return (
                f"{name} has expandable_segments:True, and memory savers cannot pause such memory: start the "
                "engine without it"
            )
    return ""


def host_room(pid: int) -> int:
    """Bytes of host memory that this process may still take: the machine's and its cgroup's (v2)."""
    room = 0
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                room = int(line.split()[1]) * 1024
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            path = next(line[4:].strip() for line in file if line.startswith("0::/"))
        limit, now = (_number(f"/sys/fs/cgroup/{path}/memory.{name}") for name in ("max", "current"))
    except (OSError, StopIteration):
        return room
    return room if limit is None or now is None else min(room, max(0, limit - now))


def _number(path: str) -> int | None:
    """None: ``max``, which means no limit."""
    with open(path) as file:
        text = file.read().strip()
    return int(text) if text.isdigit() else None
