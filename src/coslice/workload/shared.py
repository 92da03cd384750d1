"""One host copy of frozen weights for all processes of a node that have the same: a sealed memory file.

Who has it first makes it and hands it to the agent, which hands it on to processes that name the same digest.
Once it is sealed nobody can write to it or shorten it, also not who made it (memfd_create(2), fcntl(2)): so
whoever finds its content right can rely on it. Knows bytes, not what they mean.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable

from coslice.errors import NoRoom, OperationFailed

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedCopy:
    """Mapped for reading. Owns the descriptor."""

    def __init__(self, fd: int, size: int) -> None:
        """Raises ``OperationFailed`` for a file that somebody could still change; ``fd`` is closed then."""
        self.fd, self.size = fd, size
        if not is_sealed(fd, size):
            os.close(fd)
            raise OperationFailed("the shared copy of frozen weights is not sealed: it is not used")
        # Private and never written to: a sealed file may not be mapped shared before Linux 6.7.
        self._map = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
        self._map.madvise(mmap.MADV_DONTFORK)
        view = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(view)
        del view

    @classmethod
    def make(cls, size: int, fill: Callable[[int], None]) -> "SharedCopy":
        """``fill`` writes all of it, from an address on; raises ``NoRoom``."""
        fd = os.memfd_create("coslice-base", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            try:
                os.posix_fallocate(fd, 0, size)
                writable = mmap.mmap(fd, size)
            except OSError as error:
                raise NoRoom(
                    f"the system gave no host memory for {size} bytes of frozen weights ({error.strerror})"
                ) from error
            with writable:
                writable.madvise(mmap.MADV_DONTFORK)
                view = ctypes.c_char.from_buffer(writable)
                address = ctypes.addressof(view)
                del view
                fill(address)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size)

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)


def is_sealed(fd: int, size: int) -> bool:
    """Is it a memory file of so many bytes that nobody can change?"""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memory file
        return False
    return seals & SEALS == SEALS and os.fstat(fd).st_size == size
