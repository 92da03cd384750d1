"""Bytes between storages and the host buffer: plain memory copies on the CPU, torch's own copies elsewhere.

On the CPU what changed is found by comparing (``copying``); on a device by digests that the device itself
computes, of what is there and of what was copied last: nothing else is cheaper than the bus. Called by the
torch adapter in the mover's thread, outside accelerator sections.
"""

import contextlib
import ctypes
import logging
import secrets
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from coslice.errors import OperationFailed
from coslice.workload.adapters.torch_find import torch
from coslice.workload.buffers import HostBuffer
from coslice.workload.copying import Range

_log = logging.getLogger("coslice")

PIECE = 1 << 20
"""One digest stands for so many bytes."""
BATCH = 16
"""Pieces whose digests are computed at once: fewer leave the device idle, more take its memory."""
STREAMS = 2
"""Copies that are under way at once: one fills the bus while the other begins."""
_SEED = secrets.randbits(63)
"""Of the digests' keys. Nobody can prepare two contents with one digest, by accident or otherwise."""


@dataclass(frozen=True, slots=True)
class Place:
    """One storage and where its bytes lie in the buffer."""

    key: Hashable
    storage: Any
    offset: int
    nbytes: int


def ranges_out(places: Iterable[Place], buffer: HostBuffer) -> list[Range]:
    return [Range(buffer.address + p.offset, p.storage.data_ptr(), p.nbytes) for p in places]


def ranges_in(places: Iterable[Place], buffer: HostBuffer) -> list[Range]:
    """Into the storages themselves: versions of tensors do not change, so a pending backward pass stays
    valid."""
    return [Range(p.storage.data_ptr(), buffer.address + p.offset, p.nbytes) for p in places]


class Device:
    """Copies of one adapter's storages from and to a device other than the CPU; knows what it copied last."""

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[object, Any]] = {}
        """Name of a piece → where its copy lies, and the digests of what was copied there."""

    def out(self, places: Sequence[Place], buffer: HostBuffer, *, incremental: bool) -> list[int]:
        """Copy what changed; returns the bytes copied of each. ``synchronize`` must follow."""
        copied = []
        streams = _Streams(places)
        for place in places:
            where = (buffer.identity, buffer.generation, place.offset, place.nbytes)
            known, self._last[place.key] = self._last.pop(place.key, None), (where, None)
            now = digests_of(place.storage) if incremental else None
            source, target = bytes_of(place.storage), _host(buffer, place.offset, place.nbytes)
            if now is None or known is None or known[1] is None or known[0] != where:
                runs = [(0, place.nbytes)]
            else:
                runs = _runs((now != known[1]).any(1).tolist(), place.nbytes)
            for begin, end in runs:
                with streams.next(place.storage.device):
                    target[begin:end].copy_(source[begin:end], non_blocking=True)
            copied.append(sum(end - begin for begin, end in runs))
            self._last[place.key] = (where, now)
        return copied

    def back(self, places: Sequence[Place], buffer: HostBuffer) -> None:
        streams = _Streams(places)
        for place in places:
            with streams.next(place.storage.device):
                source = _host(buffer, place.offset, place.nbytes)
                bytes_of(place.storage).copy_(source, non_blocking=True)

    def forget(self) -> None:
        self._last.clear()


def verify_device(places: Iterable[Place], buffer: HostBuffer) -> None:
    """Raise ``OperationFailed`` unless every copy equals its storage, byte for byte."""
    for place in places:
        here, there = bytes_of(place.storage), _host(buffer, place.offset, place.nbytes)
        for at in range(0, place.nbytes, BATCH * PIECE):
            if not torch().equal(here[at : at + BATCH * PIECE].cpu(), there[at : at + BATCH * PIECE]):
                raise OperationFailed(
                    "state on the device and its copy in host memory differ after the copy: a fault of "
                    "coslice or of the memory; nothing was freed"
                )


def zero(storage: Any) -> None:
    storage.fill_(0)


def synchronize(devices: Iterable[Any]) -> None:
    """Wait for everything queued on these devices, on all streams."""
    for device in devices:
        if device.type == "cuda":
            torch().cuda.synchronize(device)


class _Streams:
    """Takes turns between a few streams of each CUDA device; elsewhere there are none."""

    def __init__(self, places: Sequence[Place]) -> None:
        cuda = {p.storage.device for p in places if p.storage.device.type == "cuda"}
        self._streams = {device: [torch().cuda.Stream(device) for _ in range(STREAMS)] for device in cuda}
        self._count = 0

    @contextlib.contextmanager
    def next(self, device: Any) -> Iterator[None]:
        if not (streams := self._streams.get(device)):
            yield
            return
        self._count += 1
        with torch().cuda.stream(streams[self._count % STREAMS]):
            yield


def _runs(changed: Sequence[bool], nbytes: int) -> list[tuple[int, int]]:
    """Neighbouring changed pieces as (begin, end) of bytes."""
    runs = []
    begin: int | None = None
    for index, dirty in enumerate((*changed, False)):
        if dirty and begin is None:
            begin = index * PIECE
        elif not dirty and begin is not None:
            runs.append((begin, min(index * PIECE, nbytes)))
            begin = None
    return runs


def digests_of(storage: Any) -> Any:
    """As ``_digests``, of all its bytes."""
    return _digests(bytes_of(storage))


def _digests(content: Any) -> Any:
    """Two 64-bit sums per piece, on the CPU; None where the device has no room to compute them.

    Sums of 32-bit words times random 64-bit keys: two different pieces agree in one with a probability of at
    most 2^-33, in both of 2^-66 (multilinear hashing; Lemire and Kaser, arXiv:1202.4961).
    """
    loaded = torch()
    try:
        with loaded.no_grad():
            keys = _keys(content.device)
            whole = content.numel() // PIECE * PIECE
            found = []
            for at in range(0, whole, BATCH * PIECE):
                batch = content[at : min(at + BATCH * PIECE, whole)]
                found.append(_sums(batch.view(loaded.int32).view(-1, PIECE // 4), keys))
            if whole < content.numel():
                rest = loaded.zeros(PIECE, dtype=loaded.uint8, device=content.device)
                rest[: content.numel() - whole] = content[whole:]
                found.append(_sums(rest.view(loaded.int32).view(1, -1), keys))
            return loaded.cat(found).cpu()
    except (loaded.OutOfMemoryError, MemoryError):
        return None


def _sums(words: Any, keys: Any) -> Any:
    wide = words.to(torch().int64)
    return torch().stack([(wide * key).sum(-1) for key in keys], -1)


def _keys(device: Any) -> Any:
    loaded = torch()
    generator = loaded.Generator(device=device).manual_seed(_SEED)
    low, high = -(1 << 63), (1 << 63) - 1
    return loaded.randint(low, high, (2, PIECE // 4), generator=generator, dtype=loaded.int64, device=device)


def _host(buffer: HostBuffer, offset: int, nbytes: int) -> Any:
    raw = (ctypes.c_char * nbytes).from_address(buffer.address + offset)
    return torch().frombuffer(raw, dtype=torch().uint8)


def bytes_of(storage: Any) -> Any:
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
