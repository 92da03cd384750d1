"""State in torch modules, optimizers and tensors: moved storage by storage, out and back in place.

Storages are moved, not tensors: tied weights and views stay tied, every alias stays valid, `_version` does
not change, and the optimizer need not know. Addresses on the device change, so CUDA graphs and registered
buffers captured before a move are stale after it. Activations of a graph that awaits its backward pass stay
where they are (they are not registered); the pass may run after the state is back.

Called by the mover; knows nothing of agents and buffers' origin. What cannot be guarded: see ``torch_guard``.
"""

import time
from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from coslice.errors import ConfigError, NoRoom, OperationFailed
from coslice.workload import copying, memory
from coslice.workload.adapters import torch_copy as copy
from coslice.workload.adapters.torch_base import Base
from coslice.workload.adapters.torch_find import OPTIMIZER, Block, Roots, check_movable, find, torch
from coslice.workload.adapters.torch_guard import Guard
from coslice.workload.buffers import HostBuffer

SMALL = 64 << 10
"""Storages below this lose more than 2 % to pages that they share with malloc's other blocks."""
WORTH_SETTLING = 0.02
"""Small storages below this share of the state may stay where they are: 95 % of it leaves all the same."""
PARTS, PART = 16, 16 << 20
"""A move has so many parts, of so many bytes at least."""


