"""Processes by pid *and* start time: whether one is alive, whose it is, when it ends, and killing it.

A pid alone names nothing: the kernel reuses it. A pidfd opened while the start time matched names one process
for good, tells its end without polling (it becomes readable), and carries signals that cannot hit another.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable


def start_time(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``, in clock ticks since boot (proc_pid_stat(5)); None: no such process.

    A zombie counts as ended: its memory is gone already.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])


def stopped(pid: int) -> bool:
    """By a signal, or by who traces it: then it does nothing until it is continued."""
    fields = _stat(pid)
    return fields is not None and fields[0] in (b"T", b"t")


def _stat(pid: int) -> list[bytes] | None:
    """From field 3 of ``/proc/PID/stat`` on; None: no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(b")") + 2 :].split()  # the name before it may hold spaces and parentheses


def owner(pid: int) -> int | None:
    """The process's user id; None: no such process."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except (FileNotFoundError, ProcessLookupError):
        return None


def alive(pid: int, started: int) -> bool:
    return start_time(pid) == started


def kill(pid: int, started: int) -> bool:
    """SIGKILL to exactly this process. False if it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not alive(pid, started):
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


class Process:
    """One process, watched until it ends. Must be made inside a running loop; ``close`` when done with it."""

    def __init__(self, pid: int, started: int, pidfd: int, ended: Callable[[], None]) -> None:
        self.pid, self.started = pid, started
        self.ended = asyncio.Event()
        self._pidfd, self._callback = pidfd, ended
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._readable)

    @classmethod
    def watch(cls, pid: int, started: int, ended: Callable[[], None]) -> "Process | None":
        """Watch a process; ``ended`` is called once, on the loop. None if it is not there (any more)."""
        try:
            pidfd = os.pidfd_open(pid)
        except (ProcessLookupError, OSError):
            return None
        if not alive(pid, started):  # checked after opening: from here on the pidfd cannot change its meaning
            os.close(pidfd)
            return None
        return cls(pid, started, pidfd, ended)

    def kill(self) -> bool:
        """SIGKILL. False if it has ended already."""
        if self._pidfd < 0 or not alive(self.pid, self.started):
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            with contextlib.suppress(OSError):
                os.close(self._pidfd)
            self._pidfd = -1

    def _readable(self) -> None:
        self.close()
        self.ended.set()
        self._callback()
