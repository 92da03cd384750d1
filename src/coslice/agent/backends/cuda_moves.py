"""The four steps of a whole-process move, each for all processes of a job at once: lock, checkpoint, restore,
unlock. Explicit actions, never a toggle.

A driver's error code is not believed: after every error the process's *state* is read, and it decides. What a
failed step means for the job, who undoes what, and where there is room is the backend's business.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from coslice.agent.backends import cuda_calls as api
from coslice.agent.backends.cuda_calls import (
    Action,
    CallBroke,
    CallHangs,
    Calls,
    Pair,
    Reply,
    Request,
    State,
    UsableError,
    meaning,
)
from coslice.agent.backends.process_ledger import Target

log = logging.getLogger(__name__)

STATE_SECONDS = 20.0
"""Reading a state starts nothing, but was seen to take seconds, and hangs while a peer is locked."""
SLOW = 0.5
"""A call is spoken of when so much of its time has passed."""
LOCK_GRACE = 10.0
"""Beyond its own timeout."""
DEFINITE = (api.OUT_OF_MEMORY, api.NOT_SUPPORTED, api.NOT_FOUND, api.UNAVAILABLE)
"""Trying these again changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A step that did not succeed for one process."""

    pid: int
    text: str
    state: State | None = None
    """None: not known."""
    busy: bool = False
    hangs: bool = False
    final: bool = False
    """The process's state is lost, or nobody can tell."""


