"""The app endpoint: inference servers (vLLM, SGLang) that free and fill their own device memory over HTTP.

Their success says little: they were seen to answer 200 and free nothing, or die, or come back with other
weights. So a snapshot counts when their memory was measured to fall and they still answer; a restore when
they generate what they generated before. All engines of a job or none: after a failure those that slept are
woken.

Moves run to their end even if the caller goes away in the middle, because a request that was sent cannot be
called back; what is known of each engine is in the ledger.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from coslice.agent.backends.app_endpoint_engine import Engine
from coslice.agent.backends.app_endpoint_http import NoAnswer, load_httpx
from coslice.agent.backends.app_endpoint_memory import DeviceMeasure, HostMeasure, Measure
from coslice.agent.backends.app_endpoint_settings import EngineSettings, Target
from coslice.agent.backends.base import (
    Capabilities,
    Defaults,
    MoveError,
    NodeContext,
    Presence,
    ProcessRef,
    Restored,
    Snapshotted,
)
from coslice.agent.backends.resolve import parse_backend
from coslice.agent.backends.settings import settings_of
from coslice.agent.endpoints import allowed_endpoint
from coslice.agent.endpoints_ledger import CODEC, KEY, Entry, Ledger, Phase
from coslice.agent.members import Member
from coslice.errors import ConfigError
from coslice.security.addresses import split_address
from coslice.store.slot import Slot
from coslice.workload.listening import listens, started, tree

log = logging.getLogger(__name__)

T = TypeVar("T")
JOB_SETTINGS = ("url", "engine")
ENGINES = ("", "vllm", "sglang")


def make(node: NodeContext, settings: Mapping[str, object]) -> "AppEndpointBackend":
    """The entry point. Settings are those of ``EngineSettings``; raises ``ConfigError``."""
    positive = ("move_timeout", "probe_timeout")
    chosen = settings_of("app_endpoint", EngineSettings, settings, positive=positive)
    try:
        for address in chosen.allow.split():
            split_address(address, example="10.0.0.7:8000")
    except ConfigError as error:
        raise ConfigError(f"backend app_endpoint: allow: {error}") from None
    ledger = Ledger(Slot(node.store, KEY, CODEC, node.found.get(KEY)))
    return AppEndpointBackend(ledger, settings=chosen, measure={"cuda": DeviceMeasure(node.surveyor)})


class AppEndpointBackend(Defaults):
    """A job names its engines in its backend: ``app_endpoint:url=http://127.0.0.1:8000,engine=vllm``; more
    than one address with spaces between them, ``engine`` only where it cannot be found out.

    ``measure`` by kind of device (``host``, ``cuda``). Without one for a device its engines cannot be moved.
    """

    def __init__(
        self,
        ledger: Ledger | None = None,
        *,
        settings: EngineSettings | None = None,
        measure: Mapping[str, Measure] | None = None,
    ) -> None:
        self._ledger = ledger or Ledger()
        self._settings = settings or EngineSettings()
        self._allow = tuple(self._settings.allow.split())
        self._measure: dict[str, Measure] = {"host": HostMeasure(), **(measure or {})}
        self._engines: dict[str, Engine] = {}
        self._running: set[asyncio.Task[Any]] = set()

    def capabilities(self) -> Capabilities:
        return Capabilities(name="app_endpoint", parts=True, modes=("offload", "discard"))

    def check(self, settings: Mapping[str, str]) -> None:
        if unknown := sorted(set(settings) - set(JOB_SETTINGS)):
            raise ConfigError(f"backend app_endpoint: a job sets url and engine, not {', '.join(unknown)}")
        if not settings.get("url", "").split():
            raise ConfigError("backend app_endpoint: which engine? Give url=http://127.0.0.1:8000")
        for url in settings["url"].split():
            allowed_endpoint(url, allow=self._allow)
        if settings.get("engine", "") not in ENGINES:
            raise ConfigError(f"backend app_endpoint: engine {settings['engine']!r} is not vllm or sglang")
        load_httpx()

    def deadline(self, size: int) -> float:
        """Drained, told, watched for a while longer, measured, and on a failure all of it back again."""
        rules = self._settings
        once = rules.move_timeout + rules.late + rules.probe_timeout
        return rules.section_wait + rules.settle + rules.probe_timeout + 2 * once

    def holds(self, members: Sequence[Member]) -> bool:
        return any(
            entry.phase is not Phase.AWAKE and started(entry.pid) == entry.started
            for member in members
            for entry in self._known(member).values()
        )

    async def start(self) -> None:
        """Engines that were told something and whose answer the last agent did not live to hear are looked
        at with their next move."""
        for key in self._ledger.ended():
            await self._ledger.drop(key)

    async def snapshot(
        self, members: Sequence[Member], *, op: str, mode: str = "offload", tags: Sequence[str] = ()
    ) -> Snapshotted:
        targets = await self._targets(members)
        return await self._whole(self._members_out(members, targets, mode, tags))

    async def restore(self, members: Sequence[Member], *, op: str) -> Restored:
        targets = await self._targets(members)
        return await self._whole(self._members_back(members, targets))

    async def probe(self, members: Sequence[Member]) -> Presence:
        """By the ledger and by measurement. Tells each member whether it is parked."""
        targets = await self._targets(members)
        used = await self._mark(members, targets)
        parked = sum(member.parked for member in members)
        return Presence(live=len(members) - parked, parked=parked, device_bytes=used)

    async def retire(self, members: Sequence[Member]) -> Sequence[ProcessRef]:
        """The engine's own processes: whoever registered may not be their parent for long."""
        engines = {entry.pid: entry.started for m in members for entry in self._known(m).values()}
        try:
            engines |= {target.pid: target.started for target in await self._targets(members)}
        except MoveError as error:
            log.debug("%s", error)  # it may have ended, or be another's by now
        pids = {pid for engine, at in engines.items() if started(engine) == at for pid in tree(engine)}
        pids -= {member.pid for member in members}
        return tuple(ProcessRef(pid, at) for pid in sorted(pids) if (at := started(pid)) is not None)

    async def close(self) -> None:
        """What is under way goes on to its end for a while: a request that was sent cannot be called back."""
        if self._running:
            await asyncio.wait(self._running, timeout=self._settings.section_wait)
        for task in tuple(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for engine in self._engines.values():
            await engine.close()
        self._engines.clear()

    # ── members and their engines ──────────────────────────────────────────

    def _known(self, member: Member) -> dict[str, Entry]:
        return self._ledger.under(_prefix(member))

    async def _members_out(
        self, members: Sequence[Member], targets: Sequence[Target], mode: str, tags: Sequence[str]
    ) -> Snapshotted:
        engines = [self._engine(target) for target in targets]
        done = await self._out(engines, tuple(tags), discard=mode == "discard")
        await self._mark(members, targets)
        return done

    async def _members_back(self, members: Sequence[Member], targets: Sequence[Target]) -> Restored:
        try:
            return await self._back([self._engine(target) for target in targets])
        finally:
            for member in members:
                member.parked = self.holds([member])

    async def _mark(self, members: Sequence[Member], targets: Sequence[Target]) -> int:
        """What the engines use, also by member."""
        total = 0
        for member in members:
            engines = [self._engine(t) for t in targets if t.key.startswith(_prefix(member))]
            used = sum([await engine.used() for engine in engines])
            member.parked = any(engine.parked for engine in engines)
            member.residual = used if member.parked else 0
            total += used
        return total

    async def _targets(self, members: Sequence[Member]) -> list[Target]:
        """The engines of these members; raises ``MoveError`` where one cannot be found.

        What sleeps is known from the ledger, even of a member that has not come back to a new agent yet.
        """
        found: list[Target] = []
        for member in members:
            asleep = [entry for entry in self._known(member).values() if entry.phase is not Phase.AWAKE]
            for entry in asleep:
                if started(entry.pid) != entry.started:
                    raise MoveError(
                        f"process {entry.pid}, the engine of {member.job} at {entry.url}, ended in its "
                        "sleep: what it held is lost",
                        lost=True,
                        pid=entry.pid,
                    )
            if asleep and not member.backend:
                found += [_target(member, entry.url, entry.pid, entry.engine) for entry in asleep]
                continue
            settings = parse_backend(member.backend).settings if member.backend else {}
            try:
                self.check(settings)
            except ConfigError as error:
                raise MoveError(str(error), pid=member.pid) from None
            for url in settings["url"].split():
                pid = await asyncio.to_thread(self._listener, members, url)
                found.append(_target(member, url, pid, settings.get("engine", "")))
        return list({target.url: target for target in reversed(found)}.values())[::-1]

    def _listener(self, members: Sequence[Member], url: str) -> int:
        """The process that listens there, if it is one of the job's: a router or another's server is not."""
        endpoint = allowed_endpoint(url, allow=self._allow)
        for member in members:
            for pid in tree(member.pid):
                if listens((pid,), endpoint.port):
                    return pid
        processes = ", ".join(str(member.pid) for member in members)
        raise MoveError(
            f"no process of {members[0].job} ({processes} and below) listens on port {endpoint.port}: name "
            "the engine's own address, not that of a router in front of it, and start the engine by the "
            "process that registers it",
            pid=members[0].pid,
        )

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
            left = sum([rest for _, rest in sizes]) + sum([await engine.used() for engine in resting])
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
            )
        except ConfigError as error:
            raise MoveError(str(error), pid=target.pid) from None
        self._engines[target.key] = engine
        return engine


def _prefix(member: Member) -> str:
    return f"{member.buffer}#"


def _target(member: Member, url: str, pid: int, engine: str) -> Target:
    at = started(pid)
    if at is None:
        raise MoveError(f"process {pid}, the engine of {member.job}, has ended", lost=True, pid=pid)
    return Target(
        key=f"{_prefix(member)}{url}",
        job=member.job,
        url=url,
        engine=engine,
        pid=pid,
        started=at,
        device=member.device,
        declared=member.state_bytes,
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
