"""The ``cuda`` backend: whole processes, frozen and thawed by the CUDA driver. Jobs need no code for it.

A snapshot locks all processes of the job, then checkpoints them: the driver copies their device memory into
host memory of theirs and frees the device. On any failure every process goes back to where it was. A restore
happens once and only into room that was measured, because the driver destroys a process that finds none.
"""

import asyncio
import importlib.util
import logging
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from coslice.agent.backends import cuda_checks as checks
from coslice.agent.backends.base import (
    Capabilities,
    MoveError,
    NodeContext,
    Presence,
    ProcessRef,
    Restored,
    Snapshotted,
)
from coslice.agent.backends.cuda_binary import CheckpointProgram
from coslice.agent.backends.cuda_calls import Calls, Pair, State, UsableError
from coslice.agent.backends.cuda_moves import Failure, Moves
from coslice.agent.backends.cuda_pool import HelperPool
from coslice.agent.backends.cuda_settings import Settings, check_bindings, read_pairs, read_settings
from coslice.agent.backends.cuda_targets import find_targets
from coslice.agent.backends.process_backend import ProcessBackend
from coslice.agent.backends.process_ledger import Entry, Key, Target
from coslice.agent.discovery import procfs
from coslice.agent.discovery.survey import Survey
from coslice.agent.members import Member
from coslice.errors import ConfigError
from coslice.sizes import format_size

log = logging.getLogger(__name__)

SETTLE_STEP = 0.02
RETIRE_LOCK, RETIRE_SECONDS = 5.0, 20.0
"""Who is to be killed is asked to leave the device first, for so long."""


