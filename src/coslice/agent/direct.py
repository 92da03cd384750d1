"""Snapshot and restore for services that schedule themselves: jobs that registered without a group.

Refuses jobs of orchestrated groups (their lock decides), and callers that name processes without being
allowed to. Keeps nothing durable: where a job's state is, its processes say themselves when they register.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import grpc

from coslice.agent.backends.base import MoveError, Restored, Snapshotted
from coslice.agent.backends.resolve import Backends
from coslice.agent.discovery import procfs
from coslice.agent.members import Member, Members
from coslice.core.events import ContextFact, ContextState
from coslice.core.ids import GroupId, JobId, check_name
from coslice.errors import ConfigError

NO_GROUP = GroupId("")
WHOLE = "cuda"
"""What moves processes that an administrator names, unless the request says."""
T = TypeVar("T")
Adopt = Callable[[str, Sequence[int], str], Awaitable[None]]
"""Job, pids, backend; raises ``ConfigError``."""


class DirectRefused(Exception):
    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status


class DirectApi:
    def __init__(
        self,
        members: Members,
        backend: Backends,
        groups: Mapping[GroupId, object],
        *,
        instance: str,
        adopt: Adopt,
    ) -> None:
        """``instance`` makes the names of operations unlike those of an earlier agent. ``adopt`` makes
        members of processes that an administrator names."""
        self._members, self._backend, self._groups = members, backend, groups
        self._instance, self._adopt = instance, adopt
        self._locks: dict[JobId, asyncio.Lock] = {}
        self._count = 0

    async def snapshot(
        self,
        job: str,
        *,
        mode: str,
        tags: Sequence[str],
        timeout: float,
        pids: Sequence[int],
        backend: str = "",
        admin: bool = False,
    ) -> tuple[Snapshotted, str]:
        """Raises ``DirectRefused``. Of a job that is parked already: nothing moves, and that is said."""
        if pids and not admin:
            raise DirectRefused(
                grpc.StatusCode.PERMISSION_DENIED,
                "naming processes needs the admin role (an agent with --token-secret, and a token of "
                "`coslice token create --role admin`): name the job, its registered processes are known",
            )
        if pids:
            await self.take_in(job, pids, backend)
        self._check_backend(backend, self.find(job))
        async with self._turn(job) as turn:
            members = _named(self.find(job), pids)  # again: it may have waited long
            for member in members:
                if (mode or "offload") not in member.modes:
                    raise DirectRefused(
                        grpc.StatusCode.INVALID_ARGUMENT,
                        f"process {member.pid} of {job} offers {', '.join(member.modes)}, not {mode!r}",
                    )
            if all(member.parked for member in members):
                return Snapshotted(bytes=0, residual=0, seconds=0.0), f"{job} is in host memory already"
            work = self._move_out(job, members, mode or "offload", tags, timeout, backend)
            return await turn.whole(work), ""

    async def restore(self, job: str, *, timeout: float) -> tuple[Restored, str]:
        """Raises ``DirectRefused``. Of a job that is on the device: nothing moves, and that is said."""
        self.find(job)
        async with self._turn(job) as turn:
            members = self.find(job)
            if not any(member.sleeps for member in members):
                return Restored(bytes=0, seconds=0.0), f"{job} is on the device already"
            return await turn.whole(self._move_in(job, members, timeout)), ""

    async def _move_out(
        self,
        job: str,
        members: Sequence[Member],
        mode: str,
        tags: Sequence[str],
        timeout: float,
        backend: str,
    ) -> Snapshotted:
        try:
            async with asyncio.timeout(timeout or self._backend.deadline_for(members)):
                return await self._backend.snapshot(
                    members, op=self._name(job), mode=mode, tags=tags, backend=backend
                )
        except TimeoutError as error:  # those that had left go back: failed means as it was
            with contextlib.suppress(MoveError):
                await self._backend.restore(members, op=self._name(job))
            raise _failed(job, "snapshot", error) from None
        except MoveError as error:
            raise _failed(job, "snapshot", error) from None

    async def _move_in(self, job: str, members: Sequence[Member], timeout: float) -> Restored:
        try:
            async with asyncio.timeout(timeout or self._backend.deadline_for(members)):
                return await self._backend.restore(members, op=self._name(job))
        except (MoveError, TimeoutError) as error:
            raise _failed(job, "restore", error) from None

    def backend_of(self, member: Member) -> str:
        """What moves the state of the member's job."""
        try:
            return self._backend.name_for(self._members.of_job(member.group, member.job))
        except (ConfigError, MoveError) as error:
            return f"none: {error}"

    def _check_backend(self, name: str, members: Sequence[Member]) -> None:
        try:
            self._backend.name_for(members, explicit=name)
        except ConfigError as error:
            raise DirectRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        except MoveError as error:
            raise DirectRefused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None

    def facts(self) -> list[ContextFact]:
        jobs = sorted({member.job for member in self._members.of_group(NO_GROUP)})
        return [self._fact(job, self._members.of_job(NO_GROUP, job)) for job in jobs]

    def _fact(self, job: JobId, members: Sequence[Member]) -> ContextFact:
        parked = all(member.parked for member in members)
        return ContextFact(
            job=job,
            state=ContextState.SAVED if parked else ContextState.LIVE,
            bytes=sum(member.state_bytes for member in members),
            pids=tuple(member.pid for member in members),
            incarnation=members[0].incarnation,
        )

    def _turn(self, job: str) -> "_Turn":
        return _Turn(self._locks.setdefault(JobId(job), asyncio.Lock()))

    def _name(self, job: str) -> str:
        self._count += 1
        return f"direct/{self._instance}/{job}/{self._count}"

    async def take_in(self, job: str, pids: Sequence[int], backend: str) -> None:
        """Processes that registered nothing become members of the job, by the word of somebody who may name
        them. Raises ``DirectRefused``. Nothing happens to a job that has members already."""
        self._check_own(job)
        if self._members.of_job(NO_GROUP, JobId(job)):
            return
        for member in self._members:
            if any(member.pid in procfs.line(pid) for pid in pids):
                raise DirectRefused(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"process {member.pid} is registered as one of job {member.job}, with what it started: "
                    "name that job",
                )
        try:
            await self._adopt(job, pids, backend or WHOLE)
        except ConfigError as error:
            raise DirectRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    def moving(self, job: str) -> bool:
        """Is a move of the job under way here?"""
        lock = self._locks.get(JobId(job))
        return lock is not None and lock.locked()

    def find(self, job: str) -> tuple[Member, ...]:
        """Its processes; raises ``DirectRefused``: none, or not ours to move."""
        self._check_own(job)
        members = self._members.of_job(NO_GROUP, JobId(job))
        if not members:
            raise DirectRefused(
                grpc.StatusCode.NOT_FOUND,
                f"no process of job {job!r} is registered here: its workload registers with this agent first",
            )
        return members

    def _check_own(self, job: str) -> None:
        """Raises ``DirectRefused`` for no name, and for a job that others schedule."""
        try:
            check_name("job", job)
        except ValueError as error:
            raise DirectRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        groups = [group for group in self._members.groups_of(JobId(job)) if group in self._groups]
        if groups:
            raise DirectRefused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"job {job} belongs to the orchestrated group {groups[0]}: its state moves when its lock "
                "changes hands (acquire and yield); to schedule it yourself, register it without a group",
            )


