"""The registered state of one group in this process, and its way out and back.

It decides the order of a move and undoes a move that fails: everything is saved before anything is freed, and
what cannot come back whole stays parked whole. Where another's state comes in at the same time
(``give_way``), memory is given up part by part; then it is the agent who undoes. The gate is closed first
and opened last. Called by the channel (the agent's commands) and by handles (local moves); the work is done
in the one mover thread. Knows no network.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from coslice.errors import ConfigError, CosliceError, StateBusy
from coslice.gate import GATE
from coslice.workload import memory
from coslice.workload.adapters import Based, Divisible, Frugal, Slotted, Taken
from coslice.workload.arena import Arena
from coslice.workload.buffers import Buffers, LocalBuffers
from coslice.workload.mover import Mover
from coslice.workload.parts import (
    DISCARD,
    MID_PHASE,
    OFFLOAD,
    PARTS,
    Part,
    Registration,
    make_parts,
    place,
    told,
)

__all__ = ["DISCARD", "MID_PHASE", "OFFLOAD", "PARTS", "GroupState", "Move", "Registration"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """What a move did. ``device_before`` and ``_after`` are the framework's figures; 0: the system counts."""

    bytes: int
    seconds: float
    wait: float = 0.0
    copied: int = 0
    """Of ``bytes``, those that had to be copied: the rest was in host memory already."""
    copy_seconds: float = 0.0
    """Spent on that, comparing included, making pages not."""
    device_before: int = 0
    device_after: int = 0


