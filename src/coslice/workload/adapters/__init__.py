"""Adapters: what a process can have state in. Each is one module; ``Adapter`` is the contract.

A move has the same steps for all, in two phases so that nothing is freed before everything is safe::

    out:  take → save → free              (undone by: allocate → load → finish)
    back: allocate → load → finish        (undone by: free)

The mover (``registry``) calls them, in one thread, outside accelerator sections. Adapters do not know each
other.
"""

from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol, runtime_checkable

from coslice.workload.buffers import Buffers, HostBuffer

KEEP, DROP, SHARE = POLICIES = ("keep", "drop", "share")
"""What becomes of frozen parameters; see ``torch_base``."""


class Taken(Protocol):
    """State that is on its way out, out, or on its way back."""

    registered: int
    """Bytes of device memory that leave."""
    kept: int
    """Bytes that need room in the buffer; fewer where bytes are dropped."""
    keys: AbstractSet[int]
    """Names of its storages, for ``seen``."""

    def save(self, buffer: HostBuffer | None, offset: int) -> None:
        """Copy to the buffer; changes nothing. ``buffer`` is None when nothing is kept."""
        ...

    def free(self) -> None:
        """Give the device memory up. Repeating it is harmless."""
        ...

    def allocate(self) -> None:
        """Get device memory again; raises ``NoRoom``. Repeating it is harmless."""
        ...

    def load(self, buffer: HostBuffer | None, offset: int) -> None: ...

    def finish(self) -> None:
        """The bytes are back: make the state usable."""
        ...


@runtime_checkable
class Slotted(Taken, Protocol):
    """A ``Taken`` of many pieces, each with a place of its own in the buffer, the same in every move.

    So it can be copied only where it changed, and be moved in parts.
    """

    copied: int
    """Bytes that were really copied, by the last ``save`` or ``load``."""
    seconds: float
    """Spent on that (making pages not included)."""

    def slots(self) -> Sequence[tuple[Hashable, int]]:
        """Name and size of each piece that needs room in the buffer. Names are unique within the adapter."""
        ...

    def placed(self, offsets: Sequence[int]) -> None:
        """Where ``slots`` lie, in their order. Said before each ``save`` and ``load``, whose offset is 0."""
        ...

    def split(self) -> "Sequence[Slotted]":
        """The same in parts, to be moved one after the other."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """An ``Adapter`` that can move a part of its state and leave the rest."""

    def take_part(self, least: int, *, seen: set[int]) -> "Taken | None":
        """Pieces of at least so many bytes (or all there are), the least recently used ones."""
        ...

    def used(self, tags: Iterable[str]) -> None:
        """These regions were used now."""
        ...


class Frugal(Protocol):
    """What of an adapter's state needs no host memory of this process."""

    @property
    def nbytes(self) -> int: ...

    @property
    def shared(self) -> tuple[str, int] | None:
        """Digest and bytes of the one copy that all processes with the same have; None: there is none."""
        ...

    @property
    def here(self) -> bool:
        """Is one copy on the device in use by this process and maybe others? It is in no figure of ours."""
        ...

    def lend(self, buffers: Buffers) -> None:
        """Where a shared copy comes from."""
        ...


@runtime_checkable
class Based(Protocol):
    """An ``Adapter`` that may have such state."""

    base: Frugal | None

    def join(self, *, fresh: bool) -> None:
        """Have it in the one copy on the device that processes with the same share, where that may be.
        ``fresh``: it was registered just now."""
        ...

    def part(self) -> None:
        """Take it out of there for good."""
        ...


class Adapter(Protocol):
    leaves_first: bool
    """And so returns last, when the others' state can be used."""

    def measure(self, seen: set[int]) -> int:
        """Registered bytes now on the device; storages in ``seen`` belong to others, own ones are added."""
        ...

    def take(self, *, discard: bool, tags: AbstractSet[str], seen: set[int]) -> Taken | None:
        """What would move now (``tags`` empty: everything). Found anew each time. None: nothing."""
        ...

    def survey(self, seen: set[int]) -> tuple[int, Taken | None]:
        """``measure``, and what should move once to lie side by side afterwards. None: nothing worth it."""
        ...

    def device_bytes(self) -> int:
        """What the framework holds of the device, where the system cannot see it; 0: the system sees it."""
        ...
