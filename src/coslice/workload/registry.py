"""The registered state of one group in this process, and its way out and back.

It decides the order of a move and undoes a move that fails: everything is saved before anything is freed, and
what cannot come back whole stays parked whole. The gate is closed first and opened last. Called by the
channel (the agent's commands) and by handles (local moves); the work is done in the one mover thread. Knows
no network.
"""

import itertools
import threading
import time
import zlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from coslice.errors import ConfigError, CosliceError, OperationFailed, StateBusy, StateLost
from coslice.gate import GATE
from coslice.workload import memory
from coslice.workload.adapters import Adapter, Taken
from coslice.workload.buffers import Buffers, HostBuffer, LocalBuffers
from coslice.workload.mover import Mover

OFFLOAD, DISCARD = "offload", "discard"


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """What a move did. ``device_before`` and ``_after`` are the framework's figures; 0: the system counts."""

    bytes: int
    seconds: float
    wait: float = 0.0
    device_before: int = 0
    device_after: int = 0


@dataclass(eq=False, slots=True)
class Registration:
    """What one call of ``register`` brought."""

    name: str
    adapters: Sequence[Adapter]
    mode: str = OFFLOAD
    refills: bool = False
    """It has an ``on_restore``, so its bytes may be dropped."""


@dataclass(eq=False, slots=True)
class _Out:
    """One part on its way out, out, or on its way back."""

    owner: Registration
    taken: Taken
    offset: int = 0
    """Where in the buffer its bytes are."""
    checksum: int = 0
    freed: bool = False


