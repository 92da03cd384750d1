"""Adapters: what a process can have state in. Each is one module; ``Adapter`` is the contract.

A move has the same steps for all, in two phases so that nothing is freed before everything is safe::

    out:  take → save → free              (undone by: allocate → load → finish)
    back: allocate → load → finish        (undone by: free)

The mover (``registry``) calls them, in one thread, outside accelerator sections. Adapters do not know each
other.
"""

from collections.abc import Set as AbstractSet
from typing import Protocol

from coslice.workload.buffers import HostBuffer


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
