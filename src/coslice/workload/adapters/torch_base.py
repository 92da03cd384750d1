"""The frozen base of a job: parameters that are not trained, and so need no host copy of their own.

``drop``: their bytes are thrown away when they leave and read again (``reread``) when they come back.
``share``: all processes of the node with the same frozen parameters have one host copy (``shared``). Either
way a piece leaves without a copy only while its content is proven to be what will come back; what somebody
changed (a merged adapter, say) is ordinary state from then on. What comes back is checked again. Where an
agent keeps it, jobs that share have one copy on the device too (``torch_common``).

Called by the torch adapter in the mover's thread, and once by ``register``.
"""

import ctypes
import hashlib
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coslice.errors import ConfigError, CosliceError, OperationFailed, StateLost
from coslice.workload import copying, reread
from coslice.workload.adapters import DROP, SHARE
from coslice.workload.adapters import torch_copy as copy
from coslice.workload.adapters.torch_common import Common, WrongContent, movable
from coslice.workload.adapters.torch_find import Block, torch
from coslice.workload.buffers import Buffers
from coslice.workload.copying import Range
from coslice.workload.shared import SharedCopy

_log = logging.getLogger("coslice")

LEAST = 64 << 10
"""Smaller pieces stay ordinary state: they are moved to lie side by side, and are nothing in sum."""
ALIGN = 4096


@dataclass(slots=True)
class Known:
    """One piece as it was when it was registered."""

    digest: bytes
    size: int
    quick: Any = None
    """Digests that the device computes; None: the piece is in this process's memory."""
    at: int = 0
    """Its place in the shared copy."""


def piece(block: Block) -> Hashable:
    return block.name, block.nbytes


