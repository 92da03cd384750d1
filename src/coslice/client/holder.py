"""What this process holds through one client: a record per acquire, and the gate's section that goes with it.

Shared by ``Client`` and ``AsyncClient``. Decides which record a plain ``yield_()`` ends, and keeps the order:
lock, then gate, then the body; gate, then lock on the way out. Knows nothing of the network.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from coslice.client.config import ClientConfig, group_names, settings_from
from coslice.client.types import Grant
from coslice.errors import ConfigError, NotHeld
from coslice.gate import GATE, Section
from coslice.security.credentials import PLAIN, Credentials

if TYPE_CHECKING:
    from coslice.client.session import Claim

_Caller = tuple[object, object]
_thread = threading.local()
L = TypeVar("L")
"""The transport of a client."""


def caller() -> _Caller:
    """This thread, and this task if an event loop runs in it. Not by their numbers, which later ones have
    too."""
    task = None
    if (asyncio := sys.modules.get("asyncio")) is not None:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs in this thread
            task = None
    if not hasattr(_thread, "itself"):
        _thread.itself = object()
    return _thread.itself, weakref.ref(task) if task is not None else None


class Held(Generic[L]):
    """One acquire of one caller. A section's record can be emptied by ``yield_()`` and filled again."""

    __slots__ = ("caller", "claim", "grant", "groups", "link", "phase", "scoped", "section")

    def __init__(self, groups: tuple[str, ...], *, phase: str = "", scoped: bool) -> None:
        self.groups, self.phase = groups, phase
        self.scoped = scoped
        """A decorator or ``with`` block ends it; a plain acquire is ended by a plain yield."""
        self.caller = caller()
        self.claim: Claim | None = None
        self.link: L | None = None
        self.section: Section | None = None
        self.grant = Grant()

    @property
    def active(self) -> bool:
        return self.section is not None

    def grant_of(self, link: L, claim: Claim) -> None:
        self.link = link
        self.claim = claim
        self.grant = Grant(tuple(claim.holds[group].lease for group in claim.groups))


_holders: weakref.WeakSet[Holder[Any]] = weakref.WeakSet()
Watcher = Callable[[str, Held[Any]], None]
_watchers: list[Watcher] = []
"""Told ``asks``, ``enters`` and ``leaves`` of every record of this process, and of a yield of what is
``unheld``: ``coslice check-phases``."""


def _tell(what: str, held: Held[Any]) -> None:
    for watcher in _watchers:
        watcher(what, held)


def would_ask(groups: Sequence[str], phase: str) -> None:
    """Somebody wanted these groups here and was refused before the orchestrator was asked."""
    _tell("asks", Held(tuple(groups), phase=phase, scoped=False))


