"""Where calls arrive, whoever is in office: they go to the services of the present term, and while this
process stands by they are refused, with the leader's address.

The gRPC server outlives terms, so that its port is ours throughout and clients need not connect anew.
"""

import asyncio
from typing import Any

import grpc
import grpc.aio

from coslice.store.election import Hearsay, Seat
from coslice.wire.leader import LEADER, LEADER_FOR_AGENTS, LEADER_ID, SILENT

HOLD_S = 10.0
"""So long a stream waits here for a leader to be known: hundreds that have lost theirs need not ask again and
again."""

Handler = Any  # grpc.RpcMethodHandler, and
Handlers = Any  # grpc.GenericRpcHandler, are generic in the stubs only
Context = Any  # grpc.aio.ServicerContext


class Desk(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """``services``: the full names that it answers for. Services register as with a server."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._prefixes = tuple(f"/{name}/" for name in services)
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
        if not handler_call_details.method.startswith(self._prefixes):
            return None
        if not self._handlers:
            waits = handler_call_details.method.endswith(("/Session", "/Attach"))
            return grpc.stream_stream_rpc_method_handler(self._refuse_later if waits else self._refuse)
        for handler in self._handlers:
            if (found := handler.service(handler_call_details)) is not None:
                return found
        return None

    async def _refuse_later(self, messages: object, context: Context) -> None:
        """Once there is somewhere to send the caller to that it did not try."""
        shown = {str(name): str(value) for name, value in context.invocation_metadata() or ()}
        if self.hearsay is not None:
            try:
                async with asyncio.timeout(HOLD_S):
                    await self.hearsay.other_leader(shown.get(SILENT, ""))
            except TimeoutError:
                pass
        await self._refuse(messages, context)

    async def _refuse(self, messages: object, context: Context) -> None:
        seat: Seat | None = self.hearsay.leader if self.hearsay is not None else None
        if seat is None or not seat.address:
            text = "this orchestrator stands by; no leader is known"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)
            return
        where = (
            (LEADER, seat.address),
            (LEADER_FOR_AGENTS, seat.agents or seat.address),
            (LEADER_ID, seat.id),
        )
        text = f"this orchestrator stands by; the leader is at {seat.address}"
        await context.abort(grpc.StatusCode.UNAVAILABLE, text, trailing_metadata=where)
