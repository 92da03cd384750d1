"""Host buffers: memory files that hold what was moved off the device, one per member, charged to one
budget.

The agent owns them, so saved state is counted and bounded in one place and outlives the agent's own restart
(the workload keeps the file mapped and gives it back). A workload gets its file's descriptor over a unix
socket in the runtime directory, after showing the token of its registration from the very process that
registered.

A file only grows, and is kept between swaps: pages the system has given us once cost a tenth of fresh ones.
Nothing here knows groups, swaps or what the bytes mean.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from coslice.sizes import format_size

log = logging.getLogger(__name__)

REQUEST_LIMIT = 4096
REQUEST_SECONDS = 10.0


class NoHostMemory(Exception):
    """The host budget does not hold what was asked for; nothing was changed."""


class HostBuffers:
    """The memory files, by ``Member.buffer``, and the budget they share. All methods run on the loop."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._files: dict[str, tuple[int, int]] = {}  # descriptor, bytes charged
        self._growing: dict[str, asyncio.Lock] = {}

    @property
    def used(self) -> int:
        return sum(size for _, size in self._files.values())

    def size(self, member: str) -> int:
        return self._files.get(member, (-1, 0))[1]

    def descriptor(self, member: str) -> int:
        return self._files[member][0]

    def missing(self, wanted: dict[str, int]) -> int:
        """Bytes that the budget lacks for files of these sizes; 0: they fit."""
        more = sum(max(0, size - self.size(member)) for member, size in wanted.items())
        return max(0, self.used + more - self.budget)

    def check(self, wanted: dict[str, int]) -> None:
        if lacking := self.missing(wanted):
            raise NoHostMemory(
                f"host memory budget: {format_size(sum(wanted.values()))} of state do not fit, "
                f"{format_size(self.used)} of {format_size(self.budget)} are in use and "
                f"{format_size(lacking)} are missing; raise the host budget "
                "(coslice up --host-memory) or share with fewer jobs"
            )

    async def reserve(self, member: str, size: int) -> None:
        """Make the member's file at least ``size`` bytes, its pages present; raises ``NoHostMemory``."""
        async with self._growing.setdefault(member, asyncio.Lock()):
            fd, old = self._files.get(member, (-1, 0))
            if size <= old and fd >= 0:
                return
            self.check({member: size})
            if fd < 0:
                fd = os.memfd_create("coslice", os.MFD_CLOEXEC)
            self._files[member] = (fd, size)  # charged before the pages are touched
            try:
                os.ftruncate(fd, size)
                if size > old:  # touching gigabytes takes seconds: not on the loop
                    await asyncio.to_thread(os.posix_fallocate, fd, old, size - old)
            except OSError as error:
                self._files[member] = (fd, old)
                raise NoHostMemory(
                    f"the system gave no memory for {format_size(size)} of host buffer ({error.strerror}): "
                    "free memory on the node or lower the host budget"
                ) from None
            if self._files.get(member, (-1, 0))[0] != fd:  # freed while it grew
                os.close(fd)

    def adopt(self, member: str, fd: int) -> None:
        """Take back a file that a process kept over our restart. Charged beyond the budget too: it exists."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise ValueError("not a memory file of this user")
        if member in self._files:
            os.close(fd)  # ours is the one in use
            return
        self._files[member] = (fd, status.st_size)

    def free(self, member: str) -> None:
        fd, _ = self._files.pop(member, (-1, 0))
        lock = self._growing.pop(member, None)
        if fd >= 0 and not (lock is not None and lock.locked()):
            os.close(fd)

    def free_under(self, prefix: str) -> None:
        for member in [name for name in self._files if name.startswith(prefix)]:
            self.free(member)

    def close(self) -> None:
        self.free_under("")


class BufferServer:
    """Hands descriptors over: one JSON line in, one JSON line with a descriptor out."""

    def __init__(self, path: Path, buffers: HostBuffers, member_of: Callable[[str, int], str | None]) -> None:
        """``member_of(token, pid)``: who registered with this token from this process, if anybody."""
        self._path, self._buffers, self._member_of = path, buffers, member_of
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)  # the state directory is ours alone: this is a leftover
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        before = os.umask(0o177)
        try:
            listener.bind(str(self._path))
        finally:
            os.umask(before)
        listener.listen(64)
        self._socket = listener
        self._accepting = asyncio.create_task(self._accept(listener), name="buffer-socket")

    async def stop(self) -> None:
        tasks = [task for task in (self._accepting, *self._serving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            self._path.unlink(missing_ok=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            task = asyncio.create_task(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    line, fds = await _receive(connection)
                await self._answer(connection, line, fds)
            except (TimeoutError, OSError, ValueError) as error:
                log.warning("buffer socket: dropped a request: %r", error)

    async def _answer(self, connection: socket.socket, line: bytes, fds: list[int]) -> None:
        try:
            request = json.loads(line)
            token, size = str(request["token"]), int(request.get("bytes", 0))
            give = bool(request.get("give", False))
        except (ValueError, KeyError, TypeError, AttributeError):
            _close_all(fds)
            return _reply(connection, code="INVALID", message='send one line {"token": ..., "bytes": N}')
        member = self._member_of(token, _peer_pid(connection))
        if member is None or size < 0:
            _close_all(fds)
            return _reply(
                connection,
                code="INVALID",
                message="no registered process has this token and pid: register, then ask from that process",
            )
        if give:
            return self._take_back(connection, member, fds)
        _close_all(fds)
        try:
            await self._buffers.reserve(member, size)
        except NoHostMemory as error:
            return _reply(connection, code="NO_ROOM", message=str(error))
        return _reply(connection, size=self._buffers.size(member), fd=self._buffers.descriptor(member))

    def _take_back(self, connection: socket.socket, member: str, fds: list[int]) -> None:
        if not fds:
            return _reply(connection, code="INVALID", message="a buffer given back needs its descriptor")
        _close_all(fds[1:])
        try:
            self._buffers.adopt(member, fds[0])
        except ValueError as error:
            os.close(fds[0])
            return _reply(connection, code="INVALID", message=str(error))
        return _reply(connection, size=self._buffers.size(member))


def same_token(known: str, shown: str) -> bool:
    return hmac.compare_digest(known.encode(), shown.encode())


def _peer_pid(connection: socket.socket) -> int:
    """The pid that connected, by the kernel's word (SO_PEERCRED, unix(7))."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


async def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    line, fds = b"", list[int]()
    try:
        while not line.endswith(b"\n"):
            await _readable(connection)
            data, new, _, _ = socket.recv_fds(connection, REQUEST_LIMIT, 4, socket.MSG_CMSG_CLOEXEC)
            fds += new
            line += data
            if not data or len(line) > REQUEST_LIMIT:
                raise ValueError("not one line of JSON")
    except BaseException:
        _close_all(fds)
        raise
    return line, fds


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


def _reply(
    connection: socket.socket, *, size: int = 0, fd: int | None = None, code: str = "", message: str = ""
) -> None:
    answer = {"ok": False, "code": code, "message": message} if code else {"ok": True, "bytes": size}
    data = json.dumps(answer).encode() + b"\n"
    if fd is None:
        connection.send(data)  # a fresh socket's buffer takes one line whole
    else:
        socket.send_fds(connection, [data], [fd])


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