class TorchAdapter:
    leaves_first = False

    def __init__(
        self, roots: Roots, *, device: str = "", incremental: bool = True, verify: bool = False
    ) -> None:
        """``device``: ``host``, ``cuda`` or empty, which is cuda if any tensor is there now.
        ``incremental``: copy only what changed. ``verify``: compare everything after each copy out."""
        self.roots, self.incremental, self.verify = roots, incremental, verify
        self.device = device or (
            "cuda" if any(b.device == "cuda" for b in find(roots, set(), device="host")) else "host"
        )
        self.near: AbstractSet[str] = {"cpu"}
        """Devices whose memory this process can address."""
        self.pinning = copy.Pinning()
        self.copies = copy.Device()
        self.settled: set[tuple[int, int]] = set()
        """Places of small storages that the mover allocated."""
        self._used: dict[str, float] = {}
        """Tag → when it was said to be used last."""
        self.changed: dict[Hashable, float] = {}
        """Storage → when it was last seen to have changed."""
        self.left: set[Hashable] = set()
        """Storages that left in the last move of a part: the same leave again, others being equal."""
        self.base: Base | None = None

    def check(self) -> None:
        """Raise ``ConfigError`` for state that can never move."""
        check_movable(find(self.roots, set(), device=self.device))

    def freeze(self, policy: str, reread_from: Any = None) -> None:
        """What becomes of parameters that are not trained; see ``torch_base``. Reads all of them."""
        blocks = find(self.roots, set(), device=self.device)
        base = Base(policy, blocks, reread_from=reread_from, near=self.near)
        self.base = base if base.known else None

    def measure(self, seen: set[int]) -> int:
        return sum(block.nbytes for block in self._own(find(self.roots, seen, device=self.device)))

    def part(self) -> None:
        """Have it in memory of this process's own again."""
        if self.base is not None:
            self.base.part(find(self.roots, set(), device=self.device))

    def _own(self, blocks: list[Block]) -> list[Block]:
        """Without what several jobs have in common."""
        base = self.base
        return blocks if base is None else [block for block in blocks if not base.in_common(block)]

    def join(self, *, fresh: bool) -> None:
        """Have the base in the one copy on the device that jobs on it share, where it may be."""
        if self.base is not None:
            self.base.join(find(self.roots, set(), device=self.device), fresh=fresh)

    def device_bytes(self) -> int:
        if self.device != "cuda":
            return 0
        cuda = torch().cuda
        return sum(int(cuda.memory_reserved(i)) for i in range(cuda.device_count()))

    def take(self, *, discard: bool, tags: AbstractSet[str], seen: set[int]) -> "TorchTaken | None":
        here = find(self.roots, seen, device=self.device)
        common: list[Block] = []
        if self.base is not None and self.base.here and not tags:
            inside = [block for block in here if self.base.in_common(block)]
            self.base.leaving(inside, verify=self.verify)
            common = [block for block in inside if self.base.in_common(block)]
        blocks = [block for block in self._own(here) if not tags or block.tag in tags]
        if not blocks and not common:
            return None
        check_movable(blocks)
        return self._taken(blocks, here, discard=discard, common=common, whole=not tags)

    def _taken(
        self,
        blocks: list[Block],
        here: list[Block],
        *,
        discard: bool = False,
        common: Sequence[Block] = (),
        whole: bool = False,
    ) -> "TorchTaken":
        """``whole``: all leaves. ``common``: what leaves the copy that several jobs have."""
        base = self.base
        frozen = [] if discard or base is None or base.here else base.unchanged(blocks, self._own(here))
        if whole and frozen and base is not None and base.may_join(frozen):
            left = {id(block) for block in frozen}
            common, frozen = frozen, []
            blocks = [block for block in blocks if id(block) not in left]
        return TorchTaken(blocks, self, discard=discard, frozen=frozen, common=common)

    def take_part(self, least: int, *, seen: set[int]) -> "TorchTaken | None":
        """Frozen weights stay longest: nothing of them changes, so nothing is won by their leaving but room.
        Of the others, what was used or changed longest ago leaves first."""
        blocks = self._own(find(self.roots, seen, device=self.device))
        age = {id(b): (b.frozen, self._last_used(b), key_of(b) not in self.left) for b in blocks}
        chosen, rest = [], least
        for block in sorted(blocks, key=lambda b: age[id(b)]):
            if rest <= 0:
                break
            chosen.append(block)
            rest -= block.nbytes
        for block in reversed(chosen):  # the last one may be larger than what was lacking
            if rest + block.nbytes <= 0:
                chosen.remove(block)
                rest += block.nbytes
        if not chosen:
            return None
        check_movable(chosen)
        self.left = {key_of(block) for block in chosen}
        return self._taken(chosen, blocks)

    def used(self, tags: Iterable[str]) -> None:
        self._used |= dict.fromkeys(tags, time.monotonic())

    def _last_used(self, block: Block) -> float:
        return max(self._used.get(block.tag, 0.0), self.changed.get(key_of(block), 0.0))

    def survey(self, seen: set[int]) -> "tuple[int, TorchTaken | None]":
        """Scattered are small storages on the CPU that another thread allocated, between malloc's blocks."""
        blocks = self._own(find(self.roots, seen, device=self.device))
        small = [block for block in blocks if block.nbytes < SMALL and block.device == "cpu"]
        present = {place(block) for block in small}
        self.settled &= present
        rest = [block for block in small if place(block) not in self.settled]
        total = sum(block.nbytes for block in blocks)
        worth = sum(block.nbytes for block in rest) > WORTH_SETTLING * total
        return total, TorchTaken(rest, self, discard=False) if worth else None


def place(block: Block) -> tuple[int, int]:
    return block.storage._cdata, block.storage.data_ptr()


def key_of(block: Block) -> Hashable:
    """Names a storage over moves: a gradient that was made anew is the same piece of state."""
    return block.name, block.nbytes


