"""``on_accelerators``: a stretch of code that holds a lock, as a decorator or a ``with`` block.

Works on plain functions, methods, coroutines, generators and async generators, and always holds for as long
as the body runs: a coroutine until it returned, a generator from its first ``next`` to exhaustion or close.
Knows nothing of locks: a client gives it four verbs.
"""

import functools
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Generator
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

from coslice.client.holder import Held, _Caller, caller
from coslice.client.types import Grant
from coslice.errors import CosliceError, LeaseLost

_log = logging.getLogger("coslice")
F = TypeVar("F", bound=Callable[..., Any])


class Verbs(Protocol):
    def _enter(self, groups: tuple[str, ...], phase: str, timeout: float | None) -> Held[Any]: ...
    def _leave(self, held: Held[Any], *, wait: bool) -> None: ...
    async def _enter_async(self, groups: tuple[str, ...], phase: str, timeout: float | None) -> Held[Any]: ...
    async def _leave_async(self, held: Held[Any], *, wait: bool) -> None: ...


class _Scope:
    """One passage through a section."""

    def __init__(self, client: Verbs, groups: tuple[str, ...], phase: str, timeout: float | None) -> None:
        self._client = client
        self._wish = (groups, phase, timeout)
        self._held: Held[Any] | None = None

    def __enter__(self) -> Grant:
        self._held = self._client._enter(*self._wish)
        return self._held.grant

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._held is not None
        try:
            self._client._leave(self._held, wait=_may_wait(error))
        except CosliceError as trouble:
            _report(trouble, error)

    async def __aenter__(self) -> Grant:
        self._held = await self._client._enter_async(*self._wish)
        return self._held.grant

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._held is not None
        try:
            await self._client._leave_async(self._held, wait=_may_wait(error))
        except CosliceError as trouble:
            _report(trouble, error)


def _may_wait(error: BaseException | None) -> bool:
    """A closed generator may be closed by the garbage collector, in any thread: it must not wait there."""
    return not isinstance(error, GeneratorExit)


def _report(trouble: CosliceError, error: BaseException | None) -> None:
    """What went wrong on the way out. The body's own exception stays the one that is raised.

    A lost lease does not take the body's result away: its state never moved while it ran.
    """
    if error is not None:
        error.add_note(f"coslice, on leaving the accelerator section: {trouble}")
    elif isinstance(trouble, LeaseLost):
        _log.warning("coslice: %s", trouble)
    else:
        raise trouble


class OnAccelerators:
    """Decorator and context manager; the same object may be used again, nested and by several threads."""

    def __init__(
        self, client: Verbs, groups: tuple[str, ...], phase: str, timeout: float | None, *, only_async: bool
    ) -> None:
        self._client = client
        self._groups = groups
        self._phase = phase
        self._timeout = timeout
        self._only_async = only_async
        self._entered: dict[_Caller, list[_Scope]] = {}

    def _scope(self, phase: str = "") -> _Scope:
        return _Scope(self._client, self._groups, self._phase or phase, self._timeout)

    def __call__(self, fn: F) -> F:
        if isinstance(fn, (staticmethod, classmethod)):
            return cast(F, type(fn)(self(fn.__func__)))
        if inspect.isclass(fn) or not callable(fn):
            raise TypeError(f"on_accelerators decorates functions and methods, not {fn!r}")
        phase = getattr(fn, "__name__", "")
        if inspect.isasyncgenfunction(fn):
            return cast(F, self._async_generator(fn, phase))
        if inspect.iscoroutinefunction(fn):
            return cast(F, self._coroutine(fn, phase))
        if self._only_async:
            raise TypeError(
                f"AsyncClient.on_accelerators cannot make {phase or fn!r} wait: it is no coroutine. "
                "Use coslice.connect() for plain functions; its sections work on coroutines too"
            )
        if inspect.isgeneratorfunction(fn):
            return cast(F, self._generator(fn, phase))
        return cast(F, self._function(fn, phase))

    def _function(self, fn: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(fn)
        def section(*args: Any, **kwargs: Any) -> Any:
            with self._scope(phase):
                return fn(*args, **kwargs)

        return section

    def _coroutine(self, fn: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(fn)
        async def section(*args: Any, **kwargs: Any) -> Any:
            async with self._scope(phase):
                return await fn(*args, **kwargs)

        return section

    def _generator(self, fn: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(fn)
        def section(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with self._scope(phase):
                return (yield from fn(*args, **kwargs))

        return section

    def _async_generator(self, fn: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @functools.wraps(fn)
        async def section(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            async with self._scope(phase):
                inner = fn(*args, **kwargs)
                try:
                    step = inner.asend(None)
                    while True:
                        try:
                            item = await step
                        except StopAsyncIteration:
                            return
                        try:
                            sent = yield item
                        except GeneratorExit:
                            raise
                        except BaseException as thrown:
                            step = inner.athrow(thrown)
                        else:
                            step = inner.asend(sent)
                finally:
                    await inner.aclose()

        return section

    def __enter__(self) -> Grant:
        if self._only_async:
            raise TypeError("AsyncClient.on_accelerators needs `async with`")
        scope = self._scope()
        grant = scope.__enter__()
        self._entered.setdefault(caller(), []).append(scope)
        return grant

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pop().__exit__(kind, error, trace)

    async def __aenter__(self) -> Grant:
        scope = self._scope()
        grant = await scope.__aenter__()
        self._entered.setdefault(caller(), []).append(scope)
        return grant

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pop().__aexit__(kind, error, trace)

    def _pop(self) -> _Scope:
        """The caller's last passage; where another thread leaves than entered, somebody's last one."""
        who = me if (me := caller()) in self._entered else next(iter(self._entered))
        scopes = self._entered[who]  # only its own caller, or its one substitute, touches this list
        scope = scopes.pop()
        if not scopes:
            del self._entered[who]
        return scope
