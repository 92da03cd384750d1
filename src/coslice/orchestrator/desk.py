"""Where calls arrive, whoever is in office: they go to the services of the present term, and while this
process stands by they are refused, with the leader's address.

Streams wait here while no leader is known: hundreds that have lost theirs need not ask again and again. If it
is this process that is elected, they are served where they wait, and need not dial at all.

The gRPC server outlives terms, so that its port is ours throughout and clients need not connect anew.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import grpc
import grpc.aio

from coslice.store.election import Hearsay, Seat
from coslice.wire.leader import LEADER, LEADER_FOR_AGENTS, LEADER_ID, SILENT, STANDS_BY

HOLD_S = 10.0
"""So long a stream waits here for a leader to be known."""

Handler = Any  # grpc.RpcMethodHandler, and
Handlers = Any  # grpc.GenericRpcHandler, are generic in the stubs only
Context = Any  # grpc.aio.ServicerContext


class Stream(NamedTuple):
    """A method, and how its messages are read and written. (To its handler it is the details of a call.)"""

    method: str
    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]
    invocation_metadata: tuple[()] = ()


class Desk(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """``services``: the full names that it answers for; ``streams``: those of their methods whose callers may
    wait here. Services register as with a server."""

    def __init__(self, services: tuple[str, ...], streams: tuple[Stream, ...]) -> None:
        self._prefixes = tuple(f"/{name}/" for name in services)
        self._waits = {stream.method: self._wait(stream) for stream in streams}
        self.hearsay: Hearsay | None = None
        """Of the election that this process stands in."""
        self._handlers: list[Handlers] = []

    def add_generic_rpc_handlers(self, handlers: tuple[Handlers, ...]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """The generated code offers the same handlers in both ways."""

    def close(self) -> None:
        """Nobody is in office."""
        self._handlers = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        method = handler_call_details.method
        if not method.startswith(self._prefixes):
            return None
        if self._handlers:
            return self._in_office(handler_call_details)
        return self._waits.get(method) or grpc.stream_stream_rpc_method_handler(self._refuse)

    def _in_office(self, details: Any) -> Handler | None:
        for handler in self._handlers:
            if (found := handler.service(details)) is not None:
                return found
        return None

    def _wait(self, stream: Stream) -> Handler:
        async def wait(messages: AsyncIterator[object], context: Context) -> None:
            # An answer that crosses with a caller's message is lost by grpc.aio, with what it says of the
            # leader (https://github.com/grpc/grpc/issues/36066): we hear the first one before we answer.
            said = _Said(aiter(messages))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HOLD_S):
                    await said.hear()
                    await self._known(context)
            found = self._in_office(stream)
            if found is None:
                await self._refuse(messages, context)
            else:
                await found.stream_stream(said, context)

        return grpc.stream_stream_rpc_method_handler(wait, stream.read, stream.write)

    async def _known(self, context: Context) -> None:
        """Returns once there is somewhere to send the caller to that it did not try."""
        shown = {str(name): str(value) for name, value in context.invocation_metadata() or ()}
        if self.hearsay is not None:
            with self.hearsay.calling():
                await self.hearsay.other_leader(shown.get(SILENT, ""))

    async def _refuse(self, messages: object, context: Context) -> None:
        seat: Seat | None = self.hearsay.leader if self.hearsay is not None else None
        if seat is None or not seat.address:
            text = f"{STANDS_BY}; no leader is known"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)
            return
        where = (
            (LEADER, seat.address),
            (LEADER_FOR_AGENTS, seat.agents or seat.address),
            (LEADER_ID, seat.id),
        )
        text = f"{STANDS_BY}; the leader is at {seat.address}"
        await context.abort(grpc.StatusCode.UNAVAILABLE, text, trailing_metadata=where)


class _Said:
    """A caller's messages, of which the first was heard already."""

    def __init__(self, messages: AsyncIterator[object]) -> None:
        self._messages = messages
        self._first: list[object] = []

    async def hear(self) -> None:
        with contextlib.suppress(StopAsyncIteration):
            self._first.append(await anext(self._messages))

    def __aiter__(self) -> "_Said":
        return self

    async def __anext__(self) -> object:
        return self._first.pop() if self._first else await anext(self._messages)
