"""Where calls arrive, whoever is in office: they go to the services of the present term, and while this
process stands by they are refused, with the leader's address.

The gRPC server outlives terms, so that its port is ours throughout and clients need not connect anew.
"""

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from coslice.store.election import Seat
from coslice.wire.leader import LEADER, LEADER_FOR_AGENTS

Handler = Any  # grpc.RpcMethodHandler, and
Handlers = Any  # grpc.GenericRpcHandler, are generic in the stubs only


class Desk(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """``services``: the full names that it answers for. Services register as with a server."""

    def __init__(self, services: tuple[str, ...], leader: Callable[[], Seat | None]) -> None:
        self._prefixes = tuple(f"/{name}/" for name in services)
        self._leader = leader
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
            return grpc.stream_stream_rpc_method_handler(self._refuse)
        for handler in self._handlers:
            if (found := handler.service(handler_call_details)) is not None:
                return found
        return None

    async def _refuse(self, messages: object, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        seat = self._leader()
        if seat is None or not seat.address:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, "this orchestrator stands by; no leader is known"
            )
        where = ((LEADER, seat.address), (LEADER_FOR_AGENTS, seat.agents or seat.address))
        text = f"this orchestrator stands by; the leader is at {seat.address}"
        await context.abort(grpc.StatusCode.UNAVAILABLE, text, trailing_metadata=where)
