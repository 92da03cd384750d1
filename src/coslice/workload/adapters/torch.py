"""State in torch modules, optimizers and tensors: moved storage by storage, out and back in place.

Storages are moved, not tensors: tied weights and views stay tied, every alias stays valid, `_version` does
not change, and the optimizer need not know. Addresses on the device change, so CUDA graphs and registered
buffers captured before a move are stale after it. Activations of a graph that awaits its backward pass stay
where they are (they are not registered); the pass may run after the state is back.

Called by the mover; knows nothing of agents and buffers' origin. What cannot be guarded: see ``torch_guard``.
"""

from collections.abc import Set as AbstractSet
from typing import Any

from coslice.errors import ConfigError, NoRoom, OperationFailed
from coslice.workload import memory
from coslice.workload.adapters import torch_copy as copy
from coslice.workload.adapters.torch_find import OPTIMIZER, Block, Roots, check_movable, find, torch
from coslice.workload.adapters.torch_guard import Guard
from coslice.workload.buffers import HostBuffer

SMALL = 64 << 10
"""Storages below this lose more than 2 % to pages that they share with malloc's other blocks."""
WORTH_SETTLING = 0.02
"""Small storages below this share of the state may stay where they are: 95 % of it leaves all the same."""


class TorchAdapter:
    leaves_first = False

    def __init__(self, roots: Roots, *, device: str = "") -> None:
        """``device``: ``host``, ``cuda`` or empty, which is cuda if any tensor is there now."""
        self.roots = roots
        self.device = device or (
            "cuda" if any(b.device == "cuda" for b in find(roots, set(), device="host")) else "host"
        )
        self.pinning = copy.Pinning()
        self.settled: set[tuple[int, int]] = set()
        """Places of small storages that the mover allocated."""

    def check(self) -> None:
        """Raise ``ConfigError`` for state that can never move."""
        check_movable(find(self.roots, set(), device=self.device))

    def measure(self, seen: set[int]) -> int:
        return sum(block.nbytes for block in find(self.roots, seen, device=self.device))

    def device_bytes(self) -> int:
        if self.device != "cuda":
            return 0
        cuda = torch().cuda
        return sum(int(cuda.memory_reserved(i)) for i in range(cuda.device_count()))

    def take(self, *, discard: bool, tags: AbstractSet[str], seen: set[int]) -> "TorchTaken | None":
        blocks = find(self.roots, seen, device=self.device)
        if tags:
            blocks = [block for block in blocks if block.tag in tags]
        if not blocks:
            return None
        check_movable(blocks)
        return TorchTaken(blocks, self, discard=discard)

    def survey(self, seen: set[int]) -> "tuple[int, TorchTaken | None]":
        """Scattered are small storages on the CPU that another thread allocated, between malloc's blocks."""
        blocks = find(self.roots, seen, device=self.device)
        small = [block for block in blocks if block.nbytes < SMALL and block.device == "cpu"]
        present = {place(block) for block in small}
        self.settled &= present
        rest = [block for block in small if place(block) not in self.settled]
        total = sum(block.nbytes for block in blocks)
        worth = sum(block.nbytes for block in rest) > WORTH_SETTLING * total
        return total, TorchTaken(rest, self, discard=False) if worth else None


def place(block: Block) -> tuple[int, int]:
    return block.storage._cdata, block.storage.data_ptr()


class TorchTaken:
    def __init__(self, blocks: list[Block], adapter: TorchAdapter, *, discard: bool) -> None:
        self.blocks, self._adapter, self._discard = blocks, adapter, discard
        self.registered = sum(block.nbytes for block in blocks)
        self.kept = 0 if discard else self.registered
        self.keys = {block.storage._cdata for block in blocks}
        self._guard = Guard()
        self._guarded = False
        self._devices = {block.storage.device for block in blocks if block.device != "cpu"}

    def save(self, buffer: HostBuffer | None, offset: int) -> None:
        if self._discard or buffer is None:
            return
        buffer.check(offset + self.kept)
        self._before_copies(buffer)
        for block in self.blocks:
            out = copy.cpu_out if block.device == "cpu" else copy.device_out
            out(block.storage, buffer, offset, block.nbytes)
            offset += block.nbytes
        copy.synchronize(self._devices)

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
        if self._discard:
            for block in self.blocks:  # the user's callback fills it; until then the same on every run
                copy.zero(block.storage)
            return
        if buffer is None:
            raise OperationFailed("the host buffer of parked state is gone")
        buffer.check(offset + self.kept)
        self._before_copies(buffer)
        for block in self.blocks:
            back = copy.cpu_in if block.device == "cpu" else copy.device_in
            back(block.storage, buffer, offset, block.nbytes)
            offset += block.nbytes
        copy.synchronize(self._devices)

    def finish(self) -> None:
        self._guard.lift()
        self._guarded = False
        self._adapter.settled.update(place(block) for block in self.blocks if block.nbytes < SMALL)

    def _before_copies(self, buffer: HostBuffer) -> None:
        if any(device.type == "cuda" for device in self._devices):
            self._adapter.pinning.lock(buffer)
        copy.synchronize(self._devices)

    def _put_guards(self) -> None:
        if self._guarded:
            return
        self._guarded = True
        if any(block.tag != OPTIMIZER for block in self.blocks):
            for name, module in self._adapter.roots.modules.items():
                self._guard.module(module, name)
        for name, optimizer in self._adapter.roots.optimizers.items():
            self._guard.optimizer(optimizer, name)
        for block in self.blocks:
            for tensor, name in block.tensors:
                self._guard.tensor(tensor, f"{block.tag} {name!r}")


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
