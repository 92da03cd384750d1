"""Who writes, where several processes could: at most one leads at a time, and everybody learns who.

A ``Tenure`` is one stretch of leading. Its store writes nothing once another leads, whatever this process
believes: that is decided where the state is, not by a clock. A store of one process alone is led by that one.
"""

import asyncio
from typing import Protocol

import msgspec

from coslice.store.base import Store, StoreError


class Seat(msgspec.Struct, frozen=True):
    """What a candidate says of itself: where clients dial it, and agents if elsewhere."""

    address: str
    agents: str = ""


class Deposed(StoreError):
    """A write of one who leads no longer: it was refused."""


class Tenure:
    """From being elected until somebody else may be. Ends once."""

    def __init__(self, term: int = 1) -> None:
        self.term = term
        """Grows with every leader."""
        self.over = ""
        """Why it ended; empty while it lasts."""
        self._ended = asyncio.Event()

    def end(self, reason: str) -> None:
        self.over = self.over or reason
        self._ended.set()

    async def ended(self) -> str:
        """Returns, with the reason, once this process leads no longer."""
        await self._ended.wait()
        return self.over

    def check(self) -> None:
        if self.over:
            raise Deposed(f"this process leads no longer: {self.over}")


class Election(Protocol):
    leader: Seat | None
    """Who leads; None while nobody does, or it is not known who."""

    @property
    def shared(self) -> bool:
        """Others may lead meanwhile. False: ``campaign`` succeeds at once, or never."""
        ...

    async def campaign(self) -> tuple[Tenure, Store]:
        """Returns once this process leads, with a store that is still to be loaded. Rides out whatever ails
        the place where the state is.

        Raises ``ConfigError`` for what waiting does not mend. Cancelled, it leaves no trace.
        """
        ...

    async def close(self) -> None:
        """Stop leading, so that the next one need not wait. After the store was closed. Idempotent."""
        ...


class Alone:
    """A store that no other process can share: a file, or this process's memory."""

    shared = False

    def __init__(self, store: Store) -> None:
        self._store = store
        self.leader: Seat | None = None

    async def campaign(self) -> tuple[Tenure, Store]:
        return Tenure(), self._store

    async def close(self) -> None:
        pass
