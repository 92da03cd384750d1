"""One engine on its way to sleep and back: drained, told, measured, written down, and proved by generating.

The backend calls the steps in their order, for all engines of a job side by side; each step either holds or
raises ``MoveError``. What was asked is never asked again before it is known what came of it.
"""

import asyncio
import logging
import time
from collections.abc import Collection

from coslice.agent.backends import app_endpoint_probe as probing
from coslice.agent.backends.app_endpoint_dialects import KV_CACHE, WEIGHTS, Dialect, Refused, Sglang, detect
from coslice.agent.backends.app_endpoint_http import EngineHttp, NoAnswer
from coslice.agent.backends.app_endpoint_memory import (
    ENOUGH,
    Measure,
    allocator_refusal,
    environ,
    host_room,
    must_leave,
)
from coslice.agent.backends.app_endpoint_probe import Unwell
from coslice.agent.backends.app_endpoint_settings import EngineSettings, Target
from coslice.agent.backends.base import MoveError
from coslice.agent.endpoints import Endpoint
from coslice.agent.endpoints_ledger import Entry, Golden, Ledger, Phase
from coslice.sizes import format_size
from coslice.workload.listening import listens, started, tree

log = logging.getLogger(__name__)

UNCHANGED = 0.05
"""Memory that moved by less of what should move has not begun to."""
LOOK_AGAIN = 0.05


