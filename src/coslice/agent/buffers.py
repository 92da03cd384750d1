"""Host buffers: memory files that hold what was moved off the device, one per member, charged to one
budget.

The agent owns them, so saved state is counted and bounded in one place and outlives the agent's own restart
(the workload keeps the file mapped and gives it back). A workload gets its file's descriptor over a unix
socket in the runtime directory, after showing the token of its registration from the very process that
registered. The same socket gives the tickets for registrations (tickets.py).

A file only grows, and is kept between swaps: pages the system has given us once cost a tenth of fresh ones.
Nothing here knows groups, swaps or what the bytes mean.
"""

import asyncio
import contextlib
import ctypes
import hmac
import json
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from coslice.agent.tickets import NoTicket, Tickets
from coslice.sizes import format_size

log = logging.getLogger(__name__)

REQUEST_LIMIT = 4096
REQUEST_SECONDS = 10.0


class NoHostMemory(Exception):
    """The host budget does not hold what was asked for; nothing was changed."""


@dataclass(slots=True)
class _File:
    fd: int
    charged: int = 0
    """Bytes whose pages are there."""
    held: bool = False
    """Has content, or is about to: its pages cannot be lent to another."""
    growing: asyncio.Lock = field(default_factory=asyncio.Lock)


class HostBuffers:
    """The memory files, by ``Member.buffer``, and the budget they share. All methods run on the loop."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._files: dict[str, _File] = {}

    @property
    def used(self) -> int:
        return sum(file.charged for file in self._files.values())

    def size(self, name: str) -> int:
        file = self._files.get(name)
        return 0 if file is None else file.charged

    def descriptor(self, name: str) -> int:
        return self._files[name].fd

    def check(self, wanted: Mapping[str, int]) -> None:
        """Raise ``NoHostMemory`` unless files of these sizes fit beside those that hold something."""
        held = {name: file.charged for name, file in self._files.items() if file.held}
        for name, size in wanted.items():
            held[name] = max(size, held.get(name, 0))
        if (lacking := sum(held.values()) - self.budget) > 0:
            beside = sum(size for name, size in held.items() if name not in wanted)
            raise NoHostMemory(
                f"host memory budget: {format_size(sum(wanted.values()))} of state do not fit, "
                f"{format_size(beside)} of {format_size(self.budget)} hold other state and "
                f"{format_size(lacking)} are missing; raise the host budget (coslice up --host-memory) "
                "or share with fewer jobs"
            )

    async def reserve(self, name: str, size: int) -> None:
        """Make the file at least ``size`` bytes, its pages present, and hold it; raises ``NoHostMemory``."""
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = _File(os.memfd_create("coslice", os.MFD_CLOEXEC))
        async with file.growing:
            old, held = file.charged, file.held
            if size <= old:
                file.held = True
                return
            self.check({name: size})
            file.charged, file.held = (
                size,
                True,
            )  # before the pages are touched, so that no other takes the room
            try:
                self._lend_back()
                # Touching gigabytes takes seconds: not on the loop.
                await asyncio.to_thread(os.posix_fallocate, file.fd, 0, size)
            except OSError as error:
                file.charged, file.held = old, held
                raise NoHostMemory(
                    f"the system gave no memory for {format_size(size)} of host buffer ({error.strerror}): "
                    "free memory on the node or lower the host budget"
                ) from None
            finally:
                if self._files.get(name) is not file:  # freed while it grew
                    os.close(file.fd)

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
        self._files[name] = _File(fd, min(status.st_size, status.st_blocks * 512), held)

    def free(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is not None and not file.growing.locked():
            os.close(file.fd)

    def free_under(self, prefix: str) -> None:
        for name in [name for name in self._files if name.startswith(prefix)]:
            self.free(name)

    def close(self) -> None:
        self.free_under("")

    def _lend_back(self) -> None:
        """Give pages of idle files back to the system until the budget is kept, the largest first."""
        idle = sorted(
            (file for file in self._files.values() if not file.held and not file.growing.locked()),
            key=lambda file: -file.charged,
        )
        for file in idle:
            if self.used <= self.budget:
                return
            _punch(file.fd, file.charged)
            file.charged = 0


def _punch(fd: int, size: int) -> None:
    """Free a file's pages, keep its size: who has it mapped sees zeros, not a bus error (fallocate(2))."""
    keep_size, punch_hole = 1, 2
    if size and _libc.fallocate(fd, keep_size | punch_hole, ctypes.c_long(0), ctypes.c_long(size)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


_libc = ctypes.CDLL(None, use_errno=True)


class Owner(Protocol):
    """What this module needs to know of a member."""

    @property
    def buffer(self) -> str: ...

    @property
    def sleeps(self) -> bool: ...


class BufferServer:
    """Hands descriptors over: one JSON line in, one JSON line with a descriptor out."""

    def __init__(
        self,
        path: Path,
        buffers: HostBuffers,
        member_of: Callable[[str, int], "Owner | None"],
        tickets: Tickets,
    ) -> None:
        """``member_of(token, pid)``: who registered with this token from this process, if anybody."""
        self._path, self._buffers, self._member_of, self._tickets = path, buffers, member_of, tickets
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
            if request.get("ticket"):
                _close_all(fds)
                return self._give_ticket(connection)
            token, size = str(request["token"]), int(request.get("bytes", 0))
            give = bool(request.get("give", False))
        except (ValueError, KeyError, TypeError, AttributeError):
            _close_all(fds)
            return _reply(connection, code="INVALID", message='send one line {"token": ..., "bytes": N}')
        owner = self._member_of(token, _peer(connection)[0])
        if owner is None or size < 0:
            _close_all(fds)
            return _reply(
                connection,
                code="INVALID",
                message="no registered process has this token and pid: register, then ask from that process",
            )
        if give:
            return self._take_back(connection, owner, fds)
        _close_all(fds)
        try:
            await self._buffers.reserve(owner.buffer, size)
        except NoHostMemory as error:
            return _reply(connection, code="NO_ROOM", message=str(error))
        return _reply(
            connection, size=self._buffers.size(owner.buffer), fd=self._buffers.descriptor(owner.buffer)
        )

    def _give_ticket(self, connection: socket.socket) -> None:
        pid, uid = _peer(connection)
        try:
            ticket = self._tickets.issue(pid, uid)
        except NoTicket as refusal:
            log.info("no ticket for process %d: %s", pid, refusal)
            return _reply(connection, code="INVALID", message=str(refusal))
        connection.send(json.dumps({"ok": True, "ticket": ticket}).encode() + b"\n")
        return None

    def _take_back(self, connection: socket.socket, owner: "Owner", fds: list[int]) -> None:
        if not fds:
            return _reply(connection, code="INVALID", message="a buffer given back needs its descriptor")
        _close_all(fds[1:])
        try:
            self._buffers.adopt(owner.buffer, fds[0], held=owner.sleeps)
        except ValueError as error:
            os.close(fds[0])
            return _reply(connection, code="INVALID", message=str(error))
        return _reply(connection, size=self._buffers.size(owner.buffer))


def same_token(known: str, shown: str) -> bool:
    return hmac.compare_digest(known.encode(), shown.encode())


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Pid and user that connected, by the kernel's word (SO_PEERCRED, unix(7))."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


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
