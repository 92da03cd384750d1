"""The process's allocator: giving freed memory back to the system, and getting it back quickly.

Freeing a tensor gives its memory to malloc, not to the system, so another job's restore would find the device
memory (host accelerator) still in use. Called by the torch adapter and the mover; knows no tensors.

What glibc (malloc.c, 2.36) does and why each call is here: big blocks are mapped one by one and leave when
freed; the free middle of the heaps leaves with ``malloc_trim``; the free *top* of the heap of any thread but
the first leaves only in ``free``, and only above the trim threshold, which grows by itself up to 64 MiB.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MMAP_THRESHOLD_MAX = 32 << 20
"""Where glibc's own adjustment of the mmap threshold ends (DEFAULT_MMAP_THRESHOLD_MAX); the trim threshold is
twice it."""
_TRIM_NOW = 256 << 10
_POKE = 128 << 10
_ALL_ARENAS = b"arena.4096.purge"
"""jemalloc's MALLCTL_ARENAS_ALL."""
_USER_SET = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
HUGE_PAGE = 2 << 20


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def _has(name: str) -> bool:
    return hasattr(_libc(), name)


@contextlib.contextmanager
def freeing() -> Iterator[None]:
    """Around the freeing of a lot: what is freed inside goes back to the system, whichever allocator it is
    from."""
    tune = _has("mallopt") and not any(name in os.environ for name in _USER_SET)
    if tune:
        _libc().mallopt(_M_TRIM_THRESHOLD, _TRIM_NOW)
    try:
        yield
        _poke()
    finally:
        if tune:
            # Setting one threshold ends glibc's own adjustment, so leave both where it would have ended.
            _libc().mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX)
            _libc().mallopt(_M_TRIM_THRESHOLD, 2 * _MMAP_THRESHOLD_MAX)
    _release()


def _poke() -> None:
    """A free of more than 64 KiB is what makes glibc look at the top of this thread's heap."""
    block = _libc().malloc(_POKE)
    _libc().free(block)


def _release() -> None:
    if _has("mallctl"):  # jemalloc
        _libc().mallctl(_ALL_ARENAS, None, None, None, ctypes.c_size_t(0))
    elif _has("MallocExtension_ReleaseFreeMemory"):  # tcmalloc
        _libc().MallocExtension_ReleaseFreeMemory()
    elif _has("malloc_trim"):
        _libc().malloc_trim(0)


def advise_huge(ranges: Iterable[tuple[int, int]]) -> None:
    """Ask for huge pages under these (address, bytes) ranges, about to be written whole.

    A first touch then costs one fault per 2 MiB. Only huge pages that lie wholly inside neighbouring ranges
    are asked for, so no byte more is used than before. Where the system refuses, ordinary pages do.
    """
    for low, high in _joined(ranges):
        start, end = -(-low // HUGE_PAGE) * HUGE_PAGE, high // HUGE_PAGE * HUGE_PAGE
        if end > start:
            _libc().madvise(start, end - start, mmap.MADV_HUGEPAGE)


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Neighbours joined across malloc's headers and page rounding."""
    low = high = 0
    for address, size in sorted(ranges):
        if not high:
            low = address
        elif address - high > 2 * mmap.PAGESIZE:
            yield low, high
            low = address
        high = max(high, address + size)
    if high:
        yield low, high
