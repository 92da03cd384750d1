"""Hands host buffers over: memory files of the agent (``tiers.host``), to the processes whose state is there.

The agent owns them, so saved state is counted and bounded in one place and outlives the agent's own restart
(the workload keeps the file mapped and gives it back). A workload gets its file's descriptor over a unix
socket in the runtime directory, after showing the token of its registration from the very process that
registered. The same socket gives the tickets for registrations (tickets.py).
"""

import asyncio
import contextlib
import hmac
import json
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from coslice.agent.common import CommonCopies
from coslice.agent.members import Member
from coslice.agent.tickets import NoTicket, Tickets
from coslice.agent.tiers.disk import Damaged
from coslice.agent.tiers.host import HostBuffers, NoHostMemory
from coslice.agent.tiers.shared import NotShareable

log = logging.getLogger(__name__)

__all__ = ["BufferServer", "HostBuffers", "NoHostMemory", "Owner", "same_token"]

REQUEST_LIMIT = 4096
REQUEST_SECONDS = 10.0


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
        common: CommonCopies | None = None,
    ) -> None:
        """``member_of(token, pid)``: who registered with this token from this process, if anybody."""
        self._common = common
        self._path, self._buffers, self._member_of, self._tickets = path, buffers, member_of, tickets
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)  # the state directory is ours alone: this is a leftover
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind(str(self._path))
        os.chmod(self._path, 0o600)  # nobody can connect before it listens; a umask is of all threads
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
            give, hold = bool(request.get("give", False)), bool(request.get("hold", True))
            shared, again = str(request.get("share", "")), bool(request.get("again", False))
            device = str(request.get("device", ""))
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
        if shared:
            return await self._share(connection, owner, shared, size, fds, device, again=again)
        if give:
            return self._take_back(connection, owner, fds)
        _close_all(fds)
        try:
            await self._buffers.reserve(owner.buffer, size, hold=hold)
        except NoHostMemory as error:
            return _reply(connection, code="NO_ROOM", message=str(error))
        except Damaged as error:
            return _reply(connection, code="LOST", message=str(error))
        return _reply(
            connection,
            size=self._buffers.size(owner.buffer),
            fd=self._buffers.descriptor(owner.buffer),
            generation=self._buffers.generation(owner.buffer),
        )

    async def _share(
        self,
        connection: socket.socket,
        owner: "Owner",
        digest: str,
        size: int,
        fds: list[int],
        device: str,
        *,
        again: bool,
    ) -> None:
        """A copy that several processes use, in host memory or on the device (``device``: what is to become
        of it there): asked for or, with its descriptor, handed over; or left."""
        _close_all(fds[1:])
        made = fds[0] if fds else None
        try:
            if device:
                fd = self._share_on_device(owner, digest, size, made, device)
            elif made is not None:
                fd = await self._buffers.take_shared(digest, made, size, owner.buffer, again=again)
            else:
                fd = self._buffers.use_shared(digest, size, owner.buffer)
        except NoHostMemory as error:
            return _reply(connection, code="NO_ROOM", message=str(error))
        except NotShareable as error:
            return _reply(connection, code="INVALID", message=f"frozen weights are not shared: {error}")
        return _reply(connection, size=size, fd=fd)

    def _share_on_device(
        self, owner: "Owner", digest: str, size: int, made: int | None, where: str
    ) -> int | None:
        """Owns ``made``; raises ``NotShareable``."""
        try:
            if self._common is None or not isinstance(owner, Member):
                raise NotShareable("this agent shares none on the device")
            if where == "here":
                taken, made = made, None
                return self._common.use(owner, digest, size, taken)
            self._common.away(owner, digest, size, for_good=where == "never")
            return None
        finally:
            if made is not None:
                os.close(made)

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
    connection: socket.socket,
    *,
    size: int = 0,
    fd: int | None = None,
    generation: int = 0,
    code: str = "",
    message: str = "",
) -> None:
    answer: dict[str, object] = {"ok": True, "bytes": size, "generation": generation}
    if code:
        answer = {"ok": False, "code": code, "message": message}
    data = json.dumps(answer).encode() + b"\n"
    if fd is None:
        connection.send(data)  # a fresh socket's buffer takes one line whole
    else:
        socket.send_fds(connection, [data], [fd])


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
