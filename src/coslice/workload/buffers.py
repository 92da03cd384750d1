"""Host buffers: where state lies while it is off the device.

A buffer is a memory file, mapped once and kept between moves: fresh pages cost ten times what used ones cost.
The agent owns the file and charges it to its budget; the process asks for it over a unix socket and gives it
back to an agent that restarted. Without an agent the process makes its own. Called by the mover; knows bytes,
not what they mean.
"""

import ctypes
import json
import logging
import mmap
import os
import socket
from collections.abc import Callable
from typing import Protocol

from coslice.errors import CosliceError, NoRoom, OperationFailed
from coslice.workload.shared import SharedCopy
from coslice.workload.ticket import connect

_log = logging.getLogger("coslice")
_MAP_POPULATE = 0x8000
"""mmap(2); Python 3.11 does not name it on every build."""
_ANSWER_LIMIT = 65536
_ANSWER_SECONDS = 60.0
"""A growing file is filled with pages before the answer: seconds per ten GiB."""


class HostBuffer:
    """One mapping of a memory file. Owns the descriptor."""

    def __init__(self, fd: int, size: int) -> None:
        """Maps and populates; ``fd`` is closed with the buffer."""
        self.fd, self.size = fd, size
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | _MAP_POPULATE)
        self._map.madvise(mmap.MADV_DONTFORK)  # a forked child gets nothing
        view = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(view)
        del view
        self.identity = identity(fd)
        self.generation = 0
        """Another number: its bytes may have become others meanwhile (the agent lent its pages)."""
        self.before_close: Callable[[], None] | None = None

    def check(self, end: int) -> None:
        """Raise unless bytes up to ``end`` are there: touching a file cut short would kill the process
        (SIGBUS)."""
        if end > min(self.size, os.fstat(self.fd).st_size):
            raise OperationFailed(
                f"the host buffer ends before byte {end}: somebody cut the agent's memory file short"
            )

    def bytes(self, offset: int, size: int) -> memoryview:
        return memoryview(self._map)[offset : offset + size]

    def close(self) -> None:
        if self.before_close is not None:
            self.before_close()
        self._map.close()
        self._close_file()

    def forget(self) -> None:
        """In a forked child: the mapping is not here, and unmapping its addresses could hit another's."""
        _FORGOTTEN.append(self._map)
        self._close_file()

    def _close_file(self) -> None:
        """Once: another thread may fork while this one closes, and then the number may be another's."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def identity(fd: int) -> tuple[int, int]:
    """Names the file behind a descriptor."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


_FORGOTTEN: list[mmap.mmap] = []


class Buffers(Protocol):
    """Where a mover gets its buffer."""

    current: HostBuffer | None
    shares_device: bool
    """Is there an agent that keeps one copy of frozen weights on the device for several jobs?"""

    def obtain(self, size: int, *, keep: int = 0, hold: bool = True) -> HostBuffer:
        """A buffer of at least ``size`` bytes, the first ``keep`` as they are now; raises ``NoRoom``.

        ``hold`` false: nothing is in it yet, so it may be lent to somebody who needs it sooner.
        """
        ...

    def share(self, digest: str, size: int, fill: Callable[[int], None]) -> SharedCopy:
        """The one copy of what has this digest; ``fill`` makes it if nobody has yet. Raises ``NoRoom``."""
        ...

    def on_device(self, digest: str, size: int, make: Callable[[], int]) -> int:
        """The descriptor of the one copy on the device, ours until ``off_device``; ``make`` makes it if
        nobody has. Raises ``OperationFailed``."""
        ...

    def off_device(self, digest: str, size: int, *, for_good: bool = False) -> None:
        """This process does not use it any more, or not until it asks again. Never raises."""
        ...

    def release(self) -> None:
        """Let go of the buffer. Shared copies stay."""
        ...

    def close(self) -> None:
        """Let go of everything: there is no state any more."""
        ...


