"""The app endpoint: inference servers (vLLM, SGLang) that free and fill their own device memory over HTTP.

Their success says little: they were seen to answer 200 and free nothing, or die, or come back with other
weights. So a snapshot counts when their memory was measured to fall and they still answer; a restore when
they generate what they generated before. All engines of a job or none: after a failure those that slept are
woken.

Moves run to their end even if the caller goes away in the middle, because a request that was sent cannot be
called back; what is known of each engine is in the ledger.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from coslice.agent.backends.app_endpoint_engine import Engine, EngineSettings, Target
from coslice.agent.backends.app_endpoint_http import NoAnswer
from coslice.agent.backends.app_endpoint_memory import Measure, host_memory
from coslice.agent.backends.base import Capabilities, MoveError, Presence, Restored, Snapshotted
from coslice.agent.endpoints import allowed_endpoint
from coslice.agent.endpoints_ledger import Ledger, Phase
from coslice.agent.members import Member
from coslice.errors import ConfigError

T = TypeVar("T")
Room = Callable[[int], int | None]


class AppEndpointBackend:
    """``allow``: ``host:port`` beyond loopback that may be called.

    ``measure`` and ``room`` by kind of device (``host``, ``cuda``): device memory used by processes, and free
    for one. Without ``measure`` for a device its engines cannot be moved.
    """

    def __init__(
        self,
        ledger: Ledger | None = None,
        *,
        settings: EngineSettings | None = None,
        allow: Sequence[str] = (),
        measure: dict[str, Measure] | None = None,
        room: dict[str, Room] | None = None,
    ) -> None:
        self._ledger = ledger or Ledger()
        self._settings = settings or EngineSettings()
        self._allow = tuple(allow)
        self._measure: dict[str, Measure] = {"host": host_memory, **(measure or {})}
        self._room = room or {}
        self._engines: dict[str, Engine] = {}
        self._running: set[asyncio.Task[Any]] = set()

    def capabilities(self) -> Capabilities:
        return Capabilities(name="app_endpoint", parts=True, in_process=False, modes=("offload", "discard"))

    async def snapshot(
        self, members: Sequence[Member], *, op: str, mode: str = "offload", tags: Sequence[str] = ()
    ) -> Snapshotted:
        done = await self.snapshot_engines([_target(m) for m in members], mode=mode, tags=tags)
        await self.probe(members)
        return done

    async def restore(self, members: Sequence[Member], *, op: str) -> Restored:
        try:
            return await self.restore_engines([_target(m) for m in members])
        finally:
            await self.probe(members)

    async def probe(self, members: Sequence[Member]) -> Presence:
        """By the ledger and by measurement. Tells each member whether it is parked."""
        used = 0
        for member in members:
            engine = self._engine(_target(member))
            now = 0 if member.has_ended else await asyncio.to_thread(engine.used)
            member.parked = engine.parked
            member.residual = now if member.parked else 0
            used += now
        parked = sum(member.parked for member in members)
        return Presence(live=len(members) - parked, parked=parked, device_bytes=used)

    async def attach(self, member: Member) -> None:
        """A process registers (again): is its engine asleep? Finds out what came of an interrupted move."""
        for key in self._ledger.ended():
            await self._ledger.drop(key)
            if (engine := self._engines.pop(key, None)) is not None:
                await engine.close()
        engine = self._engine(_target(member))
        async with engine.lock:
            if engine.entry.phase is not Phase.LOST:
                await engine.settle()
        await self.probe([member])

    async def close(self) -> None:
        for task in tuple(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for engine in self._engines.values():
            await engine.close()
        self._engines.clear()

    # ── for callers that have engines and no members ───────────────────────

    async def snapshot_engines(
        self, targets: Sequence[Target], *, mode: str = "offload", tags: Sequence[str] = ()
    ) -> Snapshotted:
        """Raises ``MoveError``; then all that could be woken again is awake."""
        engines = [self._engine(target) for target in targets]
        return await self._whole(self._out(engines, tuple(tags), discard=mode == "discard"))

    async def restore_engines(self, targets: Sequence[Target]) -> Restored:
        """Raises ``MoveError``. Engines that are awake already are left alone."""
        return await self._whole(self._back([self._engine(target) for target in targets]))

    # ── moves ──────────────────────────────────────────────────────────────

    async def _out(self, engines: Sequence[Engine], tags: tuple[str, ...], *, discard: bool) -> Snapshotted:
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            for engine in _in_order(engines):
                await stack.enter_async_context(engine.lock)
                await engine.settle()
            leaving = [engine for engine in engines if not engine.sleeps(tags)]
            try:
                await _all(engine.prepare(tags, discard=discard) for engine in leaving)
                await _all(engine.leave() for engine in leaving)
                sizes = await _all(engine.left() for engine in leaving)
            except MoveError as error:
                await self._undo(leaving, error)
                raise
            resting = [engine for engine in engines if engine not in leaving]
            left = sum([rest for _, rest in sizes]) + sum(
                [await asyncio.to_thread(engine.used) for engine in resting]
            )
            freed = sum(size for size, _ in sizes)
            return Snapshotted(bytes=freed, residual=left, seconds=time.monotonic() - began)

    @staticmethod
    async def _undo(engines: Sequence[Engine], cause: MoveError) -> None:
        outcomes = await asyncio.gather(*(engine.undo() for engine in engines), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for failure in failures:
            if not isinstance(failure, MoveError):
                raise failure
        if failures:
            words = "; ".join(str(failure) for failure in failures)
            raise MoveError(f"{cause}; and {words}", lost=True, pid=cause.pid) from cause

    @staticmethod
    async def _back(engines: Sequence[Engine]) -> Restored:
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            for engine in _in_order(engines):
                await stack.enter_async_context(engine.lock)
            away = [engine for engine in engines if engine.entry.phase is not Phase.AWAKE]
            total = sum(await _all(engine.come_back() for engine in away))
            return Restored(bytes=total, seconds=time.monotonic() - began)

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone: the ledger has the outcome

    def _engine(self, target: Target) -> Engine:
        engine = self._engines.get(target.key)
        if engine is not None and engine.target == target:
            return engine
        if target.device not in self._measure:
            raise MoveError(
                f"the memory of a {target.device!r} device cannot be measured here, and an engine's own word "
                "is not enough",
                pid=target.pid,
            )
        try:
            endpoint = allowed_endpoint(target.url, allow=self._allow)
            engine = Engine(
                target,
                endpoint,
                settings=self._settings,
                ledger=self._ledger,
                measure=self._measure[target.device],
                room=self._room.get(target.device, lambda pid: None),
            )
        except ConfigError as error:
            raise MoveError(str(error), pid=target.pid) from None
        self._engines[target.key] = engine
        return engine


def _target(member: Member) -> Target:
    return Target(
        key=member.buffer,
        job=member.job,
        url=member.endpoint,
        engine=member.engine,
        pid=member.pid,
        started=member.started,
        device=member.device,
    )


def _in_order(engines: Sequence[Engine]) -> list[Engine]:
    """Locks are always taken in this order."""
    return sorted(engines, key=lambda engine: engine.target.key)


async def _all(steps: Iterable[Awaitable[T]]) -> list[T]:
    """Every step to its end; raises one ``MoveError`` for all that failed."""
    outcomes = await asyncio.gather(*steps, return_exceptions=True)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not failures:
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    for failure in failures:
        if not isinstance(failure, MoveError | NoAnswer):
            raise failure
    moves = [failure for failure in failures if isinstance(failure, MoveError)]
    raise MoveError(
        "; ".join(str(failure) for failure in failures),
        busy=len(moves) == len(failures) and all(move.busy for move in moves),
        no_room=any(move.no_room for move in moves),
        lost=any(move.lost for move in moves),
        pid=next((move.pid for move in moves if move.pid), 0),
    )