def _named(members: tuple[Member, ...], pids: Sequence[int]) -> tuple[Member, ...]:
    """Those that were named; without names all. Nobody is touched who has not registered."""
    known = {member.pid for member in members}
    if strangers := sorted(set(pids) - known):
        raise DirectRefused(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"no such process of this job is registered: {', '.join(map(str, strangers))}; registered are "
            f"{', '.join(map(str, sorted(known)))}",
        )
    return tuple(member for member in members if not pids or member.pid in pids)


class _Turn:
    """One move of a job at a time; the second caller waits and then finds it done."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._move: asyncio.Future[Any] | None = None

    async def __aenter__(self) -> "_Turn":
        await self._lock.acquire()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._move is None or self._move.done():
            self._lock.release()
        else:
            self._move.add_done_callback(lambda move: self._lock.release())

    async def whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the move to its end even if its caller goes away in the middle, and nobody hears how it ended.
        The turn lasts as long."""
        move = self._move = asyncio.ensure_future(work)
        move.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(move)


def _failed(job: str, what: str, error: MoveError | TimeoutError) -> DirectRefused:
    if isinstance(error, TimeoutError):
        return DirectRefused(grpc.StatusCode.DEADLINE_EXCEEDED, f"the {what} of {job} did not end in time")
    status = grpc.StatusCode.ABORTED if error.busy else grpc.StatusCode.INTERNAL
    if error.no_room:
        status = grpc.StatusCode.RESOURCE_EXHAUSTED
    return DirectRefused(status, f"the {what} of {job} failed: {error}")