class GroupState:
    def __init__(self, group: str, mover: Mover, buffers: Buffers, *, verify: bool = False) -> None:
        """``verify``: checksum what lies in host memory, which costs a pass over it each way."""
        self.group, self.buffers = group, buffers
        self._mover, self._verify = mover, verify
        self._registrations: list[Registration] = []
        self._out: list[Part] = []
        self._arena = Arena()
        self._closed = False
        self._moving = threading.Lock()
        self._lock = threading.RLock()

    # ── what is registered ─────────────────────────────────────────────────

    @property
    def parked_bytes(self) -> int:
        return sum(part.registered for part in list(self._out))

    def parked(self, owner: Registration | None = None) -> bool:
        return any(owner in (None, part.owner) for part in list(self._out))

    def measure(self, owner: Registration | None = None) -> int:
        """Registered bytes, on the device or parked. Each storage counts for the first that registered it."""
        with self._lock:
            total, seen = 0, self._parked_keys()
            for each in self._registrations:
                size = sum(adapter.measure(seen) for adapter in each.adapters)
                total += size if owner in (None, each) else 0
            return total + sum(part.registered for part in self._out if owner in (None, part.owner))

    @property
    def unkept(self) -> int:
        """Of ``measure``, bytes that need no host memory of this process."""
        return sum(base.nbytes for base in self._bases())

    @property
    def shared(self) -> list[tuple[str, int]]:
        """Digest and bytes of what lies in one copy with other processes'."""
        return sorted({base.shared for base in self._bases() if base.shared is not None})

    @property
    def has_common(self) -> bool:
        """Are frozen weights on the device that other processes may use too?"""
        return any(base.here for base in self._bases())

    def _based(self) -> list[Based]:
        adapters = [adapter for each in self._registrations for adapter in each.adapters]
        return [adapter for adapter in adapters if isinstance(adapter, Based)]

    def _bases(self) -> list[Frugal]:
        return [adapter.base for adapter in self._based() if adapter.base is not None]

    def join_if_idle(self) -> None:
        """Frozen weights that are to be shared on the device are so from now on, if no section is at work.
        For those that registered just now and wait for it."""
        if not self.buffers.shares_device or not self._bases():
            return
        with self._moving:
            if not self._closed and GATE.try_close(0.0, self.group):
                try:
                    self._mover.run(lambda: self._join(fresh=True))
                finally:
                    GATE.open(self.group)

    def _join(self, *, fresh: bool) -> None:
        with self._lock, memory.freeing():
            for adapter in self._based():
                adapter.join(fresh=fresh)

    def may_discard(self) -> bool:
        return all(each.refills for each in self._registrations)

    def may_freeze(self) -> bool:
        """May its job be moved in the middle of a phase?"""
        return all(each.for_children for each in self._registrations)

    def may_divide(self) -> bool:
        """Can a part of it move and the rest stay?"""
        return any(
            isinstance(adapter, Divisible) for each in self._registrations for adapter in each.adapters
        )

    def used(self, owner: Registration, tags: Iterable[str]) -> None:
        for adapter in owner.adapters:
            if isinstance(adapter, Divisible):
                adapter.used(tags)

    @property
    def empty(self) -> bool:
        return not self._registrations

    def add(self, registration: Registration) -> None:
        with self._lock:
            self._registrations.append(registration)
            for base in self._bases():
                base.lend(self.buffers)

    def remove(self, registration: Registration) -> None:
        if self.parked(registration):
            raise StateBusy("this state is in host memory: bring it back before closing its handle")
        with self._lock:
            self._registrations = [each for each in self._registrations if each is not registration]
        if based := [adapter for adapter in registration.adapters if isinstance(adapter, Based)]:
            self._mover.run(lambda: self._part(based))

    @staticmethod
    def _part(based: Sequence[Based]) -> None:
        for adapter in based:
            adapter.part()

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
            aside, nobody = LocalBuffers(), Registration("", ())
            parts = [part for i, taken in enumerate(scattered) for part in make_parts(nobody, i, taken)]
            buffer = place(parts, (), Arena(), aside)
            for part in parts:
                part.save(buffer)
            for part in parts:
                part.free()
            for part in parts:
                part.load(buffer)
            for part in parts:
                part.taken.finish()
            aside.release()

    def prepare(self, size: int) -> None:
        """Have ``size`` bytes of host memory ready, so that no move waits for them; raises ``NoRoom``."""
        with self._moving:
            if not self._out:
                self._mover.run(lambda: self.buffers.obtain(size, hold=False))

    # ── out ────────────────────────────────────────────────────────────────

    def move_out(
        self,
        *,
        wait: float,
        mode: str = OFFLOAD,
        tags: AbstractSet[str] = frozenset(),
        owner: Registration | None = None,
        least: int = 0,
        give_way: Callable[[int], None] | None = None,
    ) -> Move:
        """Move state to host memory; ``wait``: seconds for open accelerator sections to end.

        ``least``: so many bytes or some more, least recently used first; 0: all. ``give_way``: told how many
        bytes were given up so far, as they are, part by part. Raises ``StateBusy``, ``NoRoom``,
        ``ConfigError`` or ``OperationFailed``; then nothing has changed, but for ``give_way``: what left by
        then is parked.
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
                moved = self._mover.run(lambda: self._move_out(owners, mode, tags, least, give_way))
            finally:
                self._open_if_back()
        after = self._device_bytes()
        spent = time.monotonic() - began
        copied, copying = _copies(moved)
        return Move(
            bytes=sum(part.registered for part in moved),
            seconds=spent,
            wait=waited,
            copied=copied,
            copy_seconds=copying,
            device_before=before,
            device_after=after,
        )

    def _move_out(
        self,
        owners: Sequence[Registration],
        mode: str,
        tags: AbstractSet[str],
        least: int,
        give_way: Callable[[int], None] | None,
    ) -> list[Part]:
        leaving: list[Part] = []
        with self._lock:
            for part in self._out:
                if part.loaded:  # brought ahead of time, for a turn that did not come
                    part.free()
            try:
                if least and self.buffers.shares_device and not self._out:
                    self._join(fresh=False)
                if least:
                    self._take_part(leaving, owners, least)
                else:
                    self._take(leaving, owners, mode, tags)
                buffer = place(leaving, self._out, self._arena, self.buffers)
                if give_way is None:
                    for part in leaving:
                        self._save(part, buffer)
                    with memory.freeing():
                        for part in leaving:
                            part.free()
                else:
                    self._leave_one_by_one(leaving, buffer, give_way)
            except BaseException as error:
                self._out += self._undo([part for part in leaving if give_way is None or not part.freed])
                self._out += [part for part in leaving if give_way is not None and part.freed]
                raise told(error) from error
            self._out += leaving
            if self._out and not any(part.taken.kept for part in self._out):
                self.buffers.release()  # everything was dropped: the agent lets its file go too
                self._arena.clear()
        return leaving

    def _take(
        self, leaving: list[Part], owners: Sequence[Registration], mode: str, tags: AbstractSet[str]
    ) -> None:
        seen = self._parked_keys()
        pairs = [(owner, i, adapter) for owner in owners for i, adapter in enumerate(owner.adapters)]
        for owner, number, adapter in sorted(pairs, key=lambda each: not each[2].leaves_first):
            discard = DISCARD in (mode, owner.mode)
            if (taken := adapter.take(discard=discard, tags=tags, seen=seen)) is not None:
                leaving += make_parts(owner, number, taken)

    def _take_part(self, leaving: list[Part], owners: Sequence[Registration], least: int) -> None:
        """From those that can be divided, in the order of their registration; all, if that is not enough."""
        seen = self._parked_keys()
        for owner in owners if all(owner.mode != DISCARD for owner in owners) else ():
            for number, adapter in enumerate(owner.adapters):
                rest = least - sum(part.registered for part in leaving)
                if rest > 0 and isinstance(adapter, Divisible):
                    taken = adapter.take_part(rest, seen=seen)
                    leaving += [] if taken is None else make_parts(owner, number, taken)
        if sum(part.registered for part in leaving) < least:
            self._undo(leaving)
            leaving.clear()
            self._take(leaving, owners, OFFLOAD, frozenset())

    def _save(self, part: Part, buffer: object) -> None:
        current = self.buffers.current
        part.save(current if buffer is not None else None)
        if self._verify:
            part.checksum = part.sum(current)

    def _leave_one_by_one(
        self, leaving: Sequence[Part], buffer: object, give_way: Callable[[int], None]
    ) -> None:
        gone = 0
        for part in leaving:
            self._save(part, buffer)
            with memory.freeing():
                part.free()
            gone += part.registered
            give_way(gone)

    def _undo(self, leaving: Sequence[Part]) -> list[Part]:
        """Bring back what left, as far as it left. Returns what did not come: parked, for another try."""
        stay = list[Part]()
        for part in reversed(leaving):
            try:
                if part.freed:
                    part.load(self.buffers.current)
                part.taken.finish()
            except CosliceError:
                stay.append(part)
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
        copied, copying = _copies(moved)
        return Move(
            bytes=sum(part.registered for part in moved),
            seconds=spent,
            copied=copied,
            copy_seconds=copying,
            device_before=before,
            device_after=self._device_bytes(),
        )

    def _move_in(self, owner: Registration | None) -> list[Part]:
        with self._lock:
            returning = [part for part in self._out if owner in (None, part.owner)]
            try:
                for part in returning:
                    part.taken.allocate()
                for part in returning:
                    self._load(part)
            except BaseException as error:
                self._free(returning)
                raise told(error) from error
            for part in reversed(returning):
                try:
                    part.taken.finish()
                except BaseException as error:
                    raise told(error) from error
                self._out.remove(part)
        return returning

    def _load(self, part: Part) -> None:
        if self._verify and not part.loaded:
            part.check(self.buffers.current)
        part.load(self.buffers.current)

    def _free(self, parts: Sequence[Part]) -> None:
        with memory.freeing():
            for part in parts:
                part.free()

    def bring_ahead(self, most: int) -> int:
        """Have up to ``most`` bytes of what is parked on the device, still as parked. Returns how many.

        For the next turn, while another's state leaves. ``most=0`` frees it again: nothing was changed, so
        nothing is copied. Raises as ``move_in``, and then nothing of it is on the device.
        """
        if not most and not any(part.loaded for part in list(self._out)):
            return 0
        with self._moving:
            return self._mover.run(lambda: self._bring_ahead(most))

    def _bring_ahead(self, most: int) -> int:
        with self._lock:
            here = sum(part.registered for part in self._out if part.loaded)
            if not most:
                self._free([part for part in self._out if part.loaded])
                return 0
            try:
                for part in self._out:
                    if part.loaded or not part.registered or not isinstance(part.taken, Slotted):
                        continue  # what is not ours alone comes with the rest
                    if here + part.registered > most:
                        break
                    here += part.registered
                    self._load(part)
            except BaseException as error:
                self._free([part for part in self._out if part.freed])
                raise told(error) from error
        return here

    # ── small parts ────────────────────────────────────────────────────────

    def _open_if_back(self) -> None:
        if self._closed and not self._out:
            self._closed = False
            GATE.open(self.group)

    def _parked_keys(self) -> set[int]:
        return {key for part in self._out for key in part.taken.keys}

    def _device_bytes(self) -> int:
        return max((a.device_bytes() for each in self._registrations for a in each.adapters), default=0)

    def forget(self) -> None:
        """In a forked child: nothing of this is ours."""
        if self.buffers.current is not None:
            self.buffers.current.forget()
            self.buffers.current = None


def _copies(moved: Sequence[Part]) -> tuple[int, float]:
    """Bytes copied, and seconds spent on it, where the adapter counts them."""
    counted = [part.taken for part in moved if isinstance(part.taken, Slotted)]
    rest = sum(part.taken.kept for part in moved if not isinstance(part.taken, Slotted))
    return sum(taken.copied for taken in counted) + rest, sum(taken.seconds for taken in counted)


def _check_mode(mode: str, owners: Sequence[Registration]) -> None:
    if mode not in (OFFLOAD, DISCARD):
        raise ConfigError(f"{mode!r} is no mode of moving state: use {OFFLOAD} or {DISCARD}")
    if mode == DISCARD and (keeps := [owner.name for owner in owners if not owner.refills]):
        raise ConfigError(
            f"the state of {', '.join(keeps)} cannot be discarded: nothing would bring it back; "
            "register it with an on_restore callback that fills it again, or use mode offload"
        )
