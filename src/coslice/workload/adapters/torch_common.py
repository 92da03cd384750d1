"""Frozen weights in one copy on the device, which jobs on the same base use together (host accelerator).

The copy is a sealed memory file that the agent keeps while somebody uses it. A process shows it in a window
of its addresses and points the tensors of its base there; when the base leaves, the window is empty until it
is back. Once in the window a storage stays there, so whatever refers to it stays valid. Writing to it changes
pages of this process alone. Called by ``torch_base`` in the mover's thread; knows no policies.
"""

import ctypes
import fcntl
import os
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from coslice.errors import NoRoom, OperationFailed
from coslice.workload import copying, memory, reread
from coslice.workload.adapters.torch_find import Block, in_common, torch
from coslice.workload.buffers import Buffers, identity
from coslice.workload.copying import Range
from coslice.workload.shared import SEALS, SharedCopy, Window

_CHUNK = 64 << 20
_AT_ONCE = 32 << 20
"""So many bytes are on the device twice for a moment, or one piece."""
_PAGE = 4096
"""Pieces begin at a multiple of it."""


class WrongContent(OperationFailed):
    """What others share under this digest is something else."""

    def __init__(self) -> None:
        super().__init__(
            "the copy of frozen weights that another job shares on the device is not what its digest says"
        )


