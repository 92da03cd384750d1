"""Bytes that are no message end their call with ``INVALID_ARGUMENT``, before a handler sees them.

Without this gRPC calls the handler broken (``UNKNOWN``) and logs a traceback for each: whoever can connect
could fill the log. A stream ends for its handler as if the caller had hung up there.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

Handler = Any  # grpc.RpcMethodHandler, which is generic in the stubs only
Context = Any  # grpc.aio.ServicerContext


class _Malformed:
    """In the place of a message."""


class RefuseMalformed(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}
        """By method: the handler last seen there, and what it became."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        seen, wrapped = self._wrapped.get(handler_call_details.method, (None, None))
        if seen is not handler:
            wrapped = _tolerant(handler)
            self._wrapped[handler_call_details.method] = handler, wrapped
        return wrapped


def _tolerant(handler: Handler) -> Handler:
    parse = handler.request_deserializer

    def tolerant(data: bytes) -> object:
        try:
            return parse(data)
        except DecodeError:
            return _Malformed()

    changes: dict[str, Any] = {"request_deserializer": tolerant}
    for shape, wrap in (
        ("unary_unary", _unary),
        ("unary_stream", _unary_stream),
        ("stream_unary", _stream),
        ("stream_stream", _stream),
    ):
        if (behaviour := getattr(handler, shape)) is not None:
            changes[shape] = wrap(behaviour)
    return handler._replace(**changes)


async def _refuse(context: Context) -> None:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "these bytes are no message of this call")


def _unary(behaviour: Any) -> Any:
    async def call(request: object, context: Context) -> Any:
        if isinstance(request, _Malformed):
            await _refuse(context)
        return await behaviour(request, context)

    return call


def _unary_stream(behaviour: Any) -> Any:
    if not inspect.isasyncgenfunction(behaviour):
        return _unary(behaviour)

    async def call(request: object, context: Context) -> AsyncIterator[Any]:
        if isinstance(request, _Malformed):
            await _refuse(context)
        async for answer in behaviour(request, context):
            yield answer

    return call


class _Messages:
    """The caller's messages up to the first that is none."""

    def __init__(self, messages: AsyncIterator[object]) -> None:
        self._messages = messages
        self.malformed = False

    def __aiter__(self) -> "_Messages":
        return self

    async def __anext__(self) -> object:
        if self.malformed:
            raise StopAsyncIteration
        message = await anext(self._messages)
        if isinstance(message, _Malformed):
            self.malformed = True
            raise StopAsyncIteration
        return message


def _stream(behaviour: Any) -> Any:
    """Of the same kind as the handler: one that writes by itself is told of a cancellation at once."""
    if inspect.isasyncgenfunction(behaviour):

        async def generate(messages: AsyncIterator[object], context: Context) -> AsyncIterator[Any]:
            checked = _Messages(aiter(messages))
            async for answer in behaviour(checked, context):
                yield answer
            if checked.malformed:
                await _refuse(context)

        return generate

    async def call(messages: AsyncIterator[object], context: Context) -> Any:
        checked = _Messages(aiter(messages))
        answer = await behaviour(checked, context)
        if checked.malformed:
            await _refuse(context)
        return answer

    return call
