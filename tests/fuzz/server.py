"""A server under fire: its process, its rpcs by name with raw bytes, and what every answer must be like."""

from collections.abc import Iterable
from typing import Any

import grpc

from coslice.wire.v1 import coslice_pb2 as pb

BOUND = 30.0
UNHANDLED = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED}
"""What gRPC says when a handler broke, and that it did not come to an end."""


class Server:
    """``address`` of a process that ``alive`` asks about."""

    def __init__(self, address: str, service: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.methods = pb.DESCRIPTOR.services_by_name[service].methods_by_name

    def call(self, method: str, requests: Iterable[bytes], *, answers: int = 1000) -> grpc.StatusCode:
        """Send bytes, read up to so many answers, then hang up. The status, which must be a handled one."""
        found = self.methods[method]
        name = f"/{found.containing_service.full_name}/{method}"
        sent = list(requests)
        try:
            if found.client_streaming:
                stream = self.channel.stream_stream(name, _same, _same)(iter(sent), timeout=BOUND)
                self._read(stream, answers)
            elif found.server_streaming:
                stream = self.channel.unary_stream(name, _same, _same)(sent[0], timeout=BOUND)
                self._read(stream, answers)
            else:
                self.channel.unary_unary(name, _same, _same)(sent[0], timeout=BOUND)
        except grpc.RpcError as error:
            status: grpc.StatusCode = error.code()
            if status in UNHANDLED:
                raise AssertionError(f"{method} broke: {error}") from None
            return status
        return grpc.StatusCode.OK

    def _read(self, stream: Any, answers: int) -> None:
        for count, _ in enumerate(stream, 1):
            if count >= answers:
                stream.cancel()
                return

    def close(self) -> None:
        self.channel.close()


def _same(data: bytes) -> bytes:
    return data