class TorchTaken:
    def __init__(
        self,
        blocks: list[Block],
        adapter: TorchAdapter,
        *,
        discard: bool,
        leads: bool = True,
        frozen: Sequence[Block] = (),
        common: Sequence[Block] = (),
    ) -> None:
        """``leads``: of several parts, the one that guards modules and optimizers. ``frozen``: of ``blocks``,
        those that the base brings back. ``common``: beside ``blocks``, those that it brings back into the
        copy that several jobs have."""
        self.blocks, self._adapter, self._discard, self._leads = blocks, adapter, discard, leads
        self._frozen, self._common = frozen, common
        self.registered = sum(block.nbytes for block in blocks)
        self.kept = 0 if discard else self.registered - sum(block.nbytes for block in frozen)
        self.keys = {block.storage._cdata for block in blocks}
        self.copied, self.seconds = 0, 0.0
        self._offsets: Sequence[int] = ()
        self._guard = Guard()
        self._guarded = False
        self._devices = {block.storage.device for block in blocks if block.device != "cpu"}

    def slots(self) -> Sequence[tuple[Hashable, int]]:
        return [] if self._discard else [(key_of(block), block.nbytes) for block in self.blocks]

    def placed(self, offsets: Sequence[int]) -> None:
        self._offsets = offsets

    def split(self) -> "Sequence[TorchTaken]":
        size = max(PART, self.registered // PARTS)
        frozen = {id(block) for block in self._frozen}
        groups = _grouped([block for block in self.blocks if id(block) not in frozen], size)
        if len(groups) == 1 and not frozen and not self._common:
            return [self]
        base = self._adapter.base
        whole = base is not None and base.whole
        still = _grouped(self._frozen, self.registered if whole else size)
        common = [list(self._common)] if self._common else []
        kinds = [TorchTaken] * len(groups) + [BaseTaken] * len(still) + [CommonTaken] * len(common)
        return [
            kind(blocks, self._adapter, discard=self._discard, leads=not i)
            for i, (kind, blocks) in enumerate(zip(kinds, (*groups, *still, *common), strict=True))
        ]

    def save(self, buffer: HostBuffer | None, offset: int) -> None:
        self.copied, self.seconds = 0, 0.0
        if self._discard or buffer is None:
            return
        near, far = self._places(offset)
        self._before_copies(buffer)
        if near:
            work = copying.copy_changed if self._adapter.incremental else copying.copy_all
            ranges = copy.ranges_out(near, buffer)
            done = work(ranges)
            self.copied, self.seconds = done.copied, done.seconds
            self._changed(place.key for place, each in zip(near, ranges, strict=True) if each in done.touched)
            if self._adapter.verify:
                copying.verify(ranges)
        if far:
            began = time.perf_counter()
            copied = self._adapter.copies.out(far, buffer, incremental=self._adapter.incremental)
            copy.synchronize(self._devices)
            self.copied += sum(copied)
            self._changed(place.key for place, size in zip(far, copied, strict=True) if size)
            self.seconds += time.perf_counter() - began
            if self._adapter.verify:
                copy.verify_device(far, buffer)

    def _changed(self, keys: Iterable[Hashable]) -> None:
        self._adapter.changed |= dict.fromkeys(keys, time.monotonic())

    def free(self) -> None:
        self._put_guards()
        for block in self.blocks:
            block.storage.resize_(0)
        if self._devices and torch().cuda.is_available():
            torch().cuda.empty_cache()

    def allocate(self) -> None:
        try:
            for block in self.blocks:
                if block.storage.nbytes() != block.nbytes:
                    block.storage.resize_(block.nbytes)
        except (RuntimeError, MemoryError) as error:
            raise NoRoom(
                f"no room on the device to bring {block.name!r} back ({block.nbytes} bytes): {error}"
            ) from error
        memory.advise_huge((b.storage.data_ptr(), b.nbytes) for b in self.blocks if b.device == "cpu")

    def load(self, buffer: HostBuffer | None, offset: int) -> None:
        self.copied, self.seconds = 0, 0.0
        if self._discard:
            for block in self.blocks:  # the user's callback fills it; until then the same on every run
                copy.zero(block.storage)
            return
        if buffer is None:
            raise OperationFailed("the host buffer of parked state is gone")
        near, far = self._places(offset)
        self._before_copies(buffer)
        if near:
            done = copying.copy_fresh(copy.ranges_in(near, buffer))
            self.copied, self.seconds = done.copied, done.seconds
        if far:
            began = time.perf_counter()
            self._adapter.copies.back(far, buffer)
            copy.synchronize(self._devices)
            self.copied += sum(each.nbytes for each in far)
            self.seconds += time.perf_counter() - began

    def finish(self) -> None:
        self._guard.lift()
        self._guarded = False
        self._adapter.settled.update(place(block) for block in self.blocks if block.nbytes < SMALL)

    def _places(self, offset: int) -> tuple[list[copy.Place], list[copy.Place]]:
        """Where the bytes lie: of storages on the CPU, and of the others."""
        near: list[copy.Place] = []
        far: list[copy.Place] = []
        for block, at in zip(self.blocks, self._offsets, strict=True):
            where = near if block.device in self._adapter.near else far
            where.append(copy.Place(key_of(block), block.storage, offset + at, block.nbytes))
        return near, far

    def _before_copies(self, buffer: HostBuffer) -> None:
        if any(device.type == "cuda" for device in self._devices):
            self._adapter.pinning.lock(buffer)
        copy.synchronize(self._devices)

    def _put_guards(self) -> None:
        if self._guarded:
            return
        self._guarded = True
        roots = self._adapter.roots
        if self._leads and any(block.tag != OPTIMIZER for block in self.blocks):
            for name, module in roots.modules.items():
                self._guard.module(module, name)
        if self._leads:
            for name, optimizer in roots.optimizers.items():
                self._guard.optimizer(optimizer, name)
        for block in self.blocks:
            for tensor, name in block.tensors:
                self._guard.tensor(tensor, f"{block.tag} {name!r}")


class BaseTaken(TorchTaken):
    """Frozen weights that need no copy: they were proven to be what the base will bring back."""

    def slots(self) -> Sequence[tuple[Hashable, int]]:
        return ()

    def save(self, buffer: HostBuffer | None, offset: int) -> None:
        self.copied, self.seconds = 0, 0.0

    def load(self, buffer: HostBuffer | None, offset: int) -> None:
        began = time.perf_counter()
        assert self._adapter.base is not None
        copy.synchronize(self._devices)
        self.copied = self._adapter.base.load(self.blocks)
        copy.synchronize(self._devices)
        self.seconds = time.perf_counter() - began


class CommonTaken(BaseTaken):
    """Frozen weights in the copy that several jobs have on the device: in no figure of this job."""

    def __init__(self, blocks: list[Block], adapter: TorchAdapter, *, discard: bool, leads: bool) -> None:
        super().__init__(blocks, adapter, discard=discard, leads=leads)
        self.registered = self.kept = 0

    def free(self) -> None:
        base = self._adapter.base
        assert base is not None
        base.adopt(self.blocks)
        self.keys = {block.storage._cdata for block in self.blocks}
        self._put_guards()
        assert base.common is not None
        base.common.go()

    def allocate(self) -> None:
        pass

    def load(self, buffer: HostBuffer | None, offset: int) -> None:
        began = time.perf_counter()
        assert self._adapter.base is not None
        self.copied = self._adapter.base.come(self.blocks)
        self.seconds = time.perf_counter() - began


def _grouped(blocks: Iterable[Block], size: int) -> list[list[Block]]:
    """In their order, in parts of ``size`` bytes or some more."""
    groups: list[list[Block]] = []
    room = 0
    for block in blocks:
        if room <= 0:
            groups.append([])
            room = size
        groups[-1].append(block)
        room -= block.nbytes
    return groups


def make_roots(model: Any, optimizer: Any, tensors: Any, patterns: Any) -> Roots:
    """Name what the user passed: single objects, sequences, or {tag: object}."""
    own = frozenset(tag for given in (model, optimizer, tensors) if isinstance(given, dict) for tag in given)
    return Roots(
        modules=_named("model", model, "named_parameters"),
        optimizers=_named("optimizer", optimizer, "param_groups"),
        tensors=dict(tensors)
        if isinstance(tensors, dict)
        else ({} if tensors is None else {"tensors": tensors}),
        own_tags=own,
        patterns=dict(patterns or {}),
    )


def _named(word: str, given: Any, wanted: str) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, dict):
        named = dict(given)
    elif isinstance(given, list | tuple):
        named = {f"{word}{i}": value for i, value in enumerate(given)}
    else:
        named = {word: given}
    for name, value in named.items():
        if not hasattr(value, wanted):
            raise ConfigError(
                f"{name!r} is a {type(value).__name__}, not a torch {word}: it has no {wanted!r}"
            )
    return named