class Base:
    """``known``: the pieces that need no host memory of this process."""

    def __init__(
        self,
        policy: str,
        blocks: Iterable[Block],
        *,
        reread_from: Any,
        near: Collection[str],
    ) -> None:
        """Reads all of ``blocks``, and for ``drop`` all of ``reread_from``; raises ``ConfigError`` if that
        has nothing of them."""
        self.policy, self._near = policy, near
        self._paths: tuple[str, ...] = ()
        self._entries: Mapping[bytes, reread.Entry] = {}
        self._loader = reread_from if callable(reread_from) else None
        self._buffers: Buffers | None = None
        self._copy: SharedCopy | None = None
        self.common: Common | None = None
        self._alone = False
        """What others share under our digest was something else."""
        self.digest, self.size = "", 0
        frozen = [block for block in blocks if block.frozen and block.nbytes >= LEAST]
        self.known: dict[Hashable, Known] = dict(
            zip(map(piece, frozen), reread.in_parallel(self._read, frozen), strict=True)
        )
        if policy == DROP:
            self._find(reread_from)
        else:
            self._lay_out()

    @property
    def whole(self) -> bool:
        """Does it come back only all at once?"""
        return self._loader is not None

    @property
    def nbytes(self) -> int:
        if self.common is not None and self.common.used:
            return 0  # it is no state of this process alone
        return sum(known.size for known in self.known.values())

    @property
    def shared(self) -> tuple[str, int] | None:
        return (self.digest, self.size) if self.digest and self.policy == SHARE else None

    def lend(self, buffers: Buffers) -> None:
        """Where a shared copy comes from."""
        self._buffers = buffers

    # ── one copy on the device ─────────────────────────────────────────────

    def in_common(self, block: Block) -> bool:
        """Is it in the copy that several jobs have on the device, or was it when it left?"""
        return self.common is not None and self.common.holds(block)

    @property
    def here(self) -> bool:
        """Is that copy on the device, and in use by this process?"""
        return self.common is not None and self.common.here

    def may_join(self, blocks: Sequence[Block]) -> bool:
        """Can all of it be in that copy?"""
        offered = self._buffers is not None and self._buffers.shares_device and not self._alone
        return (
            offered
            and self.policy == SHARE
            and not (self.common is not None and self.common.used)
            and all(block.device in self._near for block in blocks)
            and {piece(block) for block in blocks} == self.known.keys() != set()
            and all(map(movable, blocks))
        )

    def join(self, everything: Iterable[Block], *, fresh: bool) -> None:
        """Into that copy, if it can be; else all stays as it is. ``fresh``: nobody can have changed it since
        it was read."""
        present = self._mine(everything)
        if not self.may_join(present):
            return
        if not fresh:
            self._settle(present)
            present = self._mine(present)
            if not present:
                return
        try:
            self._own_common().join({piece(block): block for block in present})
        except WrongContent as error:
            self._alone = True
            _log.error("coslice: %s: this job keeps a copy of its own", error)
        except CosliceError as error:
            _log.info("coslice: frozen weights are not shared on the device for now: %s", error)

    def _own_common(self) -> Common:
        if self.common is None or self.common.digest != self.digest:
            assert self._buffers is not None
            places = {key: (known.at, known.size) for key, known in self.known.items()}
            self.common = Common(self._buffers, self.digest, self.size, places)
        return self.common

    def adopt(self, blocks: Sequence[Block]) -> None:
        """They leave, and come back into that copy."""
        self._own_common().adopt({piece(block): block for block in blocks})

    def part(self, everything: Iterable[Block]) -> None:
        """Out of that copy for good: its content in memory of the process's own again."""
        if self.common is not None and self.common.here:
            for block in everything:
                if self.in_common(block):
                    self.common.own(block, block.storage.data_ptr())
            self.common.part_for_good()

    def leaving(self, inside: Sequence[Block], *, verify: bool) -> list[Block]:
        """That copy is about to leave, as far as this process goes. Returns what this process changed in it,
        which is ordinary state of its own from now on. ``verify``: find it by comparing all of it. Raises
        ``NoRoom`` where there is none for a copy in host memory."""
        assert self.common is not None
        assert self._buffers is not None
        if self._copy is None:
            self._copy = self._buffers.share(self.digest, self.size, self.common.to_host)
        suspects = [block for block in inside if verify or self.common.written(block)]
        self._forget_unless(self._as_shared, [block for block in suspects if piece(block) in self.known])
        changed = [block for block in suspects if piece(block) not in self.known]
        for block in changed:
            self.common.own(block, block.storage.data_ptr())
        return changed

    def come(self, blocks: Sequence[Block]) -> int:
        """Back on the device; returns the bytes copied."""
        assert self.common is not None
        assert self._copy is not None
        try:
            return self.common.come(self._copy)
        except WrongContent as error:
            self._alone = True
            _log.error("coslice: %s: this job has a copy of its own again", error)
            for block in blocks:
                self.common.own(block, self._copy.address + self._at(block))
            self.common.part_for_good()
            return sum(block.nbytes for block in blocks)

    # ── out ────────────────────────────────────────────────────────────────

    def unchanged(self, blocks: Iterable[Block], everything: Iterable[Block]) -> list[Block]:
        """Those of ``blocks`` that may leave without a copy. ``everything``: all that is on the device.

        Raises ``NoRoom`` where there is none for a shared copy that does not exist yet.
        """
        if self.policy == SHARE and self._copy is None:
            self._begin_to_share(self._mine(everything))
        mine = self._mine(blocks)
        self._forget_unless(self._as_registered if self.policy == DROP else self._as_shared, mine)
        return [block for block in mine if piece(block) in self.known]

    def _settle(self, present: Sequence[Block]) -> None:
        """What is missing, or is not what was registered, belongs to it no more."""
        names = set(map(piece, present))
        self.known = {key: known for key, known in self.known.items() if key in names}
        self._forget_unless(self._as_registered, present)
        self._lay_out()

    def _begin_to_share(self, present: Sequence[Block]) -> None:
        self._settle(present)
        still = self._mine(present)
        if still:
            assert self._buffers is not None
            self._copy = self._buffers.share(
                self.digest, self.size, lambda address: self._fill(address, still)
            )

    def _mine(self, blocks: Iterable[Block]) -> list[Block]:
        return [block for block in blocks if piece(block) in self.known]

    def _forget_unless(self, holds: Callable[[Block], bool], blocks: Sequence[Block]) -> None:
        same = reread.in_parallel(holds, blocks)
        changed = [block for block, equal in zip(blocks, same, strict=True) if not equal]
        for block in changed:
            del self.known[piece(block)]
        if changed:
            _log.warning(
                "coslice: frozen weights were changed (%s%s): %d bytes are ordinary state from now on",
                changed[0].name,
                f" and {len(changed) - 1} more" if len(changed) > 1 else "",
                sum(block.nbytes for block in changed),
            )

    def _as_registered(self, block: Block) -> bool:
        known = self.known[piece(block)]
        if known.quick is None:
            return self._digest(block) == known.digest
        return _same(copy.digests_of(block.storage), known.quick)

    def _as_shared(self, block: Block) -> bool:
        """Byte for byte: somebody else may have made the copy."""
        known, here = self.known[piece(block)], self._copy
        assert here is not None
        if block.device in self._near:
            return copying.same(Range(block.storage.data_ptr(), here.address + known.at, block.nbytes))
        whole = torch().frombuffer(_raw(here.address + known.at, block.nbytes), dtype=torch().uint8)
        return bool(torch().equal(copy.bytes_of(block.storage).cpu(), whole))

    def _fill(self, address: int, blocks: Sequence[Block]) -> None:
        near = [block for block in blocks if block.device in self._near]
        copying.copy_all([Range(address + self._at(b), b.storage.data_ptr(), b.nbytes) for b in near])
        for block in blocks:
            if block.device not in self._near:
                target = torch().frombuffer(
                    _raw(address + self._at(block), block.nbytes), dtype=torch().uint8
                )
                target.copy_(copy.bytes_of(block.storage))

    # ── back ───────────────────────────────────────────────────────────────

    def load(self, blocks: Sequence[Block]) -> int:
        """Fill these; returns the bytes copied. Raises ``OperationFailed`` (another try may help) and
        ``StateLost`` (what is to be read is not what it was)."""
        if self.policy == SHARE:
            self._load_shared(blocks)
        elif self._loader is not None:
            self._load_by(self._loader, blocks)
        else:
            reread.in_parallel(self._load_entry, blocks)
        if self.policy == DROP:  # a sealed copy cannot have changed
            for block, right in zip(blocks, reread.in_parallel(self._as_registered, blocks), strict=True):
                if not right:
                    self._lost(block)
        return sum(block.nbytes for block in blocks)

    def _load_shared(self, blocks: Sequence[Block]) -> None:
        assert self._copy is not None
        start = self._copy.address
        near = [block for block in blocks if block.device in self._near]
        copying.copy_fresh([Range(b.storage.data_ptr(), start + self._at(b), b.nbytes) for b in near])
        for block in blocks:
            if block.device not in self._near:
                raw = _raw(start + self._at(block), block.nbytes)
                copy.bytes_of(block.storage).copy_(torch().frombuffer(raw, dtype=torch().uint8))

    def _load_entry(self, block: Block) -> None:
        entry = self._entries[self.known[piece(block)].digest]
        if block.device in self._near:
            entry.read_into(block.storage.data_ptr())
            return
        target, at = copy.bytes_of(block.storage), 0
        for chunk in entry.chunks():
            target[at : at + len(chunk)].copy_(torch().frombuffer(bytearray(chunk), dtype=torch().uint8))
            at += len(chunk)

    def _load_by(self, loader: reread.Loader, blocks: Sequence[Block]) -> None:
        wanted: dict[bytes, list[Block]] = {}
        for block in blocks:
            wanted.setdefault(self.known[piece(block)].digest, []).append(block)
        sizes = {block.nbytes for block in blocks}
        for content in map(_plain, reread.loaded_by(loader)):
            if content.numel() in sizes:
                for block in wanted.pop(_sum(content), ()):
                    copy.bytes_of(block.storage).copy_(content)
        for missing in wanted.values():
            self._lost(missing[0])

    def _lost(self, block: Block) -> None:
        where = self._entries.get(self.known[piece(block)].digest) if self._loader is None else None
        raise StateLost(
            f"the frozen weights {block.name!r} cannot be read again: "
            f"{where.path if where else 'what reread returns'} is not what it was when this job registered. "
            "Put the same weights back and restart the job from its last checkpoint"
        )

    # ── what there is ──────────────────────────────────────────────────────

    def _read(self, block: Block) -> Known:
        near = block.device in self._near
        return Known(self._digest(block), block.nbytes, None if near else copy.digests_of(block.storage))

    def _digest(self, block: Block) -> bytes:
        if block.device in self._near:
            return reread.digest_at(block.storage.data_ptr(), block.nbytes)
        return _sum(copy.bytes_of(block.storage))

    def _find(self, source: Any) -> None:
        """Keep only what can be read again; raises ``ConfigError`` if that is nothing."""
        sizes = {known.size for known in self.known.values()}
        there: Collection[bytes]
        if self._loader is not None:
            tensors = map(_plain, reread.loaded_by(self._loader))
            there = {_sum(content) for content in tensors if content.numel() in sizes}
        else:
            self._paths = reread.paths_of(source)
            there = self._entries = reread.index(self._paths, sizes)
        kept = {key: known for key, known in self.known.items() if known.digest in there}
        if not kept:
            raise ConfigError(
                f"none of the {len(self.known)} frozen parameters (those without requires_grad, of 64 KiB or "
                f"more) is found in {', '.join(self._paths) or 'what reread returns'}: give the very weights "
                "that are on the device, in the same dtype, or use frozen='keep'"
            )
        if len(kept) < len(self.known):
            _log.info(
                "coslice: %d of %d frozen parameters are not in what reread names: host memory keeps them",
                len(self.known) - len(kept),
                len(self.known),
            )
        self.known = kept

    def _lay_out(self) -> None:
        """Places in the shared copy: the same for all who have the same pieces, in whatever order."""
        places: dict[bytes, int] = {}
        end = 0
        for digest, size in sorted({(known.digest, known.size) for known in self.known.values()}):
            places[digest], end = end, end + -(-size // ALIGN) * ALIGN
        for known in self.known.values():
            known.at = places[known.digest]
        listed = "\n".join(f"{digest.hex()} {at}" for digest, at in sorted(places.items()))
        self.digest = hashlib.sha256(f"coslice base 1\n{listed}".encode()).hexdigest() if places else ""
        self.size = end

    def _at(self, block: Block) -> int:
        return self.known[piece(block)].at


def _same(now: Any, then: Any) -> bool:
    return now is not None and then is not None and bool(torch().equal(now, then))


def _plain(tensor: Any) -> Any:
    """A loader's tensor as bytes."""
    if not isinstance(tensor, torch().Tensor):
        raise OperationFailed(f"reread returned a {type(tensor).__name__} among its tensors")
    return tensor.detach().contiguous().view(-1).view(torch().uint8)


def _sum(content: Any) -> bytes:
    total = hashlib.sha256()
    for at in range(0, content.numel(), reread.CHUNK):
        part = content[at : at + reread.CHUNK].cpu()
        total.update(_raw(part.data_ptr(), part.numel()))
    return total.digest()


def _raw(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)
