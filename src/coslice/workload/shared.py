"""One copy of frozen weights for all processes of a node that have the same: a sealed memory file.

Who has it first makes it and hands it to the agent, which hands it on to processes that name the same digest.
Once it is sealed nobody can write to it or shorten it, also not who made it (memfd_create(2), fcntl(2)): so
whoever finds its content right can rely on it. ``SharedCopy`` is how the copy in host memory is read,
``Window`` how the one on the device (host accelerator) is used. Knows bytes, not what they mean.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

from coslice.errors import NoRoom, OperationFailed

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAP_FIXED, _MAP_NORESERVE, _PROT_NONE = 0x10, 0x4000, 0
"""mmap(2); Python does not name them."""
_MADV_POPULATE_READ = 22
"""madvise(2), Linux 5.14; where it is unknown, pages come by faults."""
_PRESENT_OR_SWAPPED, _FILE = 0xC0, 0x20
"""In the top byte of an entry of ``/proc/self/pagemap`` (Documentation/admin-guide/mm/pagemap.rst): bits 63,
62 and 61 of it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


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


class Window:
    """A range of addresses at which a copy appears, and from which it disappears. They stay the same, so what
    points there is valid again when the copy is back; meanwhile an access ends the process.

    Mapped privately: who writes gets pages of his own, and nobody else sees it (``written``).
    """

    def __init__(self, size: int, again: Sequence[tuple[int, int]] = ()) -> None:
        """``again``: (offset, bytes) of the file, whole pages, that appear once more behind the rest. Raises
        ``NoRoom``."""
        self._runs = [(0, size), *again]
        self.size = sum(length for _, length in self._runs)
        self.address = self._map(0, self.size, _PROT_NONE, mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        self.shown = False

    def show(self, fd: int) -> None:
        """Raises ``NoRoom``; then nothing is shown."""
        at = self.address
        try:
            for offset, length in self._runs:
                both = mmap.PROT_READ | mmap.PROT_WRITE
                self._map(at, length, both, _MAP_FIXED | _MAP_NORESERVE, fd, offset)
                at += length
        except NoRoom:
            self._cover()
            raise
        self.shown = True

    def populate(self) -> None:
        """Its pages now, and not one by one later. Best effort."""
        _libc.madvise(self.address, self.size, _MADV_POPULATE_READ)

    def hide(self) -> None:
        if self.shown:
            self._cover()
            self.shown = False

    def written(self, address: int, size: int) -> bool:
        """Did this process write to any page of it? True also where the system does not tell."""
        first, last = address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as file:
                wanted = 8 * (last - first + 1)
                found = os.pread(file.fileno(), wanted, 8 * first)
        except OSError:
            return True
        return len(found) < wanted or any(
            top & _PRESENT_OR_SWAPPED and not top & _FILE for top in set(found[7::8])
        )

    def _cover(self) -> None:
        """Nothing is there, and nobody else's memory comes there."""
        flags = mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self._map(self.address, self.size, _PROT_NONE, flags, -1, 0)

    @staticmethod
    def _map(address: int, size: int, protection: int, flags: int, fd: int, offset: int) -> int:
        found = _libc.mmap(address or None, size, protection, flags | mmap.MAP_PRIVATE, fd, offset)
        if found is None or found == ctypes.c_void_p(-1).value:
            error = os.strerror(ctypes.get_errno())
            raise NoRoom(f"{size} bytes of shared weights cannot be mapped ({error})")
        return int(found)


def is_sealed(fd: int, size: int) -> bool:
    """Is it a memory file of so many bytes that nobody can change?"""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # no memory file
        return False
    return seals & SEALS == SEALS and os.fstat(fd).st_size == size