class Common:
    def __init__(
        self, buffers: Buffers, digest: str, size: int, places: Mapping[Hashable, tuple[int, int]]
    ) -> None:
        """``places``: offset in the file and bytes of each piece, by its name; several may have one place.
        Raises ``NoRoom``."""
        self._buffers, self.digest, self.size = buffers, digest, size
        self._in_file = {key: at for key, (at, _) in places.items()}
        self._in_window, again = _offsets(size, places)
        self._window = Window(size, again)
        self._pieces: dict[int, Any] = {}
        """The storages in the window, by name (``_cdata``)."""
        self._fd = -1
        self._right: tuple[int, int] | None = None
        """The file whose content was found right."""

    @property
    def here(self) -> bool:
        """Does this process use the copy on the device?"""
        return self._window.shown

    @property
    def used(self) -> bool:
        """Is anything of this process in the window, shown or not?"""
        return bool(self._pieces)

    def holds(self, block: Block) -> bool:
        return block.storage._cdata in self._pieces

    def written(self, block: Block) -> bool:
        """May this process have changed it?"""
        return self._window.written(block.storage.data_ptr(), block.nbytes)

    # ── into the window, and out of it ─────────────────────────────────────

    def join(self, blocks: Mapping[Hashable, Block]) -> None:
        """From memory of the process's own into the copy on the device, made if it is not there: bit by bit,
        so that never all of it is there twice.

        Raises ``WrongContent``, ``NoRoom``, ``OperationFailed``; then nothing has changed.
        """
        made: list[int] = []

        def make() -> int:
            made.append(self._pour(blocks))
            return made[0]

        try:
            fd = self._buffers.on_device(self.digest, self.size, make)
        except BaseException:
            self._own_all(blocks.values())
            raise
        if not made or fd != made[0]:
            self._own_all(blocks.values())  # of what was made in vain
            self._join_others(blocks, fd)
        self._fd, self._right = fd, identity(fd)
        self._window.populate()

    def _join_others(self, blocks: Mapping[Hashable, Block], fd: int) -> None:
        copy = SharedCopy(os.dup(fd), self.size)
        try:
            ranges = [
                Range(copy.address + self._in_file[key], block.storage.data_ptr(), block.nbytes)
                for key, block in blocks.items()
            ]
            if not all(reread.in_parallel(copying.same, ranges)):
                raise WrongContent
            self._window.show(fd)
        except BaseException:
            self._buffers.off_device(self.digest, self.size, for_good=True)
            raise
        finally:
            copy.close()
        self.adopt(blocks)

    def _pour(self, blocks: Mapping[Hashable, Block]) -> int:
        """The copy, made of the process's own pieces, which are given up meanwhile."""
        fd = os.memfd_create("coslice-base", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, self.size)
            self._window.show(fd)
            waiting = list(blocks.items())
            while waiting:
                with memory.freeing():
                    self._pour_some(fd, waiting)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException as error:
            self._own_all(blocks.values())
            os.close(fd)
            if isinstance(error, OSError):
                text = f"no room for {self.size} bytes of shared weights on the device ({error.strerror})"
                raise NoRoom(text) from error
            raise
        return fd

    def _pour_some(self, fd: int, waiting: list[tuple[Hashable, Block]]) -> None:
        done = 0
        while waiting and done < _AT_ONCE:
            key, block = waiting.pop()
            _write(fd, block, self._in_file[key])
            self.adopt({key: block})
            done += block.nbytes

    def adopt(self, blocks: Mapping[Hashable, Block]) -> None:
        """Point their tensors into the window, whether or not anything is shown there."""
        for key, block in blocks.items():
            if not self.holds(block):
                address = self._window.address + self._in_window[key]
                raw = (ctypes.c_char * block.nbytes).from_address(address)
                storage = torch().frombuffer(raw, dtype=torch().uint8).untyped_storage()
                self._pieces[storage._cdata] = storage
                in_common[storage._cdata] = self
                _point(block, storage)

    def own(self, block: Block, source: int) -> None:
        """Its content, from an address, in memory of the process's own."""
        before = block.storage._cdata
        content = torch().empty(block.nbytes, dtype=torch().uint8)
        ctypes.memmove(content.data_ptr(), source, block.nbytes)
        _point(block, content.untyped_storage())
        self._pieces.pop(before, None)
        in_common.pop(before, None)

    def _own_all(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if self.holds(block):
                self.own(block, block.storage.data_ptr())
        self._window.hide()

    # ── off the device and back ────────────────────────────────────────────

    def go(self) -> None:
        """Repeating it is harmless."""
        self._window.hide()
        self._fd = -1
        self._buffers.off_device(self.digest, self.size)

    def come(self, host: SharedCopy) -> int:
        """Show the copy on the device, made from the one in host memory if nobody has made it. Returns the
        bytes copied. Raises as ``join``."""
        if self.here:
            return 0
        made: list[int] = []

        def make() -> int:
            copy = SharedCopy.make(self.size, lambda address: self._fill(address, host.address))
            made.append(os.dup(copy.fd))
            copy.close()
            return made[0]

        fd = self._buffers.on_device(self.digest, self.size, make)
        try:
            self._window.show(fd)
            self._window.populate()
            ours = bool(made) and fd == made[0]
            if not ours and identity(fd) != self._right and not self._equals(host):
                raise WrongContent
        except BaseException:
            self.go()
            raise
        self._fd, self._right = fd, identity(fd)
        return self.size if ours else 0

    def to_host(self, address: int) -> None:
        """What is on the device, as it was shared, to an address."""
        copy = SharedCopy(os.dup(self._fd), self.size)
        try:
            self._fill(address, copy.address)
        finally:
            copy.close()

    def part_for_good(self) -> None:
        """Nothing of this process is in the window any more."""
        self._window.hide()
        self._buffers.off_device(self.digest, self.size, for_good=True)

    def _fill(self, address: int, source: int) -> None:
        copying.copy_all([Range(address, source, self.size)])

    def _equals(self, host: SharedCopy) -> bool:
        start, whole = self._window.address, range(0, self.size, _CHUNK)
        ranges = [Range(start + at, host.address + at, min(_CHUNK, self.size - at)) for at in whole]
        return all(reread.in_parallel(copying.same, ranges))


def movable(block: Block) -> bool:
    """Are its tensors all that refer to it? A view that somebody else has would stay behind."""
    count = getattr(torch()._C, "_storage_Use_Count", None)
    ordinary = (torch().nn.Parameter, torch().Tensor)
    return (
        count is not None
        and count(block.storage._cdata) == 1 + len(block.tensors)
        and all(
            type(tensor) in ordinary and tensor.untyped_storage()._cdata == block.storage._cdata
            for tensor, _ in block.tensors
        )
    )


def _point(block: Block, storage: Any) -> None:
    """The same tensors, of the same version, over another storage."""
    loaded = torch()
    with loaded._C.DisableTorchFunctionSubclass(), loaded.no_grad():
        for tensor, _ in block.tensors:
            there = loaded.empty(0, dtype=tensor.dtype)
            there.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            tensor.data = there
    block.storage = storage


def _offsets(
    size: int, places: Mapping[Hashable, tuple[int, int]]
) -> tuple[dict[Hashable, int], list[tuple[int, int]]]:
    """Where each piece is in the window. Two of one content have one place in the file and two here: what is
    written to one is not the other's."""
    found, met, again = dict[Hashable, int](), set[int](), list[tuple[int, int]]()
    end = size
    for key, (at, length) in places.items():
        if at not in met:
            met.add(at)
            found[key] = at
        else:
            whole = -(-length // _PAGE) * _PAGE
            again.append((at, whole))
            found[key], end = end, end + whole
    return found, again


def _write(fd: int, block: Block, at: int) -> None:
    content = memoryview((ctypes.c_char * block.nbytes).from_address(block.storage.data_ptr())).cast("B")
    done = 0
    while done < block.nbytes:
        done += os.pwrite(fd, content[done : done + _CHUNK], at + done)
