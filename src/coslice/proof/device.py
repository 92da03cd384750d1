"""The truth about one device: which processes live, where the state of each really is, and what fits.

Nothing in the system can see this; the agents' machines only hear reports. A restore without room destroys
the process, as on a real device; here it is a violation. Content is a counter: each stretch of computing
makes it one more, and it must be found again wherever the state comes back.
"""

from msgspec import Struct
from msgspec.structs import replace

from coslice.core.ids import Incarnation, JobId, MemberId

MIB = 1 << 20
CLIENTS = 1_000_000
"""Pids above are of processes that are clients themselves; others of a job have no session."""


class Violation(AssertionError):
    """The world is in a state that must not be: a bug in coslice (or in the imagined world)."""


class Process(Struct):
    pid: int
    job: JobId
    incarnation: Incarnation
    bytes: int
    member: MemberId
    parked: bool = False
    away: int = 0
    """Bytes of it that are in host memory, while the rest is on the device."""
    content: int = 0
    """What the state should be."""
    kept: int = -1
    """What its host buffer holds; -1: nothing."""
    lost: bool = False
    """It was told that its state is gone; it claims none."""

    @property
    def own(self) -> bool:
        """A client's own."""
        return self.pid > CLIENTS


class Device:
    """Of one group on one node."""

    __slots__ = ("alive", "appetite", "capacity", "extra", "residual")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.alive: dict[int, Process] = {}
        self.extra: dict[JobId, int] = {}
        """What a job uses beyond its registered state while it is here."""
        self.appetite: dict[JobId, int] = {}
        """The most it was ever measured to use in its present start."""
        self.residual: dict[int, int] = {}

    def copy(self) -> "Device":
        new = Device(self.capacity)
        new.alive = {pid: replace(p) for pid, p in self.alive.items()}
        new.extra, new.appetite = self.extra.copy(), self.appetite.copy()
        new.residual = self.residual.copy()
        return new

    def of(self, job: JobId) -> list[Process]:
        return [p for p in self.alive.values() if p.job == job]

    def has_parked(self, job: JobId) -> bool:
        return any((p.parked or p.away) and p.job == job for p in self.alive.values())

    def used(self, job: JobId) -> int:
        here = [p.bytes - p.away for p in self.alive.values() if p.job == job and not p.parked]
        return sum(here) + (self.extra.get(job, 0) if here else 0)

    def need(self, job: JobId) -> int:
        return max(self.appetite.get(job, 0), sum(p.bytes for p in self.of(job)))

    def total(self, *, but: JobId | None = None) -> int:
        """Bytes in use, by all jobs or by all but one."""
        total, here = 0, set()
        for process in self.alive.values():
            if process.job == but:
                continue
            if process.parked:
                total += self.residual.get(process.pid, 0)
            else:
                total += process.bytes - process.away
                here.add(process.job)
        return total + sum(self.extra.get(job, 0) for job in here)

    def check_room(self, job: JobId, where: str) -> None:
        """A restore of the whole job begins."""
        beside, need = self.total(but=job), self.need(job)
        if beside + need > self.capacity:
            raise Violation(
                f"3: a restore of {job} on {where} poisons its process: it needs {need // MIB} MiB beside "
                f"{beside // MIB} of {self.capacity // MIB}"
            )

    def move_out(self, process: Process, *, leaves: int = 0) -> None:
        if not process.parked:
            process.parked, process.away, process.kept = True, 0, process.content
            self.residual[process.pid] = min(leaves, process.bytes // 4)

    def move_part_out(self, process: Process, size: int) -> None:
        if process.parked or not size:
            return
        if process.away + size >= process.bytes:
            self.move_out(process)
        else:
            process.away, process.kept = process.away + size, process.content

    def move_in(self, process: Process, where: str) -> None:
        if not process.parked and not process.away:
            return
        size = process.bytes - self.residual.get(process.pid, 0) if process.parked else process.away
        if self.total() + size > self.capacity:
            raise Violation(f"3: process {process.pid} of {process.job} runs out of memory on {where}")
        if process.kept != process.content:
            raise Violation(
                f"6: process {process.pid} of {process.job} on {where} gets back content {process.kept}, "
                f"it had {process.content}"
            )
        process.parked, process.away = False, 0
        self.residual.pop(process.pid, None)

    def free_buffers(self, members: tuple[MemberId, ...]) -> list[Process]:
        """The agent gives their host buffers away; returns whose state is gone with that."""
        gone = []
        for process in self.alive.values():
            if process.member not in members:
                continue
            if process.parked or process.away:
                gone.append(process)
            process.kept = -1
        return gone

    def compute(self, job: JobId, where: str, *, stands: bool = False) -> None:
        """The job's running code changes its state, which must be there, unless it ``stands`` still."""
        for process in self.of(job):
            if process.parked or process.away:
                if stands:
                    continue
                raise Violation(f"2: {job} computes on {where} while {process.pid} is in host memory")
            process.content += 1
