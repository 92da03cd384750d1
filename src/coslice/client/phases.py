"""``PhaseCallback``: what an RL framework calls at its phase boundaries, in terms of roles, not of locks.

A framework says that a phase of a role begins and ends; here that becomes holding the group of that role's
accelerators. Phases that touch both pools (building the models, syncing weights) hold both, taken in one
request, the trainer's first, so that no two jobs can wait for each other in a circle.

Framework-neutral, stdlib only; without an orchestrator in the environment it does nothing and imports
nothing.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from coslice.client.holder import would_ask
from coslice.client.sync import Client
from coslice.errors import ConfigError, CosliceError, LeaseLost, LockOrder

_log = logging.getLogger("coslice")

TRAINER, SAMPLER, BOTH = "trainer", "sampler", "both"
ROLES: Mapping[str, str] = {
    "init": BOTH,
    "create": BOTH,
    "weight_sync": BOTH,
    "generate": SAMPLER,
    "eval": SAMPLER,
    "train": TRAINER,
    "log_probs": TRAINER,
    "onload": TRAINER,
    "offload": TRAINER,
    "save": TRAINER,
}
"""Whose accelerators a phase uses when the framework does not say. Others (rewards, waiting) use none."""


class Callback(Protocol):
    def on_phase_begin(
        self, phase: str, role: str = "", context: Mapping[str, Any] | None = None
    ) -> None: ...
    def on_phase_end(self, phase: str, role: str = "", context: Mapping[str, Any] | None = None) -> None: ...
    def close(self) -> None: ...


class PhaseCallback:
    """Holds a role's accelerators while one of its phases is open. Thread-safe, idempotent, safe to forget.

    ``enabled`` is False where no orchestrator is configured: then every call returns at once.
    """

    def __init__(
        self,
        client: Client,
        *,
        trainer: str = "",
        sampler: str = "",
        ready: Callable[[str], bool] | None = None,
        timeout: float | None = None,
        roles: Mapping[str, str] = ROLES,
    ) -> None:
        """``trainer``, ``sampler``: groups; one of them, or the same twice, where both roles share a pool.

        ``ready(role)`` is asked at the end of a phase: is the next batch of that role there already? Then its
        accelerators are kept, unless somebody waits too long for them (``should_yield``). ``timeout``:
        seconds an acquire may wait. Raises ``ConfigError`` without any group.
        """
        self.enabled = not client.is_noop
        if self.enabled and not (trainer or sampler):
            raise ConfigError(
                "no group is named for the roles: set COSLICE_TRAINER_GROUP and COSLICE_SAMPLER_GROUP, or "
                "COSLICE_GROUP where both share their accelerators"
            )
        self._client, self._ready, self._timeout, self._roles = client, ready, timeout, roles
        self._groups = {
            TRAINER: _distinct(trainer or sampler),
            SAMPLER: _distinct(sampler or trainer),
            BOTH: _distinct(trainer, sampler),
        }
        self._order = self._groups[BOTH]
        self._lock = threading.RLock()
        self._open: dict[tuple[str, str], None] = {}
        """Phases (name, role) that have begun, in their order."""
        self._held: list[str] = []
        """Groups held, in the order they were taken."""

    @classmethod
    def from_env(
        cls,
        env: Mapping[str, str] | None = None,
        *,
        client: Client | None = None,
        ready: Callable[[str], bool] | None = None,
    ) -> Self:
        """As the environment says: ``COSLICE_TRAINER_GROUP`` and ``COSLICE_SAMPLER_GROUP``, or
        ``COSLICE_GROUP`` (one group for both, or ``trainer,sampler``).

        The names that upstream's integrations read (``TIMESLICE_…``) stand in for ours where those are unset.
        """
        found = upstream_env(os.environ if env is None else env)
        groups = [name.strip() for name in found.get("COSLICE_GROUP", "").split(",") if name.strip()]
        trainer = found.get("COSLICE_TRAINER_GROUP", "") or (groups[0] if groups else "")
        sampler = found.get("COSLICE_SAMPLER_GROUP", "") or (groups[1] if len(groups) > 1 else trainer)
        return cls(client or Client.from_env(found), trainer=trainer, sampler=sampler, ready=ready)

    @property
    def held(self) -> tuple[str, ...]:
        """The groups held now, in the order they were taken."""
        with self._lock:
            return tuple(self._held)

    def on_phase_begin(self, phase: str, role: str = "", context: Mapping[str, Any] | None = None) -> None:
        """Returns once the role's accelerators are ours. A phase that is open already is left as it is.

        Raises what ``Client.acquire`` raises; ``LockOrder`` when the trainer's are wanted while a phase of
        the sampler is open in this process. After an exception the phase has not begun.
        """
        if not self.enabled:
            return
        role = self._role(phase, role)
        wanted = self._groups.get(role, ())
        if not wanted:
            return
        with self._lock:
            if (phase, role) not in self._open:
                self._take(phase, wanted)
                self._open[phase, role] = None
        step = (context or {}).get("step")
        if isinstance(step, int):
            self._client.note(f"phase {phase}", step=step)

    def on_phase_end(self, phase: str, role: str = "", context: Mapping[str, Any] | None = None) -> None:
        """Gives the role's accelerators up, but for what another open phase needs. Never raises for a lease
        that was lost: it is logged, and the phase is over. One that is not open: nothing happens."""
        if not self.enabled:
            return
        role = self._role(phase, role)
        with self._lock:
            if (phase, role) not in self._open:
                return
            del self._open[phase, role]
            needed = {group for _, open_role in self._open for group in self._groups[open_role]}
            unneeded = [group for group in self._held if group not in needed]
            self._give([group for group in unneeded if not self._keeps(group, role)])

    def close(self) -> None:
        """Gives everything up, whatever is open. Also what to call when the training failed."""
        with self._lock:
            self._open.clear()
            self._give(list(self._held))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _role(self, phase: str, role: str) -> str:
        role = role or self._roles.get(phase, "")
        if role not in ("", *self._groups):
            raise ConfigError(f"{role!r} is no role: use {TRAINER}, {SAMPLER} or {BOTH}")
        return role

    def _take(self, phase: str, wanted: tuple[str, ...]) -> None:
        missing = [group for group in wanted if group not in self._held]
        if not missing:
            return
        late = [group for group in self._held if any(self._before(new, group) for new in missing)]
        in_use = {group for _, role in self._open for group in self._groups[role]}
        if busy := [group for group in late if group in in_use]:
            would_ask(missing, phase)
            phases = ", ".join(name for name, role in self._open if set(self._groups[role]) & set(busy))
            raise LockOrder(
                f"phase {phase!r} wants {', '.join(missing)} while {', '.join(busy)} is held by open phase "
                f"{phases}: the trainer's accelerators come before the sampler's. End that phase first, open "
                f"a phase of role {BOTH!r}, or run the roles in processes of their own"
            )
        self._give(late)  # kept for a batch that was ready, and in the way of the order now
        missing = [group for group in wanted if group not in self._held]
        self._client.acquire(missing, phase=phase, timeout=self._timeout)
        self._held += missing

    def _before(self, one: str, other: str) -> bool:
        return self._order.index(one) < self._order.index(other)

    def _keeps(self, group: str, role: str) -> bool:
        return self._ready is not None and self._ready(role) and not self._client.should_yield(group)

    def _give(self, groups: Iterable[str]) -> None:
        """The last taken first. All are given up, whatever happens to one."""
        for group in sorted(groups, key=self._held.index, reverse=True):
            self._held.remove(group)
            try:
                self._client.yield_(group)
            except LeaseLost as lost:
                _log.warning("coslice: %s", lost)
            except CosliceError as error:
                _log.error("coslice: giving up %s: %s", group, error)


class PhaseCallbacks:
    """Several callbacks as one: begun in order, ended in reverse, and none left open when one fails."""

    def __init__(self, *callbacks: Callback) -> None:
        self._callbacks = callbacks

    @property
    def enabled(self) -> bool:
        return any(getattr(callback, "enabled", True) for callback in self._callbacks)

    def on_phase_begin(self, phase: str, role: str = "", context: Mapping[str, Any] | None = None) -> None:
        begun: list[Callback] = []
        try:
            for callback in self._callbacks:
                callback.on_phase_begin(phase, role, context)
                begun.append(callback)
        except BaseException:
            _each(reversed(begun), lambda callback: callback.on_phase_end(phase, role, context), quiet=True)
            raise

    def on_phase_end(self, phase: str, role: str = "", context: Mapping[str, Any] | None = None) -> None:
        _each(reversed(self._callbacks), lambda callback: callback.on_phase_end(phase, role, context))

    def close(self) -> None:
        _each(reversed(self._callbacks), lambda callback: callback.close())


def _each(callbacks: Iterable[Callback], call: Callable[[Callback], None], *, quiet: bool = False) -> None:
    """Call all of them; the first error is raised at the end, unless another is on its way already."""
    first: Exception | None = None
    for callback in callbacks:
        try:
            call(callback)
        except Exception as error:
            _log.error("coslice: %r: %s", callback, error)
            first = first or error
    if first is not None and not quiet:
        raise first


def upstream_env(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` with our names filled in from upstream's where ours are unset."""
    ours = {
        "COSLICE_JOB": "TIMESLICE_JOB_ID",
        "COSLICE_ORCHESTRATOR": "TIMESLICE_ORCH_ADDR",
        "COSLICE_TRAINER_GROUP": "TIMESLICE_TRAINER_GROUP",
        "COSLICE_SAMPLER_GROUP": "TIMESLICE_SAMPLER_GROUP",
        "COSLICE_GROUP": "TIMESLICE_GROUP",
    }
    found = {name: env[other] for name, other in ours.items() if not env.get(name) and env.get(other)}
    return {**env, **found}


def _distinct(*groups: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(group for group in groups if group))
