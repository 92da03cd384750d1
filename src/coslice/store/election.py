"""Who writes, where several processes could: at most one leads at a time, and everybody learns who.

A ``Tenure`` is one stretch of leading. Its store writes nothing once another leads, whatever this process
believes: that is decided where the state is, not by a clock. A store of one process alone is led by that one.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

import msgspec

from coslice.store.base import Store, StoreError

HEAD_START_S = 0.5


class Seat(msgspec.Struct, frozen=True):
    """What a candidate says of itself: where clients dial it, and agents if elsewhere."""

    address: str
    agents: str = ""
    id: str = ""
    """Of the process: one that comes back at the same address is another."""


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
        self._lasting: set[asyncio.Timeout] = set()

    def end(self, reason: str) -> None:
        if self.over:
            return
        self.over = reason
        self._ended.set()
        for within in self._lasting:
            within.reschedule(asyncio.get_running_loop().time())

    async def ended(self) -> str:
        """Returns, with the reason, once this process leads no longer."""
        await self._ended.wait()
        return self.over

    def check(self) -> None:
        if self.over:
            raise Deposed(f"this process leads no longer: {self.over}")

    @contextlib.asynccontextmanager
    async def lasting(self) -> AsyncIterator[None]:
        """What is within ends with the tenure, wherever it is: then raises ``Deposed``."""
        self.check()
        try:
            async with asyncio.timeout(None) as within:
                self._lasting.add(within)
                try:
                    yield
                finally:
                    self._lasting.discard(within)
        except TimeoutError:
            self.check()
            raise


class Hearsay:
    """Who leads, as far as one candidate knows, and waiting for it."""

    def __init__(self) -> None:
        self._leader: Seat | None = None
        self._heard = asyncio.Event()
        self._callers = 0
        self._called = asyncio.Event()

    @property
    def callers(self) -> int:
        """How many wait at this candidate for a leader to be known."""
        return self._callers

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """One of them."""
        self._callers += 1
        self._called.set()
        try:
            yield
        finally:
            self._callers -= 1
            if not self._callers:
                self._called.clear()

    async def give_way(self) -> None:
        """Before one who stood by is elected: where callers wait already they need not dial again, so a
        candidate without any lets others go first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAD_START_S):
                await self._called.wait()

    @property
    def leader(self) -> Seat | None:
        """None while nobody leads, or it is not known who. Of itself a candidate says it once it serves."""
        return self._leader

    @leader.setter
    def leader(self, seat: Seat | None) -> None:
        if seat != self._leader:
            self._leader = seat
            self._heard.set()
            self._heard = asyncio.Event()

    async def other_leader(self, than: str) -> Seat:
        """Returns once a leader with another id is known."""
        while self._leader is None or self._leader.id == than:
            await self._heard.wait()
        return self._leader


class Election(Protocol):
    @property
    def hearsay(self) -> Hearsay: ...

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

    async def candidates(self) -> list[Seat]:
        """Who leads or would, as the place where the state is knows it: one that died is missing soon.

        Raises ``StoreError``.
        """
        ...

    def lease_left(self) -> float:
        """Seconds that this process leads on if nothing more is confirmed. Of a tenure that goes on."""
        ...

    async def close(self) -> None:
        """Stop leading, so that the next one need not wait. After the store was closed. Idempotent."""
        ...


class Alone:
    """A store that no other process can share: a file, or this process's memory."""

    shared = False

    def __init__(self, store: Store) -> None:
        self._store, self.hearsay = store, Hearsay()

    async def campaign(self) -> tuple[Tenure, Store]:
        return Tenure(), self._store

    async def candidates(self) -> list[Seat]:
        return []

    def lease_left(self) -> float:
        return math.inf

    async def close(self) -> None:
        pass
