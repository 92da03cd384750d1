"""What one end of a ``grpc.aio`` stream has to say, and when.

Nothing follows the first message before the other end has answered it: ``grpc.aio`` loses a refusal, with all
that it says, where it crosses with a message (https://github.com/grpc/grpc/issues/36066).
"""

import asyncio
from typing import Generic, TypeVar

M = TypeVar("M")


class Outgoing(Generic[M]):
    """Messages for a stream, until ``end``. No generator: gRPC drops its iterator when a call ends, and one
    that waits cannot be closed."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[M | None] = asyncio.Queue()
        self._answered = asyncio.Event()
        self._begun = False

    def put(self, message: M) -> None:
        self._queue.put_nowait(message)

    def end(self) -> None:
        self._queue.put_nowait(None)

    def answered(self) -> None:
        """The other end spoke, or the stream is over."""
        self._answered.set()

    def __aiter__(self) -> "Outgoing[M]":
        return self

    async def __anext__(self) -> M:
        if self._begun:
            await self._answered.wait()
        self._begun = True
        if (message := await self._queue.get()) is None:
            raise StopAsyncIteration
        return message
