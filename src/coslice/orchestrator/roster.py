"""Which orchestrators there are, for those who ask the one that leads.

Who stands by is known where the state is. That is asked at most once in ``FRESH_S``, for at most ``ASK_S``;
while it does not answer, what was known last is told.
"""

import asyncio
from collections.abc import Iterable

from coslice.errors import ConfigError
from coslice.runtime.clock import Clock
from coslice.store.base import StoreError
from coslice.store.election import Election, Seat, Tenure
from coslice.wire.v1 import coslice_pb2 as pb

FRESH_S = 1.0
ASK_S = 0.5


class Roster:
    """Of one term. ``seat``: of this process."""

    def __init__(self, election: Election, seat: Seat, tenure: Tenure, clock: Clock) -> None:
        self._election, self._seat, self._tenure, self._clock = election, seat, tenure, clock
        self._since = clock.now()
        self._others: tuple[Seat, ...] | None = None
        self._asked = -FRESH_S
        self._asking = asyncio.Lock()

    @property
    def standbys(self) -> int | None:
        """How many were known last; None: nobody has been able to say in this term."""
        return len(self._others) if self._others is not None else None

    async def refresh(self) -> None:
        async with self._asking:
            if self._clock.now() - self._asked >= FRESH_S:
                await self._ask()
                self._asked = self._clock.now()

    async def status(self) -> list[pb.OrchestratorStatus]:
        """The leader, which is this process, and then those who stand by."""
        await self.refresh()
        leader = pb.OrchestratorStatus(
            address=self._seat.address,
            leads=True,
            since_s=max(0.0, self._clock.now() - self._since),
            lease_left_s=max(0.0, self._election.lease_left()),
            term=self._tenure.term,
        )
        return [leader, *(pb.OrchestratorStatus(address=other.address) for other in self._others or ())]

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                self._others = _without(self._seat, await self._election.candidates())
        except (StoreError, ConfigError, TimeoutError):
            pass


def _without(one: Seat, seats: Iterable[Seat]) -> tuple[Seat, ...]:
    """Those who stand by at an address, the others than ``one``, by address."""
    addresses = {seat.address: seat for seat in seats if seat.address and seat.id != one.id}
    return tuple(addresses[address] for address in sorted(addresses))
