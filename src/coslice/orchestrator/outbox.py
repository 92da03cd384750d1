"""Messages on their way to one stream. ``put`` never blocks, so a driver may call it between two steps.

Bounded: a peer that stopped reading loses its stream, not our memory.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import grpc
from msgspec import Struct

M = TypeVar("M")
LIMIT = 4096


class End(Struct, frozen=True):
    """How the stream ends once everything before it was sent."""

    status: grpc.StatusCode = grpc.StatusCode.OK
    message: str = ""


class Outbox(Generic[M]):
    """One reader (the stream's handler); writers are anywhere on the same loop."""

    def __init__(self) -> None:
        self._messages: deque[M] = deque()
        self._end: End | None = None
        self._wake: asyncio.Future[None] | None = None

    @property
    def end(self) -> End:
        return self._end or End()

    def put(self, message: M) -> None:
        if self._end is not None:
            return
        if len(self._messages) >= LIMIT:
            self._messages.clear()
            self.close(
                End(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{LIMIT} messages wait: the peer does not read")
            )
            return
        self._messages.append(message)
        self._notify()

    def put_first(self, message: M) -> None:
        """Before whatever is there already: a welcome, while nobody drains yet."""
        self._messages.appendleft(message)

    def close(self, end: End) -> None:
        """Nothing is accepted any more; the first to close says how the stream ends."""
        if self._end is None:
            self._end = end
            self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def __aiter__(self) -> AsyncIterator[M]:
        while True:
            while self._messages:
                yield self._messages.popleft()
            if self._end is not None:
                return
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
