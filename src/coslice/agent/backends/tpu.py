"""The ``tpu`` backend: whole processes of a slice, checkpointed by the TPU runtime through ``tpucheckpoint``.

The tool's contract, as public integrations state it: all processes of a slice in one call, because a restore
is a rendezvous of all of them; a restore is never asked for twice, because a second one puts the runtime out
of order for good; it starts only when every device file can be opened; and a checkpointed process leaves a
lock file behind that would stop the next one.
"""

import asyncio
import contextlib
import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from coslice.agent.backends.base import (
    Capabilities,
    MoveError,
    NodeContext,
    Presence,
    ProcessRef,
    Restored,
    Snapshotted,
)
from coslice.agent.backends.process_backend import ProcessBackend
from coslice.agent.backends.process_guard import guard_of, hold, is_locked
from coslice.agent.backends.process_ledger import Entry, Target
from coslice.agent.backends.settings import settings_of
from coslice.agent.members import Member
from coslice.agent.occupancy import belongs
from coslice.agent.privileged import Ended, run_program
from coslice.agent.processes import start_time

log = logging.getLogger(__name__)

_THREAD = re.compile(rb"^libtpu[0-9a-f]{8}$")
_FAILED = re.compile(r"^tpucheckpoint: pid (\d+): (.*)$", re.MULTILINE)
_PART = "only a part of its processes could be checkpointed, and a slice comes back whole or not at all"
GRACE = 30.0
"""Beyond the tool's own timeout before it counts as hanging."""


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    program: str = "tpucheckpoint"
    checkpoint_seconds: float = 120.0
    restore_seconds: float = 600.0
    """A restore waits for the processes of the slice's other nodes."""
    gate_seconds: float = 600.0
    """How long device files may take to be free before a restore."""
    devices: str = "/dev/vfio"
    lock_file: str = "/tmp/libtpu_lockfile"
    """In the mount namespace of the job."""


def make(node: NodeContext, settings: Mapping[str, object]) -> "TpuBackend":
    """The entry point. Raises ``ConfigError``."""
    positive = ("checkpoint_seconds", "restore_seconds", "gate_seconds")
    return TpuBackend(node, settings_of("tpu", Settings, settings, positive=positive))