class Holder(Generic[L]):
    def __init__(
        self,
        address: str | None = None,
        *,
        job: str = "",
        groups: str | Sequence[str] = (),
        incarnation: str | None = None,
        node: str = "",
        rank: int = 0,
        world: int = 0,
        need: int = 0,
        profile: str = "",
        cpus: Sequence[int] = (),
        credentials: Credentials = PLAIN,
        connect_timeout: float = 10.0,
        reconnect_timeout: float = 60.0,
        yield_timeout: float = 10.0,
    ) -> None:
        """Settings as in ``client.config.ClientConfig``; without an ``address`` every call is a no-op."""
        self.config = config = ClientConfig(
            address=address,
            job=job,
            groups=group_names(groups),
            incarnation=incarnation or "",
            node=node,
            rank=rank,
            world=world,
            need=need,
            profile=profile,
            cpus=tuple(cpus),
            credentials=credentials,
            connect_timeout=connect_timeout,
            reconnect_timeout=reconnect_timeout,
            yield_timeout=yield_timeout,
        )
        if config.cpus:
            GATE.configure(config.cpus)
        self._forget()
        _holders.add(self)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """A client as the environment describes it; each override replaces the setting of its name."""
        return cls(**settings_from(os.environ if env is None else env, overrides))

    @property
    def is_noop(self) -> bool:
        """No orchestrator is configured: nothing is shared and nothing waits."""
        return self.config.address is None

    def _forget(self) -> None:
        """Hold nothing: at the start, and in a forked child."""
        self._records = threading.RLock()
        self._held: list[Held[L]] = []
        self._linked: L | None = None
        self._past: set[str] = set()
        """Groups that were held once: to yield them again is harmless."""

    def _groups(self, group: str | Sequence[str] | None) -> tuple[str, ...]:
        groups = group_names(group) if group is not None else self.config.groups
        if not groups and not self.is_noop:
            raise ConfigError(
                "no group is named: give group=..., set COSLICE_GROUP, or use `coslice run --group NAME`"
            )
        return groups

    def _record(self, groups: tuple[str, ...], phase: str, *, scoped: bool) -> Held[L]:
        """A record for a new acquire, or that of a section around us that ``yield_()`` emptied."""
        if not scoped:
            me = caller()
            with self._records:
                for held in reversed(self._held):
                    if held.caller == me and held.groups == groups:
                        if not held.active:
                            return held
                        break
        held = Held(groups, phase=phase, scoped=scoped)
        _tell("asks", held)
        return held

    def _claim(self, groups: tuple[str, ...], phase: str, timeout: float | None, need: int | None) -> Claim:
        from coslice.client.session import Claim  # protobuf: only with an orchestrator

        if timeout is not None and not timeout >= 0:
            raise ConfigError(
                f"timeout={timeout!r}: use 0 or more seconds, or None to wait as long as it takes"
            )
        now = time.monotonic()
        return Claim(
            groups=groups,
            wake=lambda: None,
            phase=phase,
            need=self.config.need if need is None else need,
            world=self.config.world,
            started=now,
            deadline=math.inf if timeout is None else now + timeout,
            connect_timeout=self.config.connect_timeout,
            reconnect_timeout=self.config.reconnect_timeout,
        )

    def _confirm_s(self, wait: bool) -> float:
        return self.config.yield_timeout if wait else 0.0

    def _all_held(self) -> list[Held[L]]:
        with self._records:
            return list(reversed(self._held))

    def _enter_gate(self, held: Held[L]) -> None:
        """The last step in: from here the state stays."""
        held.section = GATE.enter(held.groups)
        with self._records:
            if held not in self._held:
                self._held.append(held)
            self._past.update(held.groups)
        _tell("enters", held)

    def _leave_gate(self, held: Held[L], *, ends: bool) -> Claim | None:
        """The first step out; the claim that is left to give up."""
        with self._records:
            if held not in self._held:
                return None  # ended before, or held by the process that we were forked from
            if ends or not held.scoped:
                self._held.remove(held)
            section, held.section = held.section, None
            claim, held.claim = held.claim, None
        if section is not None:
            GATE.leave(section)
            _tell("leaves", held)
        return claim

    def _to_yield(self, group: str | Sequence[str] | None) -> tuple[Held[L] | None, tuple[str, ...] | None]:
        """Which record a plain ``yield_(group)`` means, and which of its groups; None: all of them.

        The caller's last one that has the group, else anybody's last. ``(None, …)``: yielded already.
        """
        groups = group_names(group) if group is not None else ()
        me = caller()
        with self._records:
            fitting = [h for h in self._held if h.active and set(groups) <= set(h.groups)]
            held = next((h for h in reversed(fitting) if h.caller == me), fitting[-1] if fitting else None)
            if held is not None:
                return held, groups if groups and set(groups) < set(held.groups) else None
            if self.is_noop or (set(groups) <= self._past if groups else self._past):
                return None, None
        _tell("unheld", Held(groups, scoped=False))
        name = ", ".join(groups) or "any group"
        raise NotHeld(f"yield without a lease: this process does not hold {name}; acquire() comes first")

    def _narrow(self, held: Held[L], given: tuple[str, ...]) -> None:
        """A record gives up some of its groups and keeps the rest, in a section of their own."""
        rest = tuple(group for group in held.groups if group not in given)
        before, held.section = held.section, GATE.enter(rest)
        held.groups = rest
        if before is not None:
            GATE.leave(before)


def _forked() -> None:
    for holder in list(_holders):
        holder._forget()


os.register_at_fork(after_in_child=_forked)

if _folder := os.environ.get("COSLICE_RECORD_PHASES"):
    from coslice.client.recorder import Recorder

    _watchers.append(Recorder(_folder).saw)
