"""Bytes between storages and the host buffer: plain memory copies on the CPU, torch's own copies elsewhere.

Called by the torch adapter in the mover's thread, outside accelerator sections.
"""

import contextlib
import ctypes
import logging
from collections.abc import Iterable
from typing import Any

from coslice.workload.adapters.torch_find import torch
from coslice.workload.buffers import HostBuffer

_log = logging.getLogger("coslice")


def cpu_out(storage: Any, buffer: HostBuffer, offset: int, nbytes: int) -> None:
    ctypes.memmove(buffer.address + offset, storage.data_ptr(), nbytes)


def cpu_in(storage: Any, buffer: HostBuffer, offset: int, nbytes: int) -> None:
    """Into the storage itself: versions of tensors do not change, so a pending backward pass stays valid."""
    ctypes.memmove(storage.data_ptr(), buffer.address + offset, nbytes)


def device_out(storage: Any, buffer: HostBuffer, offset: int, nbytes: int) -> None:
    """Begin a copy from any device; ``synchronize`` ends it."""
    _host(buffer, offset, nbytes).copy_(_bytes_of(storage), non_blocking=True)


def device_in(storage: Any, buffer: HostBuffer, offset: int, nbytes: int) -> None:
    _bytes_of(storage).copy_(_host(buffer, offset, nbytes), non_blocking=True)


def zero(storage: Any) -> None:
    storage.fill_(0)


def synchronize(devices: Iterable[Any]) -> None:
    """Wait for everything queued on these devices, on all streams."""
    for device in devices:
        if device.type == "cuda":
            torch().cuda.synchronize(device)


def _host(buffer: HostBuffer, offset: int, nbytes: int) -> Any:
    raw = (ctypes.c_char * nbytes).from_address(buffer.address + offset)
    return torch().frombuffer(raw, dtype=torch().uint8)


def _bytes_of(storage: Any) -> Any:
    return torch().empty(0, dtype=torch().uint8, device=storage.device).set_(storage)


class Pinning:
    """Page-locks a host buffer for the CUDA driver, so that copies run at the bus's speed.

    Best effort: where the driver refuses (limits on locked memory), copies are slower and right all the same.
    The exact buffer is locked, not a power of two as torch's own pinned allocator would.
    """

    def __init__(self) -> None:
        self._locked: tuple[int, int] | None = None

    def lock(self, buffer: HostBuffer) -> None:
        wanted = (buffer.address, buffer.size)
        if self._locked == wanted:
            return
        self.unlock()
        try:
            torch().cuda.check_error(torch().cuda.cudart().cudaHostRegister(*wanted, 0))
            self._locked, buffer.before_close = wanted, self.unlock
        except Exception as error:
            _log.info("coslice: host buffer not page-locked, copies will be slower: %s", error)

    def unlock(self) -> None:
        if self._locked is not None:
            with contextlib.suppress(Exception):
                torch().cuda.cudart().cudaHostUnregister(self._locked[0])
            self._locked = None