class TpuBackend(ProcessBackend):
    def __init__(self, node: NodeContext, settings: Settings) -> None:
        super().__init__("tpu", node, patience=GRACE)
        self.settings = settings
        self._calls = Path(node.config.runtime_dir) / "calls"

    def capabilities(self) -> Capabilities:
        return Capabilities(name="tpu", whole_process=True, collective=True)

    def deadline(self, size: int) -> float:
        rules = self.settings
        return max(2 * rules.checkpoint_seconds, rules.gate_seconds + rules.restore_seconds) + 2 * GRACE

    async def start(self) -> None:
        """What the last agent left half done is looked at. While a tool that it started still works nobody
        can tell, and the job counts as parked, so that a restore is what is asked for first."""
        for entry in self._ledger:
            if not any(target.alive for target in entry.targets):
                await self._ledger.drop(entry.key)
            elif not self._working(entry):
                await self._settled(entry)
            elif entry.phase == "leaving":
                await self._ledger.step(entry, "parked")

    async def _settled(self, entry: Entry) -> Entry | None:
        """What has come of an operation of which nobody saw the end; None: all are on their devices.

        A restore that was begun may have happened or not, and asking again could destroy the slice's state:
        such a job is at fault."""
        alive = [target for target in entry.targets if target.alive]
        away = [target for target in alive if not _groups(target.pid, self.settings.devices)]
        if entry.fault or not alive:
            return entry
        if not away:
            await self._ledger.drop(entry.key)
            return None
        if entry.phase == "returning":
            why = "its restore was not seen to its end, and may not be asked for twice"
            return await self._ledger.step(entry, "parked", fault=why)
        if len(away) < len(alive):
            return await self._ledger.step(entry, "parked", fault=_PART)
        return await self._ledger.step(entry, "parked") if entry.phase == "leaving" else entry

    async def _known(self, members: Sequence[Member]) -> Entry | None:
        """What is parked of the job. Raises ``MoveError`` while a tool still works on it."""
        entry = self._entry(members)
        if entry is None:
            return None
        if self._working(entry):
            raise MoveError(
                f"an earlier {Path(self.settings.program).name} for {entry.job} still works: its processes "
                "are out of reach until it ends",
                pid=entry.targets[0].pid,
            )
        return await self._settled(entry)

    def _working(self, entry: Entry) -> bool:
        return is_locked(guard_of(self._calls, _first(entry.targets)))

    # ── the protocol ───────────────────────────────────────────────────────

    async def probe(self, members: Sequence[Member]) -> Presence:
        """What is in a TPU's memory nobody tells: its bytes are not known."""
        attached = await self._attached(members)
        entry = self._entry(members)
        away = [] if entry is None else [t for t in entry.targets if t.alive and t not in attached]
        return Presence(live=len(attached), parked=len(away), device_bytes=0)

    async def snapshot(
        self, members: Sequence[Member], *, op: str, mode: str = "offload", tags: Sequence[str] = ()
    ) -> Snapshotted:
        self._check_whole(mode, tags)
        return await self._whole(members, lambda: self._snapshot(members, op))

    async def restore(self, members: Sequence[Member], *, op: str) -> Restored:
        return await self._whole(members, lambda: self._restore(members, op))

    async def retire(self, members: Sequence[Member]) -> Sequence[ProcessRef]:
        entry = self._entry(members)
        known = {member.pid for member in members}
        targets = [*await self._attached(members), *(entry.targets if entry is not None else ())]
        return tuple(
            ProcessRef(target.pid, target.started)
            for target in {target.pid: target for target in targets}.values()
            if target.pid not in known and target.alive
        )

    # ── device → host ──────────────────────────────────────────────────────

    async def _snapshot(self, members: Sequence[Member], op: str) -> Snapshotted:
        began = time.monotonic()
        entry = await self._known(members)
        live = await self._attached(members)
        if not live:
            self._mark(members, parked=entry is not None)
            return Snapshotted(bytes=0, residual=0, seconds=time.monotonic() - began)
        if entry is not None:
            raise MoveError(
                f"a part of {entry.job} is parked and a part is not: a slice moves whole. End the job"
            )
        async with self._hooks.around(members, op):
            entry = await self._ledger.put(self._new_entry(members, op, tuple(live)))
            failed = await self._checkpoint(entry, live)
            if failed:  # only those, and only once more
                failed = await self._checkpoint(entry, [each for each in live if each.pid in failed])
            left = [target for target in live if _groups(target.pid, self.settings.devices)]
            if failed or left:
                await self._undo(entry, live, left)
                text = "; ".join(f"process {pid}: {why}" for pid, why in sorted(failed.items()))
                still = ", ".join(str(target.pid) for target in left)
                raise MoveError(
                    f"{entry.job} was not moved out: {text or f'process {still} keeps its devices open'}",
                    pid=min(failed, default=left[0].pid if left else 0),
                )
            self._clear_lock_files(live)
            await self._ledger.step(entry, "parked")
        self._mark(members, parked=True)
        return Snapshotted(bytes=0, residual=0, seconds=time.monotonic() - began)

    async def _checkpoint(self, entry: Entry, targets: Sequence[Target]) -> dict[int, str]:
        """Why, by pid, for those that failed."""
        seconds = self.settings.checkpoint_seconds
        ended = await self._run(entry, "checkpoint", [target.pid for target in targets], seconds)
        failed = {int(pid): why for pid, why in _FAILED.findall(ended.err)}
        if ended.code and not failed:
            why = ended.err.strip() or f"{self.settings.program} ended with status {ended.code}"
            failed = {target.pid: why for target in targets}
        return failed

    async def _undo(self, entry: Entry, live: Sequence[Target], left: Sequence[Target]) -> None:
        """Some left and some did not. A restore needs all of them in one call, so whoever left stays away."""
        if len(left) == len(live):
            await self._ledger.drop(entry.key)
            return
        log.error("job %s: %s", entry.job, _PART)
        await self._ledger.step(entry, "parked", fault=_PART)

    def _clear_lock_files(self, targets: Iterable[Target]) -> None:
        """The runtime's lock file outlives its owner's hold of the device and stops whoever comes next."""
        for target in targets:
            path = Path(f"/proc/{target.pid}/root{self.settings.lock_file}")
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                path.unlink()

    # ── host → device ──────────────────────────────────────────────────────

    async def _restore(self, members: Sequence[Member], op: str) -> Restored:
        began = time.monotonic()
        entry = await self._known(members)
        if entry is not None:
            if entry.fault:
                raise MoveError(f"the state of {entry.job} is lost: {entry.fault}", lost=True)
            await self._bring_back(entry, op)
        await self._hooks.back(members, op)
        self._mark(members, parked=False)
        return Restored(bytes=0, seconds=time.monotonic() - began)

    async def _bring_back(self, entry: Entry, op: str) -> None:
        if gone := [target.pid for target in entry.targets if not target.alive]:
            raise MoveError(
                f"process {gone[0]} of {entry.job} ended while it was parked, and a slice comes back whole "
                "or not at all",
                lost=True,
                pid=gone[0],
            )
        await self._gate(entry)
        entry = await self._ledger.step(entry, "returning", op=op)
        pids = [target.pid for target in entry.targets]
        try:
            ended = await self._run(entry, "restore", pids, self.settings.restore_seconds)
        except MoveError as error:
            # What could not be started has done nothing: that may be asked for again.
            await self._ledger.step(entry, "parked", fault=str(error) if error.lost else "")
            raise
        left = [pid for pid in pids if not _groups(pid, self.settings.devices)]
        if ended.code or left:
            why = ended.err.strip() or f"process {left[0]} did not open its devices"
            await self._ledger.step(entry, "parked", fault=why)
            raise MoveError(f"the state of {entry.job} did not come back: {why}", lost=True)
        await self._ledger.drop(entry.key)

    async def _gate(self, entry: Entry) -> None:
        """Until every device of the job can be opened. One that is busy fails the restore *and* breaks it."""
        wanted = sorted({device for target in entry.targets for device in target.devices})
        deadline = time.monotonic() + self.settings.gate_seconds
        while busy := [device for device in wanted if _busy(device)]:
            if time.monotonic() >= deadline:
                raise MoveError(
                    f"{entry.job} is not restored, which would destroy it: {busy[0]} is in use by another "
                    "process. End that one"
                )
            await asyncio.sleep(0.05)  # a device file tells nobody when it becomes free

    # ── small parts ────────────────────────────────────────────────────────

    async def _run(self, entry: Entry, action: str, pids: Sequence[int], seconds: float) -> Ended:
        """Raises ``MoveError`` if the tool cannot be started or does not end."""
        program = shutil.which(self.settings.program)
        if program is None:
            raise MoveError(f"{self.settings.program} is not found: install it, or set backend tpu:program=…")
        words = ["--action", action, "--pid", ",".join(map(str, pids)), "--timeout", f"{seconds:g}"]
        guard = hold(self._calls, _first(entry.targets))
        if guard is None:
            raise MoveError(f"another {self.settings.program} works on {entry.job}", pid=pids[0])
        try:
            async with asyncio.timeout(seconds + GRACE):
                return await run_program([program, *words], keep=(guard,))
        except TimeoutError:
            raise MoveError(
                f"{self.settings.program} did not {action} processes {', '.join(map(str, pids))} within "
                f"{seconds + GRACE:g} s",
                lost=action == "restore",
                pid=pids[0],
            ) from None
        except OSError as error:  # it is being replaced by another version, perhaps
            raise MoveError(f"{program} cannot be started: {error.strerror}") from None
        finally:
            os.close(guard)  # the tool has it too

    async def _attached(self, members: Sequence[Member]) -> list[Target]:
        return await asyncio.to_thread(attached, members, self.settings.devices)


