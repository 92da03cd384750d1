"""Copies between ranges of memory: in pieces, by several threads, and only where something changed.

What did not change is found by comparing with the copy that the buffer retains from last time, never by
what a framework says of itself (fused optimizers do not count their writes). Comparing reads two streams,
copying reads one and writes one: where nothing changed they cost about the same, and where all did comparing
costs next to nothing, because it ends at the first difference.

Called by adapters for state in host memory, in the mover's thread; helpers run on that thread's cores.
Nothing is allocated per byte. Knows addresses, no tensors.
"""

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from coslice.errors import OperationFailed

TASK = 32 << 20
"""What one thread takes at a time. Above the size from which memcpy leaves the caches alone."""
COARSE, FINE = 4 << 20, 64 << 10
"""Compared at once; where that differs, what is compared and copied at once."""
MAP = 4 << 20
"""Fresh pages are made so many bytes at a time, just before they are written, while they are in the cache."""
WORTH_HELP = 8 << 20
"""Less is copied before a helper has woken up."""
MOST_THREADS = 8
"""More do not copy faster: the memory is the limit."""
_MADV_POPULATE_WRITE = 23
"""madvise(2), Linux 5.14; where it is unknown, pages come by faults."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True, slots=True)
class Range:
    """``size`` bytes from address ``source`` to address ``target``."""

    target: int
    source: int
    size: int
    whole: "Range | None" = None
    """Of what it is a piece."""


@dataclass(frozen=True, slots=True)
class Copied:
    """``copied``: bytes written. ``seconds``: spent copying and comparing; ``mapping``: making pages. Seconds
    are those of the wall, shared out where threads did both at once."""

    copied: int = 0
    seconds: float = 0.0
    mapping: float = 0.0
    touched: frozenset[Range] = frozenset()
    """The ranges, as they were asked for, in which something was copied."""


def threads() -> int:
    """How many threads a copy gets: the cores that this thread may use."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0))))


class Helpers:
    """Threads that help the calling one, on its cores. Started when first needed, then kept."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def run(self, work: Callable[[Range], Copied], ranges: Sequence[Range]) -> Copied:
        tasks = deque(_split(ranges))
        alone = sum(each.size for each in ranges) < WORTH_HELP
        began = time.perf_counter()

        def take() -> Copied:
            done = []
            while True:
                try:
                    done.append(work(tasks.popleft()))
                except IndexError:
                    return _total(done)

        count = 1 if alone else min(threads(), len(tasks))
        others: list[Future[Copied]] = [self._start(take) for _ in range(count - 1)]
        try:
            parts = [take()]
        finally:
            tasks.clear()  # after an error nobody goes on in state that is being undone
            parts_of_others = [other.result() for other in others]
        total = _total((*parts_of_others, *parts))
        busy = total.seconds + total.mapping
        wall = time.perf_counter() - began
        mapping = wall * total.mapping / busy if busy else 0.0
        return Copied(total.copied, wall - mapping, mapping, total.touched)

    def _start(self, function: Callable[[], Copied]) -> "Future[Copied]":
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix="coslice-copy")
            cores = os.sched_getaffinity(0)

            def pinned() -> Copied:
                os.sched_setaffinity(0, cores)
                return function()

            return self._pool.submit(pinned)

    def forget(self) -> None:
        """In a forked child: the threads stayed with the parent."""
        self._pool, self._lock = None, threading.Lock()


HELPERS = Helpers()
os.register_at_fork(after_in_child=HELPERS.forget)


def copy_changed(ranges: Sequence[Range]) -> Copied:
    """Make every target equal to its source; writes only where they differ."""
    return HELPERS.run(_copy_changed, ranges)


def copy_all(ranges: Sequence[Range]) -> Copied:
    return HELPERS.run(_copy_all, ranges)


def copy_fresh(ranges: Sequence[Range]) -> Copied:
    """Into targets that have no pages yet."""
    return HELPERS.run(_copy_fresh, ranges)


def same(each: Range) -> bool:
    """Are both ends equal, byte for byte?"""
    return bool(_libc.memcmp(each.target, each.source, each.size) == 0)


def verify(ranges: Iterable[Range]) -> None:
    """Raise ``OperationFailed`` unless every target equals its source, byte for byte."""
    for each in ranges:
        if not same(each):
            raise OperationFailed(
                f"{each.size} bytes of state and their copy in host memory differ after the copy: a fault of "
                "coslice or of the memory; nothing was freed"
            )


def _total(parts: Iterable[Copied]) -> Copied:
    copied, seconds, mapping, touched = 0, 0.0, 0.0, set[Range]()
    for part in parts:
        copied, seconds, mapping = copied + part.copied, seconds + part.seconds, mapping + part.mapping
        touched |= part.touched
    return Copied(copied, seconds, mapping, frozenset(touched))


def _split(ranges: Sequence[Range]) -> Iterable[Range]:
    """Into tasks that keep all threads busy to the end; small ranges are their own."""
    total = sum(each.size for each in ranges)
    size = min(TASK, max(COARSE, total // (2 * threads()) // COARSE * COARSE))
    for each in ranges:
        for at in range(0, each.size, size):
            yield Range(each.target + at, each.source + at, min(size, each.size - at), each)


def _copy_all(task: Range) -> Copied:
    began = time.perf_counter()
    ctypes.memmove(task.target, task.source, task.size)
    return Copied(task.size, time.perf_counter() - began, 0.0, _touched(task))


def _copy_changed(task: Range) -> Copied:
    """Neighbouring pieces that differ are copied in one go."""
    began = time.perf_counter()
    differ, copied = _libc.memcmp, 0
    target, source = task.target, task.source
    changed: int | None = None  # where the present run of differing pieces begins
    for at in range(0, task.size, COARSE):
        size = min(COARSE, task.size - at)
        if not differ(target + at, source + at, size):
            if changed is not None:
                ctypes.memmove(target + changed, source + changed, at - changed)
                copied, changed = copied + at - changed, None
            continue
        for piece in range(at, at + size, FINE):
            if differ(target + piece, source + piece, min(FINE, at + size - piece)):
                changed = piece if changed is None else changed
            elif changed is not None:
                ctypes.memmove(target + changed, source + changed, piece - changed)
                copied, changed = copied + piece - changed, None
    if changed is not None:
        ctypes.memmove(target + changed, source + changed, task.size - changed)
        copied += task.size - changed
    return Copied(copied, time.perf_counter() - began, 0.0, _touched(task) if copied else frozenset())


def _touched(task: Range) -> frozenset[Range]:
    return frozenset() if task.whole is None else frozenset((task.whole,))


def _copy_fresh(task: Range) -> Copied:
    seconds = mapping = 0.0
    for at in range(0, task.size, MAP):
        size = min(MAP, task.size - at)
        target = task.target + at
        began = time.perf_counter()
        start, end = -(-target // mmap.PAGESIZE) * mmap.PAGESIZE, (target + size) // mmap.PAGESIZE
        if end * mmap.PAGESIZE > start:
            # Best effort: without it the copy makes the pages, one fault at a time.
            _libc.madvise(start, end * mmap.PAGESIZE - start, _MADV_POPULATE_WRITE)
        mapped = time.perf_counter()
        ctypes.memmove(target, task.source + at, size)
        seconds += time.perf_counter() - mapped
        mapping += mapped - began
    return Copied(task.size, seconds, mapping)
