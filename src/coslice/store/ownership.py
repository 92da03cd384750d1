"""One process owns a file. The second is told at once who the first is.

A lock file beside the file is locked with ``flock`` (released by the kernel however the owner ends) and
names the owner. It is removed on a clean exit.
"""

import fcntl
import json
import os
import time
from pathlib import Path

from coslice.errors import ConfigError
from coslice.security.files import open_private


class Ownership:
    """Acquire with ``take``; nothing happens before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = path.with_name(path.name + ".lock")
        self._fd: int | None = None

    def take(self) -> None:
        """Raises ``ConfigError`` naming the owner's pid and start if there is one."""
        while self._fd is None:
            fd = self._open()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(fd, 4096, 0)
                os.close(fd)
                raise self._taken(owner) from None
            if self._is_current(fd):
                self._fd = fd
            else:  # the previous owner removed it between our open and our lock
                os.close(fd)
        os.ftruncate(self._fd, 0)
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
        os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "started": started}).encode(), 0)

    def give_up(self) -> None:
        if self._fd is not None:
            self._lock.unlink(missing_ok=True)  # while we still hold it
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        try:
            return open_private(self._lock, os.O_RDWR)
        except OSError as error:
            raise ConfigError(
                f"cannot open {self._lock}: {error.strerror}; the directory must exist and be writable"
            ) from error

    def _is_current(self, fd: int) -> bool:
        try:
            there = os.stat(self._lock)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(fd))

    def _taken(self, owner: bytes) -> ConfigError:
        try:
            facts = json.loads(owner)
            pid, started = str(facts["pid"]), str(facts["started"])
        except (ValueError, KeyError, TypeError):  # it has the lock and has not written its name yet
            pid, started = "unknown", "this moment"
        return ConfigError(
            f"{self._path} is in use by process {pid}, which runs since {started}: "
            "stop that one, or give this one a file of its own",
            data={"path": str(self._path), "pid": pid, "started": started},
        )
