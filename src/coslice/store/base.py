"""What durable state is to the rest of coslice: small values under keys, each with a version, compare-and-
swap.

Whoever saves says which version it has seen; nobody can overwrite what he does not know. ``save`` returns
once the value survives the loss of the process (and, where the store promises it, of power). Any
implementation has to pass ``coslice.testing.store_contract``.
"""

from typing import Protocol

from coslice.errors import CosliceError


class StoreError(CosliceError):
    """The store cannot take or give state (disk full, damaged, closed). What was acknowledged before
    stands."""


class NoAnswer(StoreError):
    """Nobody answered in time, or was able to. What was asked may have happened all the same."""


class Conflict(StoreError):
    """Somebody else wrote the key, or it is gone: ``data`` has ``key``, ``expected`` and ``found``."""

    def __init__(self, key: str, *, expected: int, found: int) -> None:
        super().__init__(
            f"{key!r} is at version {found}, not {expected}: another writer owns it; read it again first",
            data={"key": key, "expected": str(expected), "found": str(found)},
        )


class Store(Protocol):
    """Versions are positive, grow, and are never given twice in the life of a store object. 0: no such
    key."""

    async def load(self) -> dict[str, tuple[bytes, int]]:
        """All values with their versions, in the order of their keys. Opens the store if need be.

        Raises ``ConfigError`` where the store cannot be opened by its location's fault: held by another
        process, not ours, damaged, too new.
        """
        ...

    async def save(self, key: str, value: bytes, *, expect: int) -> int:
        """Write if the key's version is ``expect`` (0: must not exist); returns the new version. Raises
        ``Conflict``."""
        ...

    async def delete(self, key: str, *, expect: int) -> None:
        """Raises ``Conflict`` unless the key's version is ``expect``."""
        ...

    async def close(self) -> None:
        """Finish what was accepted, then let go. Idempotent; everything afterwards raises ``StoreError``."""
        ...