class GroupState:
    def __init__(self, group: str, mover: Mover, buffers: Buffers, *, verify: bool = False) -> None:
        """``verify``: checksum what lies in host memory; finds faults, costs a pass over it each way."""
        self.group, self.buffers = group, buffers
        self._mover, self._verify = mover, verify
        self._registrations: list[Registration] = []
        self._out: list[_Out] = []
        self._closed = False
        self._moving = threading.Lock()
        self._lock = threading.RLock()

    # ── what is registered ─────────────────────────────────────────────────

    @property
    def parked_bytes(self) -> int:
        return sum(out.taken.registered for out in list(self._out))

    def parked(self, owner: Registration | None = None) -> bool:
        return any(owner in (None, out.owner) for out in list(self._out))

    def measure(self, owner: Registration | None = None) -> int:
        """Registered bytes, on the device or parked. Each storage counts for the first that registered it."""
        with self._lock:
            total, seen = 0, self._parked_keys()
            for each in self._registrations:
                size = sum(adapter.measure(seen) for adapter in each.adapters)
                total += size if owner in (None, each) else 0
            return total + sum(out.taken.registered for out in self._out if owner in (None, out.owner))

    def may_discard(self) -> bool:
        return all(each.refills for each in self._registrations)

    @property
    def empty(self) -> bool:
        return not self._registrations

    def add(self, registration: Registration) -> None:
        with self._lock:
            self._registrations.append(registration)

    def remove(self, registration: Registration) -> None:
        if self.parked(registration):
            raise StateBusy("this state is in host memory: bring it back before closing its handle")
        with self._lock:
            self._registrations = [each for each in self._registrations if each is not registration]

    def settle(self) -> int:
        """Registered bytes, as ``measure``; small storages are laid side by side, to leave in whole pages.

        Call it only while no section is at work.
        """
        with self._lock:
            if self._out:
                return self.measure()
            seen = set[int]()
            found = [adapter.survey(seen) for each in self._registrations for adapter in each.adapters]
        if scattered := [taken for _, taken in found if taken is not None]:
            self._mover.run(lambda: self._lay_out(scattered))
        return sum(size for size, _ in found)

    def settle_if_idle(self) -> None:
        with self._moving:
            if not self._closed and GATE.try_close(0.0, self.group):
                try:
                    self.settle()
                finally:
                    GATE.open(self.group)

    def _lay_out(self, scattered: Sequence[Taken]) -> None:
        with self._lock:
            if self._out:  # a move was faster
                return
            aside = LocalBuffers()
            buffer = aside.obtain(sum(taken.kept for taken in scattered))
            offsets = [0, *itertools.accumulate(taken.kept for taken in scattered)]
            for taken, offset in zip(scattered, offsets, strict=False):
                taken.save(buffer, offset)
            for taken in scattered:
                taken.free()
            for taken, offset in zip(scattered, offsets, strict=False):
                taken.allocate()
                taken.load(buffer, offset)
                taken.finish()
            aside.release()

    # ── out ────────────────────────────────────────────────────────────────

    def move_out(
        self,
        *,
        wait: float,
        mode: str = OFFLOAD,
        tags: AbstractSet[str] = frozenset(),
        owner: Registration | None = None,
    ) -> Move:
        """Move state to host memory; ``wait``: seconds for open accelerator sections to end.

        Raises ``StateBusy``, ``NoRoom``, ``ConfigError`` or ``OperationFailed``; then nothing has changed.
        """
        began = time.monotonic()
        with self._moving:
            owners = [each for each in self._registrations if owner in (None, each)]
            _check_mode(mode, owners)
            # Waiting is done here and not by the mover: the section that we wait for may need it (settle).
            if not self._closed and not GATE.try_close(wait, self.group):
                raise StateBusy(f"an accelerator section of this process is still open after {wait:g} s")
            self._closed = True
            waited = time.monotonic() - began
            try:
                before = self._device_bytes()
                moved = self._mover.run(lambda: self._move_out(owners, mode, tags))
            finally:
                self._open_if_back()
        after = self._device_bytes()
        spent = time.monotonic() - began
        return Move(bytes=moved, seconds=spent, wait=waited, device_before=before, device_after=after)

    def _move_out(self, owners: Sequence[Registration], mode: str, tags: AbstractSet[str]) -> int:
        leaving: list[_Out] = []
        with self._lock:
            try:
                self._take(leaving, owners, mode, tags)
                self._save(leaving)
                with memory.freeing():
                    for out in leaving:
                        out.freed = True
                        out.taken.free()
            except BaseException as error:
                self._out += self._undo(leaving)
                raise _told(error) from error
            self._out += leaving
            if self._out and not any(out.taken.kept for out in self._out):
                self.buffers.release()  # everything was dropped: the agent lets its file go too
        return sum(out.taken.registered for out in leaving)

    def _take(
        self, leaving: list[_Out], owners: Sequence[Registration], mode: str, tags: AbstractSet[str]
    ) -> None:
        seen = self._parked_keys()
        pairs = [(owner, adapter) for owner in owners for adapter in owner.adapters]
        for owner, adapter in sorted(pairs, key=lambda pair: not pair[1].leaves_first):
            discard = DISCARD in (mode, owner.mode)
            if (taken := adapter.take(discard=discard, tags=tags, seen=seen)) is not None:
                leaving.append(_Out(owner, taken))

    def _save(self, leaving: Sequence[_Out]) -> None:
        end = used = max((out.offset + out.taken.kept for out in self._out), default=0)
        for out in leaving:
            out.offset, end = end, end + out.taken.kept
        buffer = self.buffers.obtain(end, keep=used) if end > used else None
        for out in leaving:
            out.taken.save(buffer, out.offset)
            out.checksum = self._checksum(buffer, out)

    def _undo(self, leaving: Sequence[_Out]) -> list[_Out]:
        """Bring back what left, as far as it left. Returns what did not come: parked, for another try."""
        stay = list[_Out]()
        for out in reversed(leaving):
            try:
                if out.freed:
                    out.taken.allocate()
                    out.taken.load(self.buffers.current, out.offset)
                out.taken.finish()
            except CosliceError:
                stay.append(out)
        return stay

    # ── back ───────────────────────────────────────────────────────────────

    def move_in(self, owner: Registration | None = None) -> Move:
        """Bring state back. Raises ``NoRoom`` or ``StateLost`` (all of it is parked still), or
        ``OperationFailed`` when a callback failed (the rest is back, the gate stays closed, another try calls
        it again)."""
        began = time.monotonic()
        with self._moving:
            before = self._device_bytes()
            try:
                moved = self._mover.run(lambda: self._move_in(owner))
            finally:
                self._open_if_back()
        spent = time.monotonic() - began
        return Move(bytes=moved, seconds=spent, device_before=before, device_after=self._device_bytes())

    def _move_in(self, owner: Registration | None) -> int:
        with self._lock:
            returning = [out for out in self._out if owner in (None, out.owner)]
            moved = sum(out.taken.registered for out in returning)
            try:
                for out in returning:
                    out.taken.allocate()
                for out in returning:
                    self._check(out)
                    out.taken.load(self.buffers.current, out.offset)
            except BaseException as error:
                with memory.freeing():
                    for out in returning:
                        out.taken.free()
                raise _told(error) from error
            for out in reversed(returning):
                try:
                    out.taken.finish()
                except BaseException as error:
                    raise _told(error) from error
                self._out.remove(out)
        return moved

    # ── small parts ────────────────────────────────────────────────────────

    def _open_if_back(self) -> None:
        if self._closed and not self._out:
            self._closed = False
            GATE.open(self.group)

    def _parked_keys(self) -> set[int]:
        return {key for out in self._out for key in out.taken.keys}

    def _device_bytes(self) -> int:
        return max((a.device_bytes() for each in self._registrations for a in each.adapters), default=0)

    def _checksum(self, buffer: HostBuffer | None, out: _Out) -> int:
        if not self._verify or buffer is None or not out.taken.kept:
            return 0
        return zlib.crc32(buffer.bytes(out.offset, out.taken.kept))

    def _check(self, out: _Out) -> None:
        if self._checksum(self.buffers.current, out) != out.checksum:
            raise StateLost(
                f"the state of {out.owner.name} changed in host memory (checksum): it cannot be trusted; "
                "restart the job from its last checkpoint"
            )

    def forget(self) -> None:
        """In a forked child: nothing of this is ours."""
        if self.buffers.current is not None:
            self.buffers.current.forget()
            self.buffers.current = None


def _check_mode(mode: str, owners: Sequence[Registration]) -> None:
    if mode not in (OFFLOAD, DISCARD):
        raise ConfigError(f"{mode!r} is no mode of moving state: use {OFFLOAD} or {DISCARD}")
    if mode == DISCARD and (keeps := [owner.name for owner in owners if not owner.refills]):
        raise ConfigError(
            f"the state of {', '.join(keeps)} cannot be discarded: nothing would bring it back; "
            "register it with an on_restore callback that fills it again, or use mode offload"
        )


def _told(error: BaseException) -> CosliceError:
    """The error as the mover's callers get it: ours as it is, anything else named."""
    if isinstance(error, CosliceError):
        return error
    return OperationFailed(f"state was not moved: {type(error).__name__}: {error}")