class CudaBackend(ProcessBackend):
    def __init__(
        self, node: NodeContext, settings: Settings, calls: Calls, pairs: tuple[Pair, ...] = ()
    ) -> None:
        super().__init__("cuda", node, patience=settings.lock_timeout)
        self.settings = settings
        self._calls, self._pairs = calls, pairs
        self._devices: dict[str, asyncio.Lock] = {}
        self.driver_seconds = 0.0
        """Of all moves so far: time in which at least one call was in the driver."""
        self._sure: set[Key] = set()
        """Jobs that this instance has parked whole, so that their states need not be asked for."""

    def capabilities(self) -> Capabilities:
        return Capabilities(name="cuda", whole_process=True)

    def deadline(self, size: int) -> float:
        """Of a whole operation: lock, copy, unlock."""
        rules = self.settings
        return rules.lock_timeout + 2 * self._call_deadline(size) + self._node.config.section_wait

    def out_of_reach(self, pid: int) -> bool:
        """Does a driver call for it still hang?"""
        return self._calls.hanging(pid)

    # ── life ───────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """What the last agent instance left locked is let go; what it left checkpointed stays parked."""
        for entry in self._ledger:
            alive = tuple(target for target in entry.targets if target.alive)
            if not alive:
                await self._ledger.drop(entry.key)
                continue
            if self._wedged(alive):  # a call of the last instance: parked is what asks for a restore first
                await self._ledger.step(entry, "parked")
                continue
            moves = self._moves()
            states = await moves.states(alive)
            locked = [target for target in alive if states[target.pid] is State.LOCKED]
            failures = await moves.unlock(locked)
            for failure in failures:
                log.error("job %s was left locked: %s", entry.job, failure.text)
            if any(state is State.CHECKPOINTED for state in states.values()):
                await self._ledger.step(entry, "parked")
            elif entry.fault == "" and not failures:
                await self._ledger.drop(entry.key)

    async def close(self) -> None:
        await super().close()
        await self._calls.close()

    # ── the protocol ───────────────────────────────────────────────────────

    async def probe(self, members: Sequence[Member]) -> Presence:
        entry = self._entry(members)
        parked = entry.targets if entry is not None and entry.phase != "leaving" else ()
        survey = await self._node.surveyor.survey()
        if survey.error:
            raise MoveError(f"what is on the devices is not known: {survey.error}")
        moves = self._moves()
        live = await find_targets(members, survey, moves, ours=self._ours())
        states = await moves.states(target for target in parked if target.alive)
        away = sum(state is State.CHECKPOINTED for state in states.values())
        return Presence(live=len(live), parked=away, device_bytes=sum(target.bytes for target in live))

    async def snapshot(
        self, members: Sequence[Member], *, op: str, mode: str = "offload", tags: Sequence[str] = ()
    ) -> Snapshotted:
        self._check_whole(mode, tags)
        return await self._whole(members, lambda: self._snapshot(members, op))

    async def restore(self, members: Sequence[Member], *, op: str) -> Restored:
        return await self._whole(members, lambda: self._restore(members, op))

    async def retire(self, members: Sequence[Member]) -> Sequence[ProcessRef]:
        """Ending a live process that was once restored was seen to hang a whole node (cuda-checkpoint issue
        53); ending it checkpointed was safe."""
        entry = self._entry(members)
        survey = await self._node.surveyor.survey()
        moves = self._moves(lock_timeout=min(RETIRE_LOCK, self.settings.lock_timeout))
        live = [] if survey.error else await find_targets(members, survey, moves, ours=self._ours())
        within_reach = [target for target in live if not self._calls.hanging(target.pid)]
        try:
            async with asyncio.timeout(RETIRE_SECONDS):
                if not await moves.lock(within_reach):
                    await moves.checkpoint(within_reach)
        except (TimeoutError, UsableError) as error:
            log.warning("job %s is ended while it is on the device: %r", members[0].job, error)
        parked = entry.targets if entry is not None else ()
        known = {member.pid for member in members}
        return tuple(
            ProcessRef(target.pid, target.started)
            for target in {target.pid: target for target in (*live, *parked)}.values()
            if target.pid not in known and target.alive
        )

    # ── device → host ──────────────────────────────────────────────────────

    async def _snapshot(self, members: Sequence[Member], op: str) -> Snapshotted:
        began = time.monotonic()
        survey = await self._node.surveyor.survey()
        checks.check_driver(survey, program=isinstance(self._calls, CheckpointProgram))
        moves = self._moves()
        entry = self._entry(members)
        before = await self._parked_already(entry, moves)
        live = await find_targets(members, survey, moves, ours=self._ours())
        live = [target for target in live if target.pid not in {each.pid for each in before}]
        if not live:
            if not before:
                await self._none_hidden(survey)
            self._mark(members, parked=bool(before))
            size = sum(target.bytes for target in before)
            return Snapshotted(bytes=size, residual=0, seconds=time.monotonic() - began)
        self._refuse_wedged(live)
        self._check(live, survey)
        await self._warm(len(live))
        ours = set() if entry is None else {target.pid for target in entry.targets}
        others = [target for target in live if target.pid not in ours]
        checks.check_not_locked(others, await moves.states(others))
        async with self._hooks.around(members, op):
            checks.check_communicators(live, survey)
            entry = self._new_entry(members, op, (*before, *live))
            await self._freeze(entry, live, moves, members)
        self._mark(members, parked=True)
        self.driver_seconds += moves.driver_seconds
        return Snapshotted(bytes=entry.bytes, residual=0, seconds=time.monotonic() - began)

    async def _none_hidden(self, survey: Survey) -> None:
        """Nothing of the job was found. Is that so? A process that ended is still listed for a moment, or for
        good: where every process can be seen, one that cannot is none."""
        if procfs.sees_every_process():
            return
        deadline = time.monotonic() + self.settings.settle
        while why := checks.hidden(survey):
            if time.monotonic() >= deadline:
                raise MoveError(why)
            await asyncio.sleep(SETTLE_STEP)  # NVML tells nobody when a process has left the device
            survey = await self._node.surveyor.survey()

    async def _freeze(
        self, entry: Entry, live: Sequence[Target], moves: Moves, members: Sequence[Member]
    ) -> None:
        """Raises ``MoveError``, or whatever broke, with everything back where it was."""
        try:
            entry = await self._ledger.put(entry)
            failures = await moves.lock(live)
            if failures:
                raise _error(entry, failures, busy=all(failure.busy for failure in failures))
            failures = await moves.checkpoint(live) or await self._still_there(members, live, moves)
            if failures:
                raise _error(entry, failures)
            await self._ledger.step(entry, "parked")
            self._sure.add(entry.key)
        except BaseException:
            await self._undo(entry, live, moves)
            raise

    async def _still_there(
        self, members: Sequence[Member], live: Sequence[Target], moves: Moves
    ) -> list[Failure]:
        """A success is believed when the devices are measured to be free of the job."""
        pids, deadline = {target.pid for target in live}, time.monotonic() + self.settings.settle
        while True:
            survey = await self._node.surveyor.survey()
            usage = survey.usage()
            left = [
                Failure(pid=pid, text=f"process {pid} still has {format_size(survey.bytes_of([pid]))} on it")
                for pid in sorted(pids & usage.keys())
            ]
            if survey.error:
                left = [Failure(pid=0, text=f"whether the device is free is not known: {survey.error}")]
            if not left:
                break
            if time.monotonic() >= deadline:
                return left
            await asyncio.sleep(SETTLE_STEP)  # NVML tells nobody when memory has become free
        late = await find_targets(members, survey, moves, ours=self._ours())
        return [
            Failure(pid=target.pid, text=f"process {target.pid} came to the device meanwhile", busy=True)
            for target in late
            if target.pid not in pids
        ]

    async def _undo(self, entry: Entry, live: Sequence[Target], moves: Moves) -> None:
        """Every process back to running, by what the driver says of each."""
        hanging = self._wedged(live)
        states = await moves.states(target for target in live if target not in hanging)
        away = [target for target in live if states.get(target.pid) is State.CHECKPOINTED]
        stay = await self._bring_back(entry, away, moves) if away else set[int]()
        locked = [
            target
            for target in live
            if states.get(target.pid) in (State.LOCKED, State.CHECKPOINTED) and target.pid not in stay
        ]
        failures = await moves.unlock(locked)
        for failure in failures:  # it is in the ledger that it was we who locked it
            log.error("job %s: not unlocked: %s", entry.job, failure.text)
        if not hanging and not stay and not failures:
            await self._ledger.drop(entry.key)

    async def _bring_back(self, entry: Entry, away: Sequence[Target], moves: Moves) -> set[int]:
        """Undo a checkpoint; returns the pids that stay checkpointed. Their entry in the ledger stays too."""
        need = replace(entry, targets=tuple(away)).per_device()
        async with self._exclusive(need):
            survey = await self._node.surveyor.survey()
            lacking = survey.error or checks.check_room(need, survey, margin=0)
            if lacking:  # somebody took the room: it stays in host memory, whole, until there is some
                log.error("job %s stays in host memory: %s", entry.job, lacking)
                await self._ledger.step(entry, "parked")
                return {target.pid for target in away}
            failures = await moves.restore(away, pairs=(), untouched=self._untouched)
        if failures:
            why = "; ".join(failure.text for failure in failures)
            log.error("job %s was not brought back: %s", entry.job, why)
            lost = any(failure.final for failure in failures)
            await self._ledger.step(entry, "parked", fault=why if lost else "")
        return {failure.pid for failure in failures}

    # ── host → device ──────────────────────────────────────────────────────

    async def _restore(self, members: Sequence[Member], op: str) -> Restored:
        began = time.monotonic()
        entry, size = self._entry(members), 0
        if entry is not None:
            if entry.fault:
                raise MoveError(f"the state of {entry.job} is lost: {entry.fault}", lost=True)
            size = await self._thaw(entry, op)
        await self._hooks.back(members, op)
        self._mark(members, parked=False)
        return Restored(bytes=size, seconds=time.monotonic() - began)

    async def _thaw(self, entry: Entry, op: str) -> int:
        """Bytes that came back; raises ``MoveError``."""
        targets = tuple(target for target in entry.targets if target.alive)
        if len(targets) < len(entry.targets):  # the rest cannot go on without them
            gone = ", ".join(str(target.pid) for target in entry.targets if target not in targets)
            raise MoveError(f"process {gone} of {entry.job} ended while its state was parked", lost=True)
        self._refuse_wedged(targets)
        await self._warm(len(targets))
        moves = self._moves()
        sure = entry.key in self._sure
        self._sure.discard(entry.key)
        states = {t.pid: State.CHECKPOINTED for t in targets} if sure else await moves.states(targets)
        for target in targets:
            if states[target.pid] in (None, State.FAILED):
                raise MoveError(
                    f"the driver says of process {target.pid} of {entry.job} that it "
                    + ("has failed" if states[target.pid] else "cannot tell its state"),
                    lost=states[target.pid] is State.FAILED,
                    pid=target.pid,
                )
        away = [target for target in targets if states[target.pid] is State.CHECKPOINTED]
        need = replace(entry, targets=tuple(away)).per_device()
        async with self._exclusive(need):
            survey = await self._await_room(entry, self._mapped(need))
            pairs = checks.check_remap(self._pairs, survey)
            entry = await self._ledger.step(entry, "returning", op=op)
            failures = await moves.restore(away, pairs=pairs, untouched=self._untouched)
        failed = {failure.pid for failure in failures}
        locked = [t for t in targets if t.pid not in failed and states[t.pid] is not State.RUNNING]
        failures += await moves.unlock(locked)
        self.driver_seconds += moves.driver_seconds
        if failures:
            why = "; ".join(failure.text for failure in failures)
            lost = any(failure.final for failure in failures)
            await self._ledger.step(entry, "parked", fault=why if lost else "")
            raise MoveError(
                f"the state of {entry.job} did not come back: {why}", lost=lost, pid=failures[0].pid
            )
        await self._ledger.drop(entry.key)
        return sum(target.bytes for target in away)

    async def _await_room(self, entry: Entry, need: Mapping[str, int]) -> Survey:
        """Measured, not believed: a restore that runs out of memory destroys the process for good."""
        deadline = time.monotonic() + self.settings.settle
        while True:
            survey = await self._node.surveyor.survey()
            checks.check_driver(survey, program=isinstance(self._calls, CheckpointProgram))
            lacking = checks.check_room(need, survey, margin=self.settings.margin)
            if not lacking:
                return survey
            if time.monotonic() >= deadline:
                raise MoveError(
                    f"{entry.job} is not restored, which would destroy it: {lacking}. End what is in the way"
                )
            await asyncio.sleep(SETTLE_STEP)  # NVML tells nobody when memory has become free

    async def _untouched(self, target: Target) -> bool:
        survey = await self._node.surveyor.survey()
        return not survey.error and target.pid not in survey.usage()

    @asynccontextmanager
    async def _exclusive(self, need: Mapping[str, int]) -> AsyncIterator[None]:
        """No second restore on these devices between the measuring and the end of the restore."""
        async with AsyncExitStack() as stack:
            for uuid in sorted({*need, *self._mapped(need)}):
                await stack.enter_async_context(self._devices.setdefault(uuid, asyncio.Lock()))
            yield

    def _mapped(self, need: Mapping[str, int]) -> dict[str, int]:
        new = dict(self._pairs)
        return {new.get(uuid, uuid): size for uuid, size in need.items()}

    # ── small parts ────────────────────────────────────────────────────────

    async def _parked_already(self, entry: Entry | None, moves: Moves) -> tuple[Target, ...]:
        """Of an earlier, perhaps half-done, snapshot of this very start of the job."""
        if entry is None:
            return ()
        states = await moves.states(target for target in entry.targets if target.alive)
        return tuple(t for t in entry.targets if states.get(t.pid) is State.CHECKPOINTED)

    async def _warm(self, calls: int) -> None:
        try:
            await self._calls.warm(calls)
        except UsableError as error:
            raise MoveError(str(error)) from None

    def _check(self, live: Sequence[Target], survey: Survey) -> None:
        checks.check_remap(self._pairs, survey)
        checks.check_processes(live, survey)
        parked = sum(entry.bytes for entry in self._ledger)
        left = self._node.config.host_budget - self._node.buffers.used - parked
        checks.check_host_memory(live, budget_left=left)

    def _refuse_wedged(self, targets: Sequence[Target]) -> None:
        if wedged := self._wedged(targets):
            raise MoveError(
                f"an earlier driver call for process {wedged[0].pid} has not come back: the process is out "
                "of reach until it does",
                pid=wedged[0].pid,
            )

    def _wedged(self, targets: Sequence[Target]) -> list[Target]:
        return [target for target in targets if self._calls.hanging(target.pid)]

    def _moves(self, *, lock_timeout: float | None = None) -> Moves:
        timeout = self.settings.lock_timeout if lock_timeout is None else lock_timeout
        return Moves(
            self._calls, deadline=self._call_deadline, lock_timeout=timeout, tries=self.settings.tries
        )

    def _call_deadline(self, size: int) -> float:
        return self.settings.base_seconds + size / self.settings.slowest

    def _ours(self) -> frozenset[int]:
        helpers = self._calls.pids if isinstance(self._calls, HelperPool) else frozenset[int]()
        return helpers | {self._node.surveyor.pid}


def _error(entry: Entry, failures: Sequence[Failure], *, busy: bool = False) -> MoveError:
    text = "; ".join(failure.text for failure in failures)
    return MoveError(f"{entry.job} was not moved out: {text}", busy=busy, pid=failures[0].pid)


def make(node: NodeContext, settings: Mapping[str, object]) -> CudaBackend:
    """The entry point. Raises ``ConfigError`` for settings that are unknown or make no sense."""
    chosen = read_settings(settings)
    program = shutil.which(chosen.program)
    if chosen.calls == "program" and program is None:
        raise ConfigError(f"backend cuda: program {chosen.program!r} is not found; give its path")
    calls: Calls
    if program is not None and (chosen.calls == "program" or (chosen.calls == "auto" and not _bindings())):
        calls = CheckpointProgram(Path(program), Path(node.config.runtime_dir) / "calls")
    else:
        calls = HelperPool(Path(node.config.runtime_dir) / "calls")
    pairs = read_pairs(chosen.remap)
    if pairs and isinstance(calls, HelperPool):
        check_bindings()
    return CudaBackend(node, chosen, calls, pairs)


def _bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ImportError:
        return False
