"""``Client``: the lock of the accelerators for threads, and for coroutines that use its sections.

Imports gRPC only once there is an orchestrator to talk to.
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
    from coslice.client.link import Link

F = TypeVar("F", bound=Callable[..., Any])


class Client(Holder["Link"]):
    """Take turns on accelerators. Safe to use from several threads; make it with ``coslice.connect()``.

    Nothing is dialled before the first call that needs the orchestrator. All clients of one job in a process
    share one session. Without an address every call is a no-op (sections still pin their thread to
    ``COSLICE_ACCELERATOR_CPUS``).
    """

    def acquire(
        self,
        group: str | Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        phase: str = "",
        need: int | None = None,
    ) -> Grant:
        """Wait for the lock of one group or several, and for this job's state to be on the device.

        ``timeout`` in seconds; None waits for as long as the orchestrator is reachable. ``need``: device
        memory in bytes that the phase will use. A process that holds the lock enters again at once; the last
        ``yield_()`` gives it up. Raises ``AcquireTimeout``, ``OrchestratorUnreachable`` or a ``Refused``;
        after any exception nothing is held and nothing waits.
        """
        return self._enter(self._groups(group), phase, timeout, need=need, scoped=False).grant

    def yield_(self, group: str | Sequence[str] | None = None) -> bool:
        """Give up what the last ``acquire()`` took, or of that one group. False: still held, by re-entry.

        Raises ``LeaseLost``, once, if the lease was lost meanwhile, and ``NotHeld`` if this process never had
        it. While the orchestrator is away it returns at once: the yield is delivered when it is back.
        """
        held, groups = self._to_yield(group)
        if held is None:
            return True
        if groups is None:
            return self._end(held, ends=False, wait=True)
        self._narrow(held, groups)
        if held.claim is None or held.link is None:
            return True
        return held.link.release(held.claim, groups, confirm_s=self.config.yield_timeout)

    def should_yield(self, group: str | Sequence[str] | None = None) -> bool:
        """Is this a good moment to give way? True when somebody waits too long, or the lease is lost."""
        if self.is_noop or not self._held:
            return False
        return self._link().should_yield(self._groups(group) if group is not None else ())

    def status(self, group: str | None = None, *, timeout: float = 5.0) -> Status:
        """What the orchestrator says of one group, or of all."""
        return Status() if self.is_noop else self._link().status(group or "", timeout)

    def note(self, name: str, value: float = 0.0, *, step: int = 0, text: str = "") -> None:
        """A line in the orchestrator's journal: a reward, a step. Never waits and never raises."""
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
        """Hold the lock while a function, a coroutine, a generator or a ``with`` block runs.

        The phase is the function's name unless given. Inside, the thread runs on the accelerator's cores.
        """
        section = OnAccelerators(self, self._groups(group), phase, timeout, only_async=False)
        return section if fn is None else section(fn)

    def close(self) -> None:
        """Yield what this client holds and, with the last client of the job here, end the session.

        The end of the interpreter does the same.
        """
        for held in self._all_held():
            with contextlib.suppress(LeaseLost):
                self._end(held, ends=True, wait=False)
        if self._linked is not None:
            self._linked.leave(self)
            self._linked = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── the verbs of a section ─────────────────────────────────────────────

    def _enter(
        self,
        groups: tuple[str, ...],
        phase: str,
        timeout: float | None,
        *,
        need: int | None = None,
        scoped: bool = True,
    ) -> Held[Link]:
        held = self._record(groups, phase, scoped=scoped)
        if not self.is_noop:
            link, claim = self._link(), self._claim(groups, phase, timeout, need)
            with acquiring(claim):
                link.acquire(claim)
            held.grant_of(link, claim)
        self._enter_or_release(held)
        return held

    async def _enter_async(self, groups: tuple[str, ...], phase: str, timeout: float | None) -> Held[Link]:
        held = self._record(groups, phase, scoped=True)
        if not self.is_noop:
            link, claim = self._link(), self._claim(groups, phase, timeout, None)
            with acquiring(claim):
                await link.acquire_async(claim)
            held.grant_of(link, claim)
        self._enter_or_release(held)
        return held

    def _leave(self, held: Held[Link], *, wait: bool) -> None:
        self._end(held, ends=True, wait=wait)

    async def _leave_async(self, held: Held[Link], *, wait: bool) -> None:
        claim = self._leave_gate(held, ends=True)
        if claim is not None and held.link is not None:
            await held.link.release_async(claim, None, confirm_s=self._confirm_s(wait))

    # ── parts ──────────────────────────────────────────────────────────────

    def _link(self) -> Link:
        from coslice.client.link import link_for

        self._linked = link = link_for(self.config, self)
        return link

    def _enter_or_release(self, held: Held[Link]) -> None:
        try:
            self._enter_gate(held)
        except BaseException:
            if held.claim is not None and held.link is not None:
                held.link.release(held.claim, None, confirm_s=0)
            raise

    def _end(self, held: Held[Link], *, ends: bool, wait: bool) -> bool:
        claim = self._leave_gate(held, ends=ends)
        if claim is None or held.link is None:
            return True
        return held.link.release(claim, None, confirm_s=self._confirm_s(wait))
