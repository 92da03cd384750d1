"""The disk tier: saved state of jobs that have been idle for long, in files of a folder of ours alone.

A file counts only if it is whole: it is written under another name, forced to the disk and renamed, and it
ends with the checksums of its blocks. What was cut short, torn or changed is found when it is read, and
refused. Nothing here knows whose turn it is; ``tiers.host`` asks.

    content in blocks of 1 MiB · name (JSON) · crc32 of each block · tail: sizes, checksum of the rest, magic
"""

import asyncio
import contextlib
import ctypes
import hashlib
import json
import logging
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from coslice.errors import ConfigError

log = logging.getLogger(__name__)

BLOCK = 1 << 20
MAGIC = b"coslice state 1\n"
_TAIL = struct.Struct("<QIII16s")
"""Bytes of content, of the name, number of blocks, crc32 of name and checksums, magic."""
SUFFIX, UNFINISHED = ".state", ".part"


class Damaged(Exception):
    """A file of the disk tier is not what was written; its state is lost."""


class NoDisk(Exception):
    """The disk, or our share of it, does not hold what was asked for; nothing was changed."""


class DiskTier:
    """Files by name (``Member.buffer``). Calls of one name must not overlap; all run on the loop."""

    def __init__(self, folder: Path, budget: int) -> None:
        """``folder``: exists, and is ours alone. Files that an earlier agent left there are found; raises
        ``ConfigError`` if one that is not whole cannot be removed."""
        self.folder, self.budget = folder, budget
        self._sizes: dict[str, int] = {}
        self._left: set[Path] = set()
        """Files that could not be removed. They mean nothing, and the next agent must not find them."""
        try:
            for path in sorted(folder.iterdir()):
                if path.suffix == UNFINISHED:
                    path.unlink()
                elif path.suffix == SUFFIX:
                    self._find(path)
        except OSError as error:
            raise ConfigError(
                f"the disk tier cannot use {folder}, because what was left there cannot be removed "
                f"({error.filename}: {error.strerror}): remove it, or name another folder (--disk-dir)"
            ) from None

    @property
    def used(self) -> int:
        return sum(self._sizes.values())

    def has(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        return self._sizes.get(name, 0)

    def names(self) -> list[str]:
        return sorted(self._sizes)

    def room_for(self, size: int) -> bool:
        return self.used + size <= self.budget

    async def write(self, name: str, fd: int, size: int) -> None:
        """Copy ``size`` bytes of the memory file ``fd`` to disk; raises ``NoDisk``."""
        if not self.room_for(size):
            raise NoDisk(
                f"the disk tier has {self.budget - self.used} of {self.budget} bytes left, not {size}"
            )
        path = self._path(name)
        self._left -= {path, path.with_suffix(UNFINISHED)}  # written anew from here on
        self._sizes[name] = size
        try:
            await to_its_end(_write, path, name, fd, size)
        except OSError as error:
            self.free(name)
            raise NoDisk(f"saved state could not be written to {self.folder}: {error.strerror}") from None
        except BaseException:
            self.free(name)
            raise

    async def read(self, name: str, fd: int) -> int:
        """Copy it back into the memory file, which is long enough; returns its bytes. Raises ``Damaged``."""
        size = self._sizes[name]
        try:
            await to_its_end(_read, self._path(name), name, fd, size)
        except OSError as error:
            raise Damaged(f"saved state in {self._path(name)} cannot be read: {error.strerror}") from None
        return size

    def free(self, name: str) -> None:
        """Never raises: on a disk that turned read-only its file is removed as soon as one can be."""
        self._sizes.pop(name, None)
        path = self._path(name)
        for each in (path, path.with_suffix(UNFINISHED), *self._left):
            try:
                each.unlink(missing_ok=True)
                self._left.discard(each)
            except OSError as error:
                if each not in self._left:
                    log.error("%s cannot be removed from the disk tier: %s", each, error.strerror)
                self._left.add(each)

    def keep_only(self, wanted: Callable[[str], bool]) -> None:
        """Files of processes that are gone go too."""
        for name in self.names():
            if not wanted(name):
                self.free(name)

    def _path(self, name: str) -> Path:
        return self.folder / (hashlib.sha256(name.encode()).hexdigest()[:32] + SUFFIX)

    def _find(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                name, size, _ = _ending(file.fileno(), path)
        except (Damaged, OSError) as error:
            log.error("dropped from the disk tier: %s", error)
            path.unlink()
            return
        self._sizes[name] = size


async def to_its_end(function: Callable[..., None], *args: object) -> None:
    """In a thread. Also whoever is cancelled waits for it: meanwhile the file is not what its record says."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait((work,))
        raise


def _write(path: Path, name: str, memory: int, size: int) -> None:
    part = path.with_suffix(UNFINISHED)
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(file, 0, max(1, size))  # a disk that is full says so now
        checksums = []
        with _mapped(memory, size) as view:
            for at in range(0, size, BLOCK):
                with view[at : at + BLOCK] as block:
                    checksums.append(zlib.crc32(block))
                    _write_all(file, block, at)
        named = json.dumps({"name": name}).encode()
        rest = named + struct.pack(f"<{len(checksums)}I", *checksums)
        tail = _TAIL.pack(size, len(named), len(checksums), zlib.crc32(rest), MAGIC)
        _write_all(file, memoryview(rest + tail), size)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # memory is what this is to free
    finally:
        os.close(file)
    os.rename(part, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_all(file: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        with data[done:] as rest:
            done += os.pwrite(file, rest, at + done)


def _read(path: Path, name: str, memory: int, size: int) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found, stored, checksums = _ending(file, path)
        if (found, stored) != (name, size):
            raise Damaged(f"{path} holds {stored} bytes of {found!r}, not {size} of {name!r}")
        with _mapped(memory, size) as view:
            for number, expected in enumerate(checksums):
                at = number * BLOCK
                with view[at : min(at + BLOCK, size)] as block:
                    if os.preadv(file, [block], at) != len(block) or zlib.crc32(block) != expected:
                        raise Damaged(f"{path} is damaged at byte {at} (checksum): what it held is lost")
    finally:
        os.close(file)


def _ending(file: int, path: Path) -> tuple[str, int, tuple[int, ...]]:
    """Name, size and checksums; raises ``Damaged`` for a file that was not written to its end."""
    length = os.fstat(file).st_size
    tail = os.pread(file, _TAIL.size, max(0, length - _TAIL.size))
    if len(tail) != _TAIL.size or not tail.endswith(MAGIC):
        raise Damaged(f"{path} was not written to its end")
    size, named, blocks, check, _ = _TAIL.unpack(tail)
    if length != size + named + 4 * blocks + _TAIL.size or blocks != -(-size // BLOCK):
        raise Damaged(f"{path} has {length} bytes, and by its own word another number")
    rest = os.pread(file, named + 4 * blocks, size)
    if zlib.crc32(rest) != check:
        raise Damaged(f"the checksums of {path} are damaged: what it held is lost")
    name = str(json.loads(rest[:named])["name"])
    return name, size, struct.unpack(f"<{blocks}I", rest[named:])


@contextlib.contextmanager
def _mapped(fd: int, size: int) -> Iterator[memoryview]:
    if not size:
        yield memoryview(b"")
        return
    with mmap.mmap(fd, size, flags=mmap.MAP_SHARED) as mapped:
        view = memoryview(mapped)
        try:
            yield view
        finally:
            view.release()


def say_whole(fd: int, whole: bool) -> None:
    """Mark a memory file: its content is there, and not on disk. The mark is on the file itself (others may
    not read it), so that it outlives this agent with the process that has the file, and the next agent knows
    which of the two to believe where a file on disk could not be removed."""
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    os.fchmod(fd, mode & ~stat.S_IROTH if whole else mode | stat.S_IROTH)


def is_whole(fd: int) -> bool:
    return not os.fstat(fd).st_mode & stat.S_IROTH


_libc = ctypes.CDLL(None, use_errno=True)


def punch(fd: int, size: int) -> None:
    """Free a memory file's pages, keep its size: who has it mapped sees zeros, not a bus error
    (fallocate(2))."""
    keep_size, punch_hole = 1, 2
    if size and _libc.fallocate(fd, keep_size | punch_hole, ctypes.c_long(0), ctypes.c_long(size)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
