"""One thread of the process moves state; everybody else waits for it.

It is one thread for two reasons: a move never meets another move, and what it allocates comes from a heap of
its own, side by side, so that small storages later leave in whole pages. A callback that raises anything at
all, even ``SystemExit``, ends the move and not the thread.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_log = logging.getLogger("coslice")
_Job = tuple[Callable[[], Any], "Future[Any]"]


class Mover:
    """Started by its first use."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.cpus: Collection[int] = ()
        """Cores to run on; none: those of the thread that starts it."""

    def run(self, function: Callable[[], T]) -> T:
        """Call ``function`` in the mover's thread; returns or raises what it does."""
        if threading.current_thread() is self._thread:
            return function()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="coslice-mover", daemon=True)
                self._thread.start()
        done: Future[T] = Future()
        self._jobs.put((function, done))
        return done.result()

    def _work(self) -> None:
        stay_on(self.cpus)
        while True:
            function, done = self._jobs.get()
            try:
                done.set_result(function())
            except BaseException as error:  # the thread must outlive whatever a callback raises
                done.set_exception(error)
            del function, done


def stay_on(cpus: Collection[int]) -> None:
    """Keep this thread off the accelerator's cores although a thread inside a section started it."""
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            _log.debug("coslice: affinity not set: %s", error)
