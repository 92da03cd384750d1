"""Whose is what on the devices: the processes of a survey, by member.

The backend ``cuda`` asks at a swap, the sampler about four times a second. A job registers one process
(``coslice run`` is one); those that use a device may be its children, or theirs.
"""

import asyncio
import contextlib
import logging
import os

from coslice.agent.discovery import cgroups, procfs
from coslice.agent.discovery.survey import Survey
from coslice.agent.discovery.surveyor import Surveyor
from coslice.agent.host import AnonymousMemory, Gone
from coslice.agent.members import Member, Members
from coslice.agent.processes import start_time
from coslice.core.ids import JobId
from coslice.security import fingerprint
from coslice.workload.listening import tree

log = logging.getLogger(__name__)

INTERVAL = 0.25
NOTABLE = 32 << 20
"""Bytes; less is what any process takes and gives back in passing."""


def belongs(pid: int, members: "tuple[Member, ...] | list[Member]") -> Member | None:
    """The member that the process is part of: the member itself, a descendant of it, a process that carries
    its incarnation in its environment, or one of its pod or container (if that is not the agent's own)."""
    by_pid = {member.pid: member for member in members}
    for ancestor in procfs.line(pid):
        if ancestor in by_pid:
            return by_pid[ancestor]
    environment = procfs.environment(pid)
    if token := environment.get("COSLICE_INCARNATION", ""):
        started, job = fingerprint.incarnation(token), environment.get("COSLICE_JOB", "")
        if mine := [member for member in members if member.incarnation == started]:
            return next((m for m in mine if m.job == job), mine[0])  # a script may export one for two jobs
    here = cgroups.placement(pid)
    if here.pod or here.container:
        agent = cgroups.placement(os.getpid())
        for member in members:
            there = cgroups.placement(member.pid)
            if here.pod and here.pod == there.pod != agent.pod:
                return member
            if here.container and here.container == there.container != agent.container:
                return member
    return None


class Occupancy:
    """``run`` keeps it fresh while there are members on cuda devices."""

    def __init__(self, members: Members, surveyor: Surveyor) -> None:
        self._members, self._surveyor = members, surveyor
        self._owners: dict[int, tuple[int, Member | None]] = {}  # pid → start time and member

    def bytes_of(self, member: Member) -> int:
        """On all devices, by the last survey. What the survey does not know is counted as nothing."""
        pids = [pid for pid, (_, owner) in self._owners.items() if owner is member]
        return self._surveyor.last.bytes_of(pids)

    def known_bytes_of(self, member: Member) -> int | None:
        """The same; None where the driver does not tell."""
        pids = {pid for pid, (_, owner) in self._owners.items() if owner is member}
        told = [holder.bytes for gpu in self.last.gpus for holder in gpu.holders if holder.pid in pids]
        if self.last.error or None in told or (member.state_bytes and not told):
            return None  # of state without a context nobody could say where it is
        return self.last.bytes_of(pids)

    @property
    def last(self) -> Survey:
        """The newest survey."""
        return self._surveyor.last

    def job_of(self, pid: int) -> JobId | None:
        owner = self._owners.get(pid, (0, None))[1]
        return None if owner is None else owner.job

    def last_xid(self, uuid: str) -> int:
        return self._surveyor.xids.get(uuid, 0)

    def assign(self, survey: Survey) -> None:
        """Find the members of processes that are new since the last time."""
        members = [member for member in self._members if not member.has_ended]
        known = {id(member) for member in members}
        before, self._owners = self._owners, {}
        for pid in survey.usage():
            now = start_time(pid)
            if now is None:
                continue
            started, owner = before.get(pid, (0, None))
            if started != now or owner is None or id(owner) not in known:
                owner = belongs(pid, members)
            self._owners[pid] = (now, owner)

    async def refresh(self, *, max_age: float = 0.0) -> Survey:
        survey = await self._surveyor.survey(max_age=max_age)
        if not survey.error:
            self.assign(survey)
        return survey

    async def measure(self, pid: int, device: str) -> int:
        """Bytes of a process on its device, by the kernel or the driver; 0 once it has ended."""
        if device == "cuda":
            return (await self.refresh()).bytes_of(tree(pid))
        with contextlib.suppress(Gone), contextlib.closing(AnonymousMemory(pid)) as memory:
            return memory.measure(NOTABLE)
        return 0

    async def run(self) -> None:
        while True:
            if any(member.device == "cuda" for member in self._members):
                await self.refresh()
            await asyncio.sleep(INTERVAL)  # NVML tells nobody of memory that is taken or given back