class LocalBuffers:
    """Buffers of the process's own: for jobs without an agent."""

    shares_device = False

    def __init__(self) -> None:
        self.current: HostBuffer | None = None
        self._shared: list[SharedCopy] = []

    def share(self, digest: str, size: int, fill: Callable[[int], None]) -> SharedCopy:
        self._shared.append(SharedCopy.make(size, fill))
        return self._shared[-1]

    def on_device(self, digest: str, size: int, make: Callable[[], int]) -> int:
        raise OperationFailed("a device is shared by jobs of an agent only")

    def off_device(self, digest: str, size: int, *, for_good: bool = False) -> None:
        pass

    def close(self) -> None:
        self.release()
        for copy in self._shared:
            copy.close()
        self._shared.clear()

    def obtain(self, size: int, *, keep: int = 0, hold: bool = True) -> HostBuffer:
        current = self.current
        if current is not None and current.size >= size:
            return current
        fd = os.memfd_create("coslice", os.MFD_CLOEXEC) if current is None else os.dup(current.fd)
        try:
            os.ftruncate(fd, max(size, 1))
            grown = HostBuffer(fd, max(size, 1))
        except OSError as error:
            os.close(fd)
            raise NoRoom(
                f"the system gave no host memory for {size} bytes of state ({error.strerror})"
            ) from error
        if current is not None:
            current.close()
        self.current = grown
        return grown

    def release(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = None


class AgentBuffers:
    """Buffers that the agent owns. Usable once ``connect`` was called with what the agent answered."""

    def __init__(self, *, shares_device: bool = False) -> None:
        self.current: HostBuffer | None = None
        self.shares_device = shares_device
        self._shared: dict[str, SharedCopy] = {}
        self._on_device: dict[str, tuple[int, int | None]] = {}
        """Digest → bytes and, while we use it, the descriptor."""
        self._path = self._token = ""

    def connect(self, path: str, token: str) -> None:
        """A (new) agent answers at ``path``. Our buffer, if any, is its from now on."""
        self._path, self._token = path, token
        if self.current is not None:
            self._ask({"bytes": 0, "give": True}, give=self.current.fd)
        for digest, copy in self._shared.items():
            _, fd = self._ask({"share": digest, "bytes": copy.size, "again": True}, give=copy.fd)
            if fd is not None:
                os.close(fd)
        for digest, (size, ours) in self._on_device.items():
            device = "away" if ours is None else "here"
            _, fd = self._ask({"share": digest, "bytes": size, "device": device}, give=ours)
            if fd is not None:
                os.close(fd)

    def share(self, digest: str, size: int, fill: Callable[[int], None]) -> SharedCopy:
        _, fd = self._ask({"share": digest, "bytes": size})
        if fd is None:  # nobody has made it yet
            made = SharedCopy.make(size, fill)
            try:
                _, fd = self._ask({"share": digest, "bytes": size}, give=made.fd)
            except BaseException:
                made.close()
                raise
            if fd is not None:  # somebody else was faster
                made.close()
        copy = made if fd is None else SharedCopy(fd, size)
        self._shared[digest] = copy
        return copy

    @property
    def uses_device(self) -> bool:
        """Does the agent keep anything for us on the device, now or for our return?"""
        return bool(self._on_device)

    def on_device(self, digest: str, size: int, make: Callable[[], int]) -> int:
        request: dict[str, object] = {"share": digest, "bytes": size, "device": "here"}
        _, fd = self._ask(request)
        if fd is None:
            made = make()
            try:
                _, fd = self._ask(request, give=made)
            except BaseException:
                os.close(made)
                raise
            if fd is None:
                fd = made
            else:  # somebody else was faster
                os.close(made)
        self._on_device[digest] = (size, fd)
        return fd

    def off_device(self, digest: str, size: int, *, for_good: bool = False) -> None:
        _, fd = self._on_device.pop(digest, (size, None))
        if fd is not None:
            os.close(fd)
        if not for_good:
            self._on_device[digest] = (size, None)
        try:
            self._ask({"share": digest, "bytes": size, "device": "never" if for_good else "away"})
        except CosliceError as error:  # the next agent is told by ``connect``
            _log.info("coslice: the agent was not told that shared weights left the device: %s", error)

    def close(self) -> None:
        self.release()
        for copy in self._shared.values():
            copy.close()
        self._shared.clear()

    def obtain(self, size: int, *, keep: int = 0, hold: bool = True) -> HostBuffer:
        """Asks every time: the agent may have given our file up, or made another after a restart."""
        size = max(size, 1)
        answer, fd = self._ask({"bytes": size, "hold": hold})
        granted, generation = int(str(answer.get("bytes", 0))), int(str(answer.get("generation", 0)))
        if fd is None or granted < size:
            if fd is not None:
                os.close(fd)
            raise OperationFailed(
                f"the agent granted {granted} of {size} bytes of host buffer: a fault of the agent"
            )
        current = self.current
        if current is not None and current.size >= granted and current.identity == identity(fd):
            os.close(fd)
            current.generation = generation
            return current
        try:
            new = HostBuffer(fd, granted)
        except OSError as error:
            os.close(fd)
            raise NoRoom(f"the host buffer of {granted} bytes cannot be mapped ({error.strerror})") from error
        if current is not None:
            if current.identity != new.identity:
                new.bytes(0, keep)[:] = current.bytes(0, keep)
            current.close()
        new.generation = generation
        self.current = new
        return new

    def release(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = None

    def _ask(
        self, request: dict[str, object], give: int | None = None
    ) -> tuple[dict[str, object], int | None]:
        line = json.dumps({"token": self._token, **request}).encode() + b"\n"
        try:
            with connect(self._path, _ANSWER_SECONDS) as connection:
                socket.send_fds(connection, [line], [] if give is None else [give])
                answer, fd = _receive(connection)
        except (OSError, ValueError) as error:
            raise OperationFailed(
                f"the agent's buffer socket {self._path} did not answer ({error}): is the agent still "
                "running, and does this process see its runtime directory?"
            ) from error
        if answer.get("ok") is True:
            return answer, fd
        if fd is not None:
            os.close(fd)
        message = str(answer.get("message", "refused without a reason"))
        raise NoRoom(message) if answer.get("code") == "NO_ROOM" else OperationFailed(message)


def _receive(connection: socket.socket) -> tuple[dict[str, object], int | None]:
    data, fds = b"", list[int]()
    while not data.endswith(b"\n") and len(data) < _ANSWER_LIMIT:
        part, new, _, _ = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        fds += new
        if not part:
            break
        data += part
    try:
        answer = json.loads(data)
        if not isinstance(answer, dict):
            raise ValueError("not an object")
    except ValueError as error:
        for fd in fds:
            os.close(fd)
        raise ValueError(f"{data[:80]!r} is no answer") from error
    return answer, fds[0] if fds else None
