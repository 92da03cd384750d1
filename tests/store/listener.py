"""Something that listens, as the process of a leader does, and that is gone at the end."""

import asyncio
from types import TracebackType
from typing import Self


class Listener:
    def __init__(self) -> None:
        self.visited = asyncio.Event()
        self.address = ""
        self._server: asyncio.Server | None = None
        self._visits: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._visit, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def _visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._visits.append(writer)
        self.visited.set()

    def hang_up(self) -> None:
        """On all who are connected; it listens on."""
        self.visited.clear()
        while self._visits:
            self._visits.pop().transport.abort()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()
