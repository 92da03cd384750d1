"""``AsyncClient``: the lock of the accelerators for programs that are asyncio all through.

It keeps a session of its own per event loop, apart from that of a ``Client`` in the same process: use one of
the two. (``Client`` serves coroutines as well, with its sections.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from coslice.client.decorator import OnAccelerators
from coslice.client.holder import Held, Holder
from coslice.client.trace import acquiring
from coslice.client.types import Grant, Status
from coslice.errors import LeaseLost

if TYPE_CHECKING:
    from coslice.client.aio_link import AioLink

F = TypeVar("F", bound=Callable[..., Any])


class AsyncClient(Holder["AioLink"]):
    """``Client`` with ``await``: the same verbs, bounds and errors. Cancelling a wait gives up its place."""

    async def acquire(
        self,
        group: str | Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        phase: str = "",
        need: int | None = None,
    ) -> Grant:
        """As ``Client.acquire``."""
        held = await self._acquire(self._groups(group), phase, timeout, need=need, scoped=False)
        return held.grant

    async def yield_(self, group: str | Sequence[str] | None = None) -> bool:
        """As ``Client.yield_``."""
        held, groups = self._to_yield(group)
        if held is None:
            return True
        if groups is None:
            return await self._end(held, ends=False, wait=True)
        self._narrow(held, groups)
        if held.claim is None or held.link is None:
            return True
        return await held.link.release(held.claim, groups, confirm_s=self.config.yield_timeout)

    def should_yield(self, group: str | Sequence[str] | None = None) -> bool:
        """As ``Client.should_yield``: it waits for nothing."""
        if self.is_noop or not self._held:
            return False
        return self._link().should_yield(self._groups(group) if group is not None else ())

    async def status(self, group: str | None = None, *, timeout: float = 5.0) -> Status:
        """As ``Client.status``."""
        return Status() if self.is_noop else await self._link().status(group or "", timeout)

    def note(self, name: str, value: float = 0.0, *, step: int = 0, text: str = "") -> None:
        """As ``Client.note``: it waits for nothing."""
        if not self.is_noop:
            self._link().note(name, value, step, text)

    @overload
    def on_accelerators(self, fn: F, /) -> F: ...
    @overload
    def on_accelerators(
        self,
        fn: None = None,
        /,
        *,
        group: str | Sequence[str] | None = None,
        phase: str = "",
        timeout: float | None = None,
    ) -> OnAccelerators: ...
    def on_accelerators(
        self,
        fn: F | None = None,
        /,
        *,
        group: str | Sequence[str] | None = None,
        phase: str = "",
        timeout: float | None = None,
    ) -> F | OnAccelerators:
        """As ``Client.on_accelerators``, for coroutines, async generators and ``async with``."""
        section = OnAccelerators(self, self._groups(group), phase, timeout, only_async=True)
        return section if fn is None else section(fn)

    async def close(self) -> None:
        """As ``Client.close``."""
        for held in self._all_held():
            with contextlib.suppress(LeaseLost):
                await self._end(held, ends=True, wait=False)
        if self._linked is not None:
            await self._linked.leave(self)
            self._linked = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ── the verbs of a section ─────────────────────────────────────────────

    async def _enter_async(self, groups: tuple[str, ...], phase: str, timeout: float | None) -> Held[AioLink]:
        return await self._acquire(groups, phase, timeout, need=None, scoped=True)

    async def _leave_async(self, held: Held[AioLink], *, wait: bool) -> None:
        await self._end(held, ends=True, wait=wait)

    def _enter(self, groups: tuple[str, ...], phase: str, timeout: float | None) -> Held[AioLink]:
        raise TypeError("AsyncClient.on_accelerators needs `async with`")

    def _leave(self, held: Held[AioLink], *, wait: bool) -> None:
        raise TypeError("AsyncClient.on_accelerators needs `async with`")

    # ── parts ──────────────────────────────────────────────────────────────

    def _link(self) -> AioLink:
        from coslice.client.aio_link import link_for

        self._linked = link = link_for(self.config, self)
        return link

    async def _acquire(
        self, groups: tuple[str, ...], phase: str, timeout: float | None, *, need: int | None, scoped: bool
    ) -> Held[AioLink]:
        held = self._record(groups, phase, scoped=scoped)
        if not self.is_noop:
            link, claim = self._link(), self._claim(groups, phase, timeout, need)
            with acquiring(claim):
                await link.acquire(claim)
            held.grant_of(link, claim)
        try:
            self._enter_gate(held)
        except BaseException:
            if held.claim is not None and held.link is not None:
                held.link.release_now(held.claim)
            raise
        return held

    async def _end(self, held: Held[AioLink], *, ends: bool, wait: bool) -> bool:
        claim = self._leave_gate(held, ends=ends)
        if claim is None or held.link is None:
            return True
        return await held.link.release(claim, None, confirm_s=self._confirm_s(wait))