def _first(targets: Sequence[Target]) -> int:
    """The process by which the calls for a slice are guarded."""
    return min(target.pid for target in targets)


def attached(members: Sequence[Member], devices: str) -> list[Target]:
    """The job's processes that use a TPU: they have a thread of the runtime *and* a device file open. A
    parked process has the thread only."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or not _has_runtime(int(entry)):
            continue
        pid = int(entry)
        groups, started = _groups(pid, devices), start_time(pid)
        if groups and started is not None and belongs(pid, list(members)) is not None:
            found.append(Target(pid=pid, started=started, devices=dict.fromkeys(groups, 0)))
    return sorted(found, key=lambda target: target.pid)


def _has_runtime(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    for thread in threads:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/comm", "rb") as file:
            if _THREAD.match(file.read().strip()):
                return True
    return False


def _groups(pid: int, devices: str) -> list[str]:
    """Paths of the numbered device files that the process has open, for ``/dev/vfio`` its vfio groups."""
    found = set()
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []
    for fd in fds:
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/{pid}/fd/{fd}")
            folder, _, name = path.rpartition("/")
            if folder == devices and name.isdigit():
                found.add(path)
    return sorted(found)


def _busy(device: str) -> bool:
    try:
        os.close(os.open(device, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.EAGAIN):
            return True
        raise MoveError(f"device {device} cannot be opened: {error.strerror}") from None
    return False
