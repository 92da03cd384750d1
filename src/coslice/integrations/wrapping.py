"""Methods of somebody else's object as phases: what the adapters of frameworks without callbacks are made of.

Wraps bound methods of one object, plain ones and coroutines; the classes stay as they are.
"""

import asyncio
import functools
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from coslice.client.phases import PhaseCallback

_MARK = "_coslice_phases"


class Enabled(Protocol):
    enabled: bool

    def on_phase_begin(self, phase: str, role: str = "") -> None: ...
    def on_phase_end(self, phase: str, role: str = "") -> None: ...
    def close(self) -> None: ...


class Phases:
    """The phases of one object. Where a phase is open several times, the last end counts."""

    def __init__(self, callback: Enabled) -> None:
        self._callback = callback
        self._lock = threading.Lock()
        self._depth: Counter[tuple[str, str]] = Counter()

    def begin(self, phase: str, role: str = "") -> None:
        self._callback.on_phase_begin(phase, role)

    def end(self, phase: str, role: str = "") -> None:
        self._callback.on_phase_end(phase, role)

    def close(self) -> None:
        self._callback.close()

    def around(self, owner: Any, name: str, phase: str, role: str = "") -> None:
        """The method is the phase."""
        _wrap(owner, name, lambda: self._enter(phase, role), lambda: self._exit(phase, role), always=True)

    def opens(self, owner: Any, name: str, phase: str, role: str = "", *, ends: str = "") -> None:
        """The phase begins with the method and stays open; ``ends``: another one, over by then."""

        def before() -> None:
            if ends:
                self.end(ends)
            self.begin(phase, role)

        _wrap(owner, name, before, _nothing)

    def closes(self, owner: Any, name: str, phase: str, role: str = "") -> None:
        """The phase is over when the method returns."""
        _wrap(owner, name, _nothing, lambda: self.end(phase, role))

    def away(self, owner: Any, name: str, phase: str) -> None:
        """The method waits for others: the phase that is open is over, and begins anew when it returns."""
        _wrap(owner, name, lambda: self.end(phase), lambda: self.begin(phase))

    def last(self, owner: Any, name: str) -> None:
        """When the method is over, however it ended, everything is."""
        _wrap(owner, name, _nothing, self.close, always=True)

    def _enter(self, phase: str, role: str) -> None:
        self.begin(phase, role)  # first: after an exception the phase is not open
        with self._lock:
            self._depth[phase, role] += 1

    def _exit(self, phase: str, role: str) -> None:
        with self._lock:
            self._depth[phase, role] -= 1
            over = self._depth[phase, role] <= 0
        if over:
            self.end(phase, role)


def phases_of(owner: Any, callback: Enabled | None = None) -> Phases | None:
    """New phases for this object; None where nothing is configured, or where it has phases already.

    ``callback``: default is what the environment says.
    """
    callback = callback if callback is not None else PhaseCallback.from_env()
    if not callback.enabled or getattr(owner, _MARK, None) is not None:
        return None
    phases = Phases(callback)
    setattr(owner, _MARK, phases)
    return phases


def _wrap(
    owner: Any, name: str, before: Callable[[], None], after: Callable[[], None], *, always: bool = False
) -> None:
    """``always``: ``after`` also follows an exception. A method that is not there is not wrapped.

    A plain method may give a coroutine (``torch.no_grad`` around an ``async def``), or give one to coroutines
    and run it for anybody else (verl's ``auto_await``): who calls it decides.
    """
    method = getattr(owner, name, None)
    if method is None:
        return

    async def rest(work: Coroutine[Any, Any, Any]) -> Any:
        try:
            result = await work
        except BaseException:
            if always:
                await in_thread(after)
            raise
        await in_thread(after)
        return result

    @functools.wraps(method)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        await in_thread(before, undo=after if always else _nothing)
        return await rest(given(*args, **kwargs))

    async def given(*args: Any, **kwargs: Any) -> Any:
        return await method(*args, **kwargs)  # here: it may look whether a coroutine calls it

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        if hidden and sys._getframe(1).f_code.co_flags & inspect.CO_COROUTINE:
            return coroutine(*args, **kwargs)
        before()
        try:
            result = method(*args, **kwargs)
        except BaseException:
            if always:
                after()
            raise
        if inspect.iscoroutine(result):
            return rest(result)
        after()
        return result

    hidden = _is_coroutine(_innermost(method))
    setattr(owner, name, coroutine if _is_coroutine(method) else function)


def _is_coroutine(method: Any) -> bool:
    return any(map(inspect.iscoroutinefunction, (method, type(method).__call__)))


def _innermost(method: Any) -> Any:
    """What decorators, partials and objects that can be called stand before."""
    while True:
        inner = inspect.unwrap(method)
        if isinstance(inner, functools.partial):
            inner = inner.func
        if inner is method:
            return method
        method = inner


async def in_thread(call: Callable[[], None], *, undo: Callable[[], None] | None = None) -> None:
    """The event loop goes on meanwhile. Cancelled: what the thread got in the end is undone there."""
    if call is _nothing:
        return
    work: Coroutine[Any, Any, None] = asyncio.to_thread(call)
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if undo is not None:
            task.add_done_callback(lambda done: None if done.cancelled() or done.exception() else undo())
        raise


def _nothing() -> None:
    pass
