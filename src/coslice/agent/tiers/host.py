"""Host memory as a budget: memory files that hold what was moved off the device, one per member.

A file only grows, and is kept between swaps: pages the system has given us once cost a tenth of fresh ones.
When memory is short, pages of files without content are given back first; then, with a disk tier, content
that nobody asked for the longest goes to disk, and it is back in memory before its process hears of a
restore. Whatever does not fit is refused before anything is frozen. Nothing here knows groups, swaps or what
the bytes mean.
"""

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from coslice.agent.tiers.disk import DiskTier, NoDisk, is_whole, punch, say_whole, to_its_end
from coslice.agent.tiers.shared import SharedFiles, check_sealed
from coslice.sizes import format_size

log = logging.getLogger(__name__)


class NoHostMemory(Exception):
    """The host budget does not hold what was asked for; nothing was changed."""


@dataclass(slots=True)
class _File:
    fd: int
    charged: int = 0
    """Bytes whose pages are there."""
    held: bool = False
    """Has content, or is about to: its pages cannot be lent to another."""
    since: int = 0
    """Which hold it was: the lowest is the longest idle."""
    generation: int = 0
    """Grows when its pages were given away: a copy that is taken for granted may not be there."""
    wanted: int = 0
    """So many are about to use its content: it does not go to disk, not even half-way."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    turn: int = 0
    """Of the change that is under way: who needs room waits for those before it."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Of the change that is under way. Its lock is not what to wait for: the next change may have that by
    then, and wait for whoever waits."""

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _anything(name: str) -> bool:
    return True


class HostBuffers:
    """The memory files, by ``Member.buffer``, and the budget they share. All methods run on the loop."""

    def __init__(
        self,
        budget: int,
        *,
        disk: DiskTier | None = None,
        per_job: int = 0,
    ) -> None:
        """``per_job``: bytes that one job may have of it; 0: all."""
        self.budget, self.disk, self.per_job = budget, disk, per_job
        self._files: dict[str, _File] = {}
        self._shared = SharedFiles()
        self._holds = self._turns = 0
        self._awaited: dict[str, asyncio.Event] = {}
        self.idle: Callable[[str], bool] = _anything
        """May this file's content leave memory? Nobody copies to or from it, and it is not locked there."""

    @property
    def used(self) -> int:
        return sum(file.charged for file in self._files.values()) + self._shared.bytes

    @property
    def held(self) -> int:
        """Of ``used``, what has content."""
        return sum(file.charged for file in self._files.values() if file.held) + self._shared.bytes

    def size(self, name: str) -> int:
        """Bytes that the file has room for, in memory or on disk."""
        file = self._files.get(name)
        return 0 if file is None else file.charged + self.spilled(name)

    def spilled(self, name: str) -> int:
        """Bytes of it that are on disk."""
        return 0 if self.disk is None else self.disk.size(name)

    def descriptor(self, name: str) -> int:
        return self._files[name].fd

    def generation(self, name: str) -> int:
        return self._files[name].generation

    def check(self, wanted: Mapping[str, int], bases: Mapping[str, int] = MappingProxyType({})) -> None:
        """Raise ``NoHostMemory`` unless files of these sizes fit beside those that hold something.

        ``bases``: digest and size of shared copies that are needed too; those that exist cost nothing.
        """
        self._check_jobs(wanted)
        held = {name: file.charged for name, file in self._files.items() if file.held}
        for name, size in wanted.items():
            held[name] = max(size, held.get(name, 0))
        new = sum(size for digest, size in bases.items() if digest not in self._shared)
        lacking = sum(held.values()) + self._shared.bytes + new - self.budget
        if lacking > 0 and not self._spillable(wanted, lacking):
            beside = sum(size for name, size in held.items() if name not in wanted) + self._shared.bytes
            disk = f", and the disk tier has {format_size(self._disk_left)} left" if self.disk else ""
            raise NoHostMemory(
                f"host memory budget: {format_size(sum(wanted.values()) + new)} of state do not fit, "
                f"{format_size(beside)} of {format_size(self.budget)} hold other state and "
                f"{format_size(lacking)} are missing{disk}; raise the host budget (coslice up --host-memory) "
                "or share with fewer jobs"
            )

    def _check_jobs(self, wanted: Mapping[str, int]) -> None:
        for job in {_job(name) for name in wanted} if self.per_job else ():
            others = [n for n in self._files if _job(n) == job and n not in wanted and self._files[n].held]
            total = sum(size for name, size in wanted.items() if _job(name) == job)
            total += sum(self.size(name) for name in others)
            if total > self.per_job:
                raise NoHostMemory(
                    f"job {job} may keep {format_size(self.per_job)} in host memory and has "
                    f"{format_size(total)} of state: raise the limit for one job, or make the job smaller"
                )

    @property
    def _disk_left(self) -> int:
        return 0 if self.disk is None else max(0, self.disk.budget - self.disk.used)

    def _spillable(self, but: Iterable[str], lacking: int) -> bool:
        """Could so much content go to disk? Also what is on its way there, or back, could in a moment."""
        left = self._disk_left
        for name in self._with_content(set(but)):
            size = self._files[name].charged
            if size <= left:
                left, lacking = left - size, lacking - size
        return lacking <= 0

    def _spill_order(self, but: set[str]) -> list[str]:
        return [name for name in self._with_content(but) if self._may_spill(name)]

    def _with_content(self, but: set[str]) -> list[str]:
        """That nobody uses, the longest idle first."""
        if self.disk is None:
            return []
        found = [n for n, f in self._files.items() if f.held and f.charged and n not in but and self.idle(n)]
        return sorted(found, key=lambda n: self._files[n].since)

    def _may_spill(self, name: str) -> bool:
        file = self._files[name]
        return file.held and not file.wanted and not file.changing.locked() and self.idle(name)

    async def reserve(self, name: str, size: int, *, hold: bool = True) -> None:
        """Make the file at least ``size`` bytes, its pages present, and hold it; raises ``NoHostMemory``.

        ``hold`` false: only if memory is plenty, and it may be lent again.
        """
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = _File(os.memfd_create("coslice", os.MFD_CLOEXEC))
            say_whole(file.fd, not self.spilled(name))  # of an earlier one a file may be left on disk
            self._arrived(name)
        async with self._using(name, file):
            if self.spilled(name):
                await self._back_from_disk(name, file)
            old = file.charged
            if size > old:
                if not hold and self.used + size - old > self.budget:
                    raise NoHostMemory("host memory is short: none to have ready")
                await self._grow(name, file, size)
            if hold and not file.held:
                self._holds += 1
                file.held, file.since = True, self._holds

    async def _grow(self, name: str, file: _File, size: int) -> None:
        self.check({name: size})
        await self._after_others(file, size - file.charged)
        self._check_there(name, file)
        self.check({name: size})
        old, held = file.charged, file.held
        file.charged, file.held = size, True  # before pages are touched: no other takes the room meanwhile
        try:
            await self._make_room(name)
            # Touching gigabytes takes seconds: not on the loop.
            await to_its_end(os.posix_fallocate, file.fd, 0, size)
        except OSError as error:
            file.charged, file.held = old, held
            raise NoHostMemory(
                f"the system gave no memory for {format_size(size)} of host buffer ({error.strerror}): "
                "free memory on the node or lower the host budget"
            ) from None
        except NoHostMemory:
            file.charged, file.held = old, held
            raise
        finally:
            file.held = held

    async def _after_others(self, file: _File, more: int) -> None:
        """Who began before may be about to make room, or to let go what it fetched. It never waits for us."""
        while self.used + more > self.budget:
            before = [f for f in self._files.values() if f.changing.locked() and f.turn < file.turn]
            if not before:
                return
            await before[0].over.wait()

    async def handed_back(self, name: str) -> None:
        """After a restart a process still has its file, and what is on disk can only go there: until it has
        given it back, or has ended."""
        if name not in self._files and self.spilled(name):
            await self._awaited.setdefault(name, asyncio.Event()).wait()

    def _arrived(self, name: str) -> None:
        if (awaited := self._awaited.pop(name, None)) is not None:
            awaited.set()

    async def fetch(self, name: str) -> None:
        """Have the file's content in memory; raises ``NoHostMemory`` or ``disk.Damaged`` (it is lost)."""
        file = self._files.get(name)
        if file is None:
            return
        async with self._using(name, file):
            self._holds += 1
            file.since = self._holds
            if self.spilled(name):
                await self._back_from_disk(name, file)

    @contextlib.asynccontextmanager
    async def _using(self, name: str, file: _File) -> AsyncIterator[None]:
        """One change at a time; a way to disk that has begun ends in nothing. Raises ``NoHostMemory`` for a
        file that was freed."""
        file.wanted += 1
        try:
            async with self._changing(name, file):
                self._check_there(name, file)
                self._turns += 1
                file.turn = self._turns
                yield
        finally:
            file.wanted -= 1

    @contextlib.asynccontextmanager
    async def _changing(self, name: str, file: _File) -> AsyncIterator[None]:
        async with file.changing:
            file.over.clear()
            try:
                yield
            finally:
                file.over.set()
                if self._files.get(name) is not file:  # freed meanwhile
                    file.close()

    def _check_there(self, name: str, file: _File) -> None:
        if self._files.get(name) is not file:
            raise NoHostMemory(f"the host buffer of {name} was given up meanwhile")

    async def _back_from_disk(self, name: str, file: _File) -> None:
        """Raises ``Damaged``; then it stays on disk, so that nobody ever takes what is in memory for it."""
        assert self.disk is not None
        await self._grow(name, file, max(self.spilled(name), file.charged))
        self._check_there(name, file)
        size = await self.disk.read(name, file.fd)
        self._check_there(name, file)
        say_whole(file.fd, True)
        self.disk.free(name)
        file.held = True
        log.info("%s of %s are back from disk", format_size(size), name)

    def release(self, name: str) -> None:
        """Its content is back on the device. The pages stay for the next time, unless another needs them."""
        if (file := self._files.get(name)) is not None:
            file.held = False

    def adopt(self, name: str, fd: int, *, held: bool) -> None:
        """Take back a file that a process kept over our restart. Charged beyond the budget too: it exists."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise ValueError("not a memory file of this user")
        if name in self._files:
            os.close(fd)  # ours is the one in use
            return
        if self.disk is not None and is_whole(fd):
            self.disk.free(name)  # the last agent could not remove it
        self._holds += 1
        charged = min(status.st_size, status.st_blocks * 512)
        self._files[name] = _File(fd, charged, held, self._holds)
        self._arrived(name)

    def free(self, name: str) -> None:
        self._arrived(name)
        if self.disk is not None:
            self.disk.free(name)
        file = self._files.pop(name, None)
        if file is not None and not file.changing.locked():
            file.close()

    # ── one copy for several processes ─────────────────────────────────────

    def use_shared(self, digest: str, size: int, user: str) -> int | None:
        """The descriptor of the copy; None: nobody has made it, and there is room to. Raises
        ``NoHostMemory``, ``NotShareable``."""
        fd = self._shared.use(digest, size, user)
        if fd is None:
            self.check({}, {digest: size})
        return fd

    async def take_shared(self, digest: str, fd: int, size: int, user: str, *, again: bool) -> int | None:
        """Take over a copy that a process made; another's descriptor, if one was made meanwhile.

        ``again``: it outlived an agent, so it is charged beyond the budget too: it exists. Owns ``fd``.
        """
        try:
            check_sealed(fd, size)
            if (there := self._shared.use(digest, size, user)) is not None:
                os.close(fd)
                return there
            if not again:
                self.check({}, {digest: size})
        except BaseException:
            os.close(fd)
            raise
        self._shared.add(digest, fd, size, user)
        if not again:
            try:
                await self._make_room("")
            except BaseException:
                self._shared.leave(user, digest)
                raise
        return None

    def leave_shared(self, user: str) -> None:
        self._shared.leave(user)

    def close(self) -> None:
        """Files on disk stay: their processes may outlive this agent."""
        for file in self._files.values():
            if not file.changing.locked():
                file.close()
        self._files.clear()
        self._shared.close()

    # ── room ───────────────────────────────────────────────────────────────

    async def _make_room(self, name: str) -> None:
        """Until the budget is kept: pages without content first, the largest first; then to disk."""
        idle = [(n, f) for n, f in self._files.items() if not f.held and not f.changing.locked()]
        for other, file in sorted(idle, key=lambda each: -each[1].charged):
            if self.used <= self.budget:
                return
            if other != name:
                self._give_back(file)
        for other in self._spill_order({name}):
            if self.used <= self.budget:
                return
            await self._spill(other)
        if self.used > self.budget and self.held > self.budget:
            raise NoHostMemory(
                f"host memory is short by {format_size(self.used - self.budget)}: other state is in use and "
                "could not leave"
            )

    async def _spill(self, name: str) -> None:
        file = self._files[name]
        if self.disk is None or not self._may_spill(name):
            return
        async with self._changing(name, file):
            size = file.charged
            say_whole(file.fd, True)
            try:
                await self.disk.write(name, file.fd, size)
            except NoDisk as error:
                log.warning("%s stays in memory: %s", name, error)
                return
            if self._files.get(name) is not file:  # its process ended meanwhile
                self.disk.free(name)
                return
            if file.wanted or not file.held or not self.idle(name):
                self.disk.free(name)
                return
            # From here on it is on disk, and who needs it fetches it. The file is cut short, not only
            # emptied: a process that reads it all the same gets an error and not zeros.
            say_whole(file.fd, False)
            file.charged, file.generation = 0, file.generation + 1
            await to_its_end(os.ftruncate, file.fd, 0)
            log.info("host memory is short: %s of %s went to disk", format_size(size), name)

    @staticmethod
    def _give_back(file: _File) -> None:
        punch(file.fd, file.charged)
        file.charged = 0
        file.generation += 1


def _job(name: str) -> str:
    """``Member.buffer`` is group/job/incarnation/pid/start."""
    return name.split("/")[1] if name.count("/") >= 1 else name
