"""A locked file for each process that a driver or tool is working on: no two calls on one process, not even
of two agent instances. Who makes the call inherits the lock, so it lasts as long as the call, whoever waits.
"""

import fcntl
import os
from pathlib import Path


def guard_of(folder: Path, pid: int) -> Path:
    """The file that is locked while a call for the process is under way."""
    return folder / str(pid)


def is_locked(guard: Path) -> bool:
    try:
        fd = os.open(guard, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def hold(folder: Path, pid: int) -> int | None:
    """A descriptor with the lock, to be inherited and closed here; None: a call is under way.

    ``folder`` is made if need be.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(guard_of(folder, pid), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