class Moves:
    """The steps of one operation."""

    def __init__(
        self, calls: Calls, *, deadline: Callable[[int], float], lock_timeout: float, tries: int
    ) -> None:
        """``deadline``: seconds that a call may take that moves so many bytes."""
        self._calls, self._deadline, self._lock_timeout, self._tries = calls, deadline, lock_timeout, tries
        self._spent: list[tuple[float, float]] = []

    @property
    def driver_seconds(self) -> float:
        """Time in which at least one call was in the driver."""
        total, until = 0.0, float("-inf")
        for began, ended in sorted(self._spent):
            total += max(0.0, ended - max(began, until))
            until = max(until, ended)
        return total

    # ── reading ────────────────────────────────────────────────────────────

    async def states(self, targets: Iterable[Target]) -> dict[int, State | None]:
        """None: the driver does not tell."""
        wanted = tuple(targets)
        found = await asyncio.gather(*(self.state(target) for target in wanted))
        return {target.pid: state for target, state in zip(wanted, found, strict=True)}

    async def state(self, target: Target) -> State | None:
        for _ in range(self._tries):
            try:
                reply = await self._calls.call(
                    Request(action="state", pid=target.pid), deadline=STATE_SECONDS
                )
            except (CallHangs, UsableError):
                return None
            except CallBroke:
                continue
            self._spent.append((reply.began, reply.began + reply.seconds))
            if (state := _known(reply.state)) is not None:
                return state
            if not target.alive:
                return None
        return None

    async def uses_cuda(self, pid: int) -> bool:
        """Has it a context? A process that only counted devices has none, and cannot be locked."""
        for _ in range(self._tries):
            try:
                reply = await self._calls.call(Request(action="tid", pid=pid), deadline=STATE_SECONDS)
            except (CallHangs, CallBroke, UsableError):
                return True  # it does something with the driver
            if reply.code == api.OK:
                return True
            if reply.code in (api.NOT_INITIALIZED, api.INVALID_VALUE):
                return False
        return True

    # ── steps ──────────────────────────────────────────────────────────────

    async def lock(self, targets: Sequence[Target]) -> list[Failure]:
        """All at once: processes with communicators between them can only be quiet together."""
        return await self._all(targets, self._lock)

    async def checkpoint(self, targets: Sequence[Target]) -> list[Failure]:
        return await self._all(targets, self._checkpoint)

    async def restore(
        self,
        targets: Sequence[Target],
        *,
        pairs: tuple[Pair, ...],
        untouched: Callable[[Target], Awaitable[bool]],
    ) -> list[Failure]:
        """``untouched``: does the device hold nothing of the process, by measurement?"""

        async def one(target: Target) -> Failure | None:
            return await self._restore(target, pairs, untouched)

        return await self._all(targets, one)

    async def unlock(self, targets: Sequence[Target]) -> list[Failure]:
        return await self._all(targets, self._unlock)

    async def _all(
        self, targets: Sequence[Target], step: Callable[[Target], Awaitable[Failure | None]]
    ) -> list[Failure]:
        found = await asyncio.gather(*(step(target) for target in targets))
        return [failure for failure in found if failure is not None]

    async def _lock(self, target: Target) -> Failure | None:
        last = Failure(pid=target.pid, text="")
        request = Request(action="lock", pid=target.pid, timeout_ms=max(1, int(self._lock_timeout * 1000)))
        for _ in range(self._tries):
            tried = await self._try(target, request, self._lock_timeout + LOCK_GRACE)
            if isinstance(tried, Failure):
                return tried
            reply, state = tried
            if reply.code == api.OK or state is State.LOCKED:
                return None
            last = _failure(target, "lock", reply, state)
            if state is not State.RUNNING or reply.code in (*DEFINITE, api.NOT_READY, api.NOT_INITIALIZED):
                break
        return last

    async def _checkpoint(self, target: Target) -> Failure | None:
        last = Failure(pid=target.pid, text="")
        request = Request(action="checkpoint", pid=target.pid, verify=True)
        for _ in range(self._tries):
            tried = await self._try(target, request, self._deadline(target.bytes))
            if isinstance(tried, Failure):
                return tried
            reply, state = tried
            if state is State.CHECKPOINTED:
                return None
            last = _failure(target, "checkpoint", reply, state)
            if state is not State.LOCKED or reply.code in DEFINITE:
                break
        return last

    async def _restore(
        self, target: Target, pairs: tuple[Pair, ...], untouched: Callable[[Target], Awaitable[bool]]
    ) -> Failure | None:
        """Once. A second call follows only where the first provably began nothing: the driver still says
        checkpointed, NVML sees nothing of the process on any device, and it was not for want of memory."""
        last = Failure(pid=target.pid, text="", final=True)
        request = Request(action="restore", pid=target.pid, pairs=pairs, verify=True)
        for _ in range(self._tries):
            tried = await self._try(target, request, self._deadline(target.bytes))
            if isinstance(tried, Failure):
                return tried
            reply, state = tried
            if state in (State.LOCKED, State.RUNNING):
                return None
            begun = (
                state is not State.CHECKPOINTED
                or reply.code == api.OUT_OF_MEMORY
                or not await untouched(target)
            )
            last = _failure(target, "restore", reply, state, final=begun)
            if begun or reply.code in DEFINITE:
                break
        return last

    async def _unlock(self, target: Target) -> Failure | None:
        last = Failure(pid=target.pid, text="")
        request = Request(action="unlock", pid=target.pid, verify=True)
        for _ in range(2 * self._tries):  # it frees a process, and harms nobody
            tried = await self._try(target, request, STATE_SECONDS)
            if isinstance(tried, Failure):
                return tried
            reply, state = tried
            if state is State.RUNNING:  # whatever it said
                return None
            last = _failure(target, "unlock", reply, state)
            if state is not State.LOCKED or reply.code in DEFINITE:
                break
        return last

    async def _try(
        self, target: Target, request: Request, deadline: float
    ) -> tuple[Reply, State | None] | Failure:
        """The reply and the state after it; or that nothing more can be done."""
        slow = asyncio.get_running_loop().call_later(SLOW * deadline, _tell_slow, request, deadline)
        try:
            reply = await self._calls.call(request, deadline=deadline)
        except CallHangs as hangs:
            return Failure(pid=target.pid, text=str(hangs), hangs=True, final=True)
        except CallBroke as broke:
            reply = Reply(code=999, name=str(broke))
        except UsableError as error:
            reply = Reply(code=api.UNAVAILABLE, name=str(error))
        finally:
            slow.cancel()
        self._spent.append((reply.began, reply.began + reply.seconds))
        state = _known(reply.state)
        if state is None and (reply.code or request.verify):
            state = await self.state(target)
        if state is None and reply.code and not target.alive:
            text = f"process {target.pid} ended during the {request.action}"
            return Failure(pid=target.pid, text=text, final=True)
        return reply, state


def _tell_slow(request: Request, deadline: float) -> None:
    log.warning(
        "the %s of process %d has taken %.0f s; at %.0f s it counts as hanging",
        request.action,
        request.pid,
        SLOW * deadline,
        deadline,
    )


def _known(state: int) -> State | None:
    return State(state) if state in State.__members__.values() else None


def _failure(
    target: Target, action: Action, reply: Reply, state: State | None, *, final: bool = False
) -> Failure:
    where = "of unknown state" if state is None else state.name.lower()
    what = meaning(action, reply.code, reply.name) if reply.code else "the driver reported success"
    return Failure(
        pid=target.pid,
        text=f"{action} of process {target.pid}: {what}; it is {where}",
        state=state,
        busy=action == "lock" and reply.code == api.NOT_READY,
        final=final or state in (None, State.FAILED),
    )