class Engine:
    def __init__(
        self,
        target: Target,
        endpoint: Endpoint,
        *,
        settings: EngineSettings,
        ledger: Ledger,
        measure: Measure,
    ) -> None:
        self.target, self.endpoint = target, endpoint
        self.lock = asyncio.Lock()
        self._settings, self._ledger, self._measure = settings, ledger, measure
        self._environ = environ(tree(target.pid))
        self.http = EngineHttp(endpoint, key=self._environ.get("VLLM_API_KEY", ""))
        self._dialect: Dialect | None = None
        self._tags: tuple[str, ...] = ()
        self._discard = self._quiet = False
        self._who = f"engine of {target.job} at {endpoint.base} (pid {target.pid})"

    @property
    def entry(self) -> Entry:
        found = self._ledger.get(self.target.key)
        if found is not None and found.of(self.target.pid, self.target.started, self.target.url):
            return found
        return Entry(
            url=self.target.url,
            engine=self.target.engine,
            pid=self.target.pid,
            started=self.target.started,
        )

    @property
    def parked(self) -> bool:
        return self.entry.phase not in (Phase.AWAKE, Phase.LEAVING)

    def sleeps(self, tags: Collection[str]) -> bool:
        """Is there nothing left to move of these regions (none named: all)?"""
        wanted = set(tags) or {WEIGHTS, KV_CACHE}
        return self.entry.phase is Phase.ASLEEP and wanted <= set(self.entry.tags)

    async def used(self) -> int:
        """Bytes on the device now. Raises ``MoveError``: it has ended, or nobody can tell."""
        pids = tree(self.target.pid)
        if not pids:
            raise self._error("has ended", gone=True)
        used = await self._measure.used(pids)
        if used is None:
            raise self._error(
                "uses a device whose memory cannot be measured from here, and its own word is not enough: "
                "install nvidia-ml-py for the agent"
            )
        return used

    # ── out ────────────────────────────────────────────────────────────────

    async def prepare(self, tags: Collection[str], *, discard: bool) -> None:
        """All that can be checked, and the engine drained. Nothing has moved if this raises."""
        await self._answer_for()
        entry = self.entry
        if entry.phase is Phase.LOST:
            raise self._error(entry.reason, lost=True)
        if 0 < self._settings.max_cycles <= entry.cycles:
            raise self._error(f"has slept {entry.cycles} times, which is its limit: restart it")
        dialect = await self._speak()
        self._discard = discard
        self._tags = tuple(tag for tag in await dialect.check(tags, discard=discard) if tag not in entry.tags)
        if isinstance(dialect, Sglang) and (refusal := allocator_refusal(self._environ)):
            raise self._error(refusal)
        used = await self.used()
        self._check_host(used, entry)
        golden = entry.golden if entry.tags else await self._golden()
        self._quiet = True
        await dialect.quiet(self._settings.section_wait)
        used = await self.used()
        kept = entry.awake_bytes if entry.tags else used
        await self._put(phase=entry.phase, engine=dialect.name, golden=golden, awake_bytes=kept)

    async def leave(self) -> None:
        dialect, entry = await self._speak(), self.entry
        await self._put(phase=Phase.LEAVING, tags=(*entry.tags, *self._tags), discard=self._discard)
        try:
            await self._tell_to_sleep(dialect)
        except Refused as refusal:
            raise self._error(f"did not go to sleep: {refusal}") from None
        except NoAnswer as error:
            if not error.sent:
                await self._put(phase=entry.phase, tags=entry.tags)
                raise self._error(f"was not told to sleep: {error}") from None
            # It may sleep all the same: a slow engine is not a broken one.
            if not error.late or not await self._has_fallen(await self._idle(dialect)):
                raise self._error(f"did not go to sleep: {error}") from None
        await self._put(phase=Phase.ASLEEP)

    async def left(self) -> tuple[int, int]:
        """(freed, what remains) in bytes, once the memory has really fallen and the engine still lives."""
        fallen = await self._has_fallen(self._settings.settle)
        used = await self._still(self._settings.settle) if fallen else await self.used()
        entry, need = self.entry, self._need()
        if not fallen:
            raise self._error(
                f"answered that it sleeps, and its memory fell by {format_size(entry.awake_bytes - used)} of "
                f"{format_size(entry.awake_bytes)}; {format_size(need)} must leave{self._why_not()}"
            )
        try:
            alive = await (await self._speak()).alive()
        except NoAnswer as error:
            raise self._error(f"does not answer after it went to sleep: {error}") from None
        if not alive:
            raise self._error("died when it went to sleep, although it answered success")
        partial = set(entry.tags) != {WEIGHTS, KV_CACHE}
        freed = entry.awake_bytes - used
        asleep = entry.asleep_bytes if partial else used
        await self._put(cycles=entry.cycles + 1, asleep_bytes=asleep, freed=freed)
        return freed, used

    async def undo(self) -> None:
        """As it was before: awake and serving. Raises ``MoveError`` (lost) if it is neither any more."""
        if not self._quiet:
            return
        entry = self.entry
        try:
            dialect = await self._speak()
            if entry.phase is Phase.AWAKE:  # not touched yet
                self._quiet = False
                await dialect.serve_on()
                return
            if entry.phase is Phase.LEAVING:
                entry = await self._settled(entry)
            if entry.tags and entry.phase is Phase.ASLEEP:
                await self._put(phase=Phase.RETURNING)
                await dialect.wake(entry.tags, discard=entry.discard, timeout=self._settings.move_timeout)
            await self._well(dialect, entry)
        except (Refused, NoAnswer, Unwell, MoveError) as error:
            raise await self._lost(f"could not be woken again: {error}") from None
        await self._put(phase=Phase.AWAKE, tags=(), reason="")

    # ── back ───────────────────────────────────────────────────────────────

    async def come_back(self) -> int:
        """Bytes that returned. Raises ``MoveError``; lost means that only a restart of the engine helps."""
        entry = self.entry
        if entry.phase is Phase.LOST:
            raise self._error(entry.reason, lost=True)
        await self._answer_for()
        try:
            dialect = await self._speak()
        except (NoAnswer, MoveError) as error:
            raise self._error(f"cannot be asked to wake: {error}") from None
        if entry.phase in (Phase.LEAVING, Phase.RETURNING):
            entry = await self._settled(entry)
        before = await self.used()
        if entry.phase is Phase.ASLEEP:
            await self._check_room(entry, before)
            await self._put(phase=Phase.RETURNING)
            try:
                await self._tell_to_wake(dialect, entry, before)
            except NoAnswer as error:
                if not error.sent:
                    await self._put(phase=Phase.ASLEEP)
                    raise self._error(f"was not told to wake: {error}") from None
                if not error.late or not await self._has_risen(entry, before, await self._idle(dialect)):
                    raise await self._lost(f"did not wake: {error}") from None
            except Refused as refusal:
                raise await self._lost(f"did not wake: {refusal}") from None
        try:
            await self._well(dialect, entry)
        except (Refused, NoAnswer, Unwell) as error:
            raise await self._lost(f"woke, but {error}") from None
        await self._put(phase=Phase.AWAKE, tags=(), reason="", freed=0)
        return entry.freed or max(0, entry.awake_bytes - before)

    async def settle(self) -> None:
        """After a crash of the agent: find out what came of the last request, if one was open."""
        entry = self.entry
        if entry.phase in (Phase.LEAVING, Phase.RETURNING):
            await self._settled(entry)

    async def close(self) -> None:
        await self.http.close()

    # ── parts ──────────────────────────────────────────────────────────────

    async def _tell_to_sleep(self, dialect: Dialect) -> None:
        tags, timeout = self._tags, self._settings.move_timeout
        try:
            await dialect.sleep(tags, discard=self._discard, timeout=timeout)
        except Refused as refusal:
            # A busy server answered for the engine: only its memory tells whether the engine heard of it.
            if not refusal.again or await self._has_fallen(1.0):
                if not refusal.again:
                    raise
                return
            if await self._moved() > UNCHANGED:
                raise
            await dialect.sleep(tags, discard=self._discard, timeout=timeout)

    async def _tell_to_wake(self, dialect: Dialect, entry: Entry, before: int) -> None:
        timeout = self._settings.move_timeout
        try:
            await dialect.wake(entry.tags, discard=entry.discard, timeout=timeout)
        except Refused as refusal:
            if not refusal.again:
                raise
            if await self._has_risen(entry, before, 1.0):
                return
            if await self.used() - before > UNCHANGED * (entry.awake_bytes - before):
                raise
            await dialect.wake(entry.tags, discard=entry.discard, timeout=timeout)

    async def _well(self, dialect: Dialect, entry: Entry) -> None:
        """Serving, awake by its own word, and the same as before. Raises what says why not."""
        await dialect.serve_on()
        self._quiet = False
        if await dialect.awake() is False:
            raise Unwell("it says that it still sleeps")
        if entry.tags:
            await dialect.refresh()
        after = await probing.generate(self.http, timeout=self._settings.probe_timeout)
        golden = entry.golden
        if golden is None or entry.discard:  # dropped weights come from elsewhere, perhaps later
            return
        probing.compare(golden, after)
        if golden.checksums:
            timeout = self._settings.move_timeout
            await probing.compare_checksums(self.http, golden.checksums, timeout=timeout)

    async def _golden(self) -> Golden:
        try:
            golden = await probing.generate(self.http, timeout=self._settings.probe_timeout)
            if self._settings.checksum:
                sums = await probing.checksums(self.http, timeout=self._settings.move_timeout)
                golden = Golden(model=golden.model, text=golden.text, top=golden.top, checksums=sums)
        except (Unwell, NoAnswer) as error:
            raise self._error(f"is not well before it sleeps: {error}") from None
        return golden

    async def _settled(self, entry: Entry) -> Entry:
        """The phase that the memory shows, once it shows one; raises ``MoveError`` (lost).

        Polls: an engine that we lost touch with may be moving still, and nobody tells.
        """
        deadline = time.monotonic() + self._settings.move_timeout
        span = self._need() or 1
        await self._idle(await self._speak())
        while True:
            fallen = (entry.awake_bytes - await self.used()) / span
            if fallen >= 1.0:
                return await self._put(phase=Phase.ASLEEP)
            if fallen <= UNCHANGED:
                return await self._put(phase=Phase.AWAKE, tags=(), reason="")
            if time.monotonic() >= deadline:
                raise await self._lost(f"has {fallen:.0%} of its memory freed, neither asleep nor awake")
            await asyncio.sleep(LOOK_AGAIN)

    async def _idle(self, dialect: Dialect) -> float:
        """Waits for the end of a request that we lost sight of; seconds that memory may take to follow."""
        try:
            await dialect.idle(timeout=self._settings.late)
        except NoAnswer:
            return 0.0
        return min(1.0, self._settings.settle)

    def _need(self) -> int:
        entry = self.entry
        if set(entry.tags) != {WEIGHTS, KV_CACHE}:  # nobody knows how large one region is
            return max(1 << 20, int(UNCHANGED * entry.awake_bytes))
        return must_leave(
            entry.awake_bytes,
            declared=self.target.declared,
            last_asleep=entry.asleep_bytes,
            device=self.target.device,
            processes=1 if self.target.device == "host" else len(tree(self.target.pid)),
        )

    async def _moved(self) -> float:
        fallen = self.entry.awake_bytes - await self.used()
        return fallen / (self._need() or 1)

    async def _has_fallen(self, seconds: float) -> bool:
        """Polls: neither kernel nor driver tell when memory has become free."""
        deadline = time.monotonic() + seconds
        while await self._moved() < 1.0:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(LOOK_AGAIN)
        return True

    async def _still(self, seconds: float) -> int:
        """What is in use once two measurements agree: enough may be free before all is."""
        deadline = time.monotonic() + seconds
        used = await self.used()
        while time.monotonic() < deadline:
            await asyncio.sleep(LOOK_AGAIN)
            before, used = used, await self.used()
            if used >= before:
                break
        return used

    async def _has_risen(self, entry: Entry, before: int, seconds: float) -> bool:
        """Polls, as ``_has_fallen``."""
        deadline = time.monotonic() + seconds
        wanted = before + ENOUGH * (entry.awake_bytes - before)
        while await self.used() < wanted:
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(LOOK_AGAIN)
        return True

    async def _answer_for(self) -> None:
        """The process is there, and it is the one that listens: not a router, not somebody else's server."""
        target = self.target
        if started(target.pid) != target.started:
            raise self._error("has ended", gone=True)
        if not self.endpoint.loopback:
            return  # the operator allowed this very address
        owns = await asyncio.to_thread(listens, tree(target.pid), self.endpoint.port)
        if owns is False:
            raise self._error(
                f"does not listen on port {self.endpoint.port} itself: name the engine's own address, not "
                "that of a router in front of it, and register the engine's own process"
            )

    async def _speak(self) -> Dialect:
        if self._dialect is None:
            self._dialect = await detect(self.http, self.target.engine or self.entry.engine, self._environ)
        return self._dialect

    def _check_host(self, used: int, entry: Entry) -> None:
        """Weights go to host memory that the engine takes itself, and keeps from the first time on."""
        room = host_room(self.target.pid)
        if not self._discard and entry.cycles == 0 and room < used:
            raise self._error(
                f"uses {format_size(used)} of the device and keeps its weights in host memory while it "
                f"sleeps, of which {format_size(room)} are free: free some, or run fewer jobs",
                no_room=True,
            )

    async def _check_room(self, entry: Entry, before: int) -> None:
        """An engine that runs out of memory while it wakes does not survive it."""
        room, wanted = await self._measure.room(tree(self.target.pid)), entry.awake_bytes - before
        if room is not None and room < wanted:
            raise self._error(
                f"needs {format_size(wanted)} of the device to wake, of which {format_size(room)} are free",
                no_room=True,
            )

    def _why_not(self) -> str:
        entry = self.entry
        if entry.engine == "vllm":
            version = getattr(self._dialect, "version", "")
            known = " (0.14 and 0.15 are known to keep most of it)" if version.startswith("0.1") else ""
            return f"; was it started with --enable-sleep-mode? It is vLLM {version or '?'}{known}"
        preloaded = "torch_memory_saver" in self._environ.get("LD_PRELOAD", "")
        return "" if preloaded else "; no process of it was started with torch_memory_saver in LD_PRELOAD"

    async def _put(self, **values: object) -> Entry:
        entry = self.entry
        fields = {name: getattr(entry, name) for name in entry.__struct_fields__} | values
        return await self._ledger.put(self.target.key, Entry(**fields))

    async def _lost(self, reason: str) -> MoveError:
        await self._put(phase=Phase.LOST, reason=reason)
        return self._error(f"{reason}; restart it", lost=True)

    def _error(
        self, what: str, *, lost: bool = False, gone: bool = False, no_room: bool = False
    ) -> MoveError:
        text = f"the {self._who} {what}"
        return MoveError(text, lost=lost or gone, no_room=no_room, pid=self.target.pid)
