"""The process-wide gate between accelerator sections and the movers of state.

It decides one thing: may the state of this process move now, or does a section use it? The client enters and
leaves it around every section; the workload channel closes it before it moves state out and opens it again
once the state is back. It also keeps the thread that entered a section on the accelerator's cores. It refuses
to know about locks, leases, the network and any framework.

A process may serve two groups with separate state, so sections and movers may name groups: they meet only
where they share one. No group named means all of them.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable

from coslice.errors import ConfigError, StateOffloaded

_log = logging.getLogger("coslice")


class Section:
    """One entered section. Only the gate looks inside."""

    __slots__ = ("groups", "thread")

    def __init__(self, groups: frozenset[str], thread: int) -> None:
        self.groups = groups
        self.thread = thread


def _meet(one: Collection[str], other: Collection[str]) -> bool:
    return not one or not other or any(group in other for group in one)


class Gate:
    """Sections on one side, a mover on the other; never both for the same group."""

    def __init__(self) -> None:
        self._cpus: frozenset[int] = frozenset()
        self._hooks: list[Callable[[], None]] = []
        self._forker = 0
        self._reset()

    def _reset(self) -> None:
        # Reentrant: a generator that the garbage collector closes leaves its section in whatever thread, and
        # at whatever moment, the collector runs.
        self._changed = threading.Condition(threading.RLock())
        self._sections: list[Section] = []
        self._closed: set[frozenset[str]] = set()
        self._pinned: dict[int, set[int]] = {}
        """Native thread id → the affinity it had outside."""

    def configure(self, cpus: Iterable[int]) -> None:
        """Pin the threads of future sections to these cores; none: leave affinities alone."""
        self._cpus = frozenset(cpus)

    def on_leave(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at the end of the last open section, while its state still cannot move."""
        self._hooks.append(callback)

    def remove_on_leave(self, callback: Callable[[], None]) -> None:
        self._hooks = [hook for hook in self._hooks if hook != callback]

    def home(self) -> frozenset[int]:
        """The cores of this thread while it is in no section."""
        return frozenset(self._pinned.get(threading.get_native_id()) or os.sched_getaffinity(0))

    @property
    def active(self) -> int:
        """How many sections are open."""
        return len(self._sections)

    @property
    def closed(self) -> bool:
        """Is state of any group moved out?"""
        return bool(self._closed)

    def enter(self, groups: Iterable[str] = ()) -> Section:
        """Begin a section in this thread. Raises ``StateOffloaded`` while the state is moved out."""
        section = Section(frozenset(groups), threading.get_native_id())
        with self._changed:
            if any(_meet(section.groups, closed) for closed in self._closed):
                raise StateOffloaded(
                    "the device state of this process is in host memory: call acquire() first, or enter a "
                    "section of on_accelerators(), which wait until it is back on the accelerator"
                )
            self._pin(section.thread)
            self._sections.append(section)
        return section

    def leave(self, section: Section | None = None) -> None:
        """End a section; without an argument the last one of this thread.

        A section may be left by another thread than entered it (a generator handed on); the thread that
        entered is then unpinned. Leaving twice, or a section of the process we were forked from, is harmless.
        """
        if section is None:
            section = self._last_of(threading.get_native_id())
        if section is None or section not in self._sections:
            return
        if len(self._sections) == 1:
            self._run_hooks()
        with self._changed:
            if section not in self._sections:
                return
            self._sections.remove(section)
            if all(other.thread != section.thread for other in tuple(self._sections)):
                self._unpin(section.thread)
            self._changed.notify_all()

    def try_close(self, timeout: float, group: str = "") -> bool:
        """Wait up to ``timeout`` seconds until no section uses the group's state, then keep sections out.

        False: a section is still open (the mover answers BUSY) and nothing changed.
        """
        groups = frozenset((group,)) if group else frozenset[str]()
        deadline = time.monotonic() + timeout
        with self._changed:
            while any(_meet(section.groups, groups) for section in tuple(self._sections)):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._changed.wait(remaining)
            self._closed.add(groups)
            return True

    def open(self, group: str = "") -> None:
        """The state is back: sections may begin."""
        with self._changed:
            self._closed.discard(frozenset((group,)) if group else frozenset[str]())
            self._changed.notify_all()

    def _last_of(self, thread: int) -> Section | None:
        return next((s for s in reversed(tuple(self._sections)) if s.thread == thread), None)

    def _run_hooks(self) -> None:
        if sys.is_finalizing():  # a generator closed by the end of the interpreter: modules are gone already
            return
        for hook in list(self._hooks):
            try:
                hook()
            except Exception:  # a hook's fault must not become the user's
                _log.exception("coslice: a hook at the end of an accelerator section failed")

    def _pin(self, thread: int) -> None:
        if not self._cpus or thread in self._pinned:
            return
        before = os.sched_getaffinity(thread)
        try:
            os.sched_setaffinity(thread, self._cpus)
        except OSError as error:
            raise ConfigError(
                f"this process may not run on the accelerator's cores {sorted(self._cpus)} "
                f"({error.strerror}): check COSLICE_ACCELERATOR_CPUS against the cores of this machine"
            ) from error
        self._pinned[thread] = before

    def _unpin(self, thread: int) -> None:
        before = self._pinned.pop(thread, None)
        if before is None or not os.path.exists(f"/proc/self/task/{thread}"):
            return  # never pinned, or it ended: its number may be another process's by now
        try:
            os.sched_setaffinity(thread, before)
        except OSError as error:  # the thread ended just now, or its cores were taken away meanwhile
            _log.debug("coslice: affinity of thread %d not restored: %s", thread, error)

    def _forking(self) -> None:
        self._forker = threading.get_native_id()

    def _forked(self) -> None:
        """In a forked child: no section is open here, and state that was moved out stayed with the parent."""
        inherited = self._pinned.get(
            self._forker
        )  # the child's only thread kept the affinity of its parent's
        self._reset()
        self._hooks = []
        if inherited is not None:
            os.sched_setaffinity(0, inherited)


GATE = Gate()
os.register_at_fork(before=GATE._forking, after_in_child=GATE._forked)
