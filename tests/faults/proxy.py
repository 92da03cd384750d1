"""A TCP proxy on loopback that treats connections badly, on demand and not by chance.

Runs in a thread with an event loop of its own; the tests call it from theirs.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
CHUNK = 64 << 10


class Proxy:
    """``address`` forwards to ``target`` (``host:port``).

    ``drop``: every connection is reset. ``refuse``: new ones end at once. ``delay``: seconds that each chunk
    waits, both ways, in order. ``hole``: nothing is forwarded, nothing is closed. ``half_close``: the server
    sees the client's end of each connection, the client sees nothing.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._links: set[_Link] = set()
        self._serving: set[asyncio.Task[Any]] = set()
        self._delay, self._refusing = 0.0, False
        self._open: asyncio.Event
        self._server: asyncio.Server
        self.address = self._call(self._start())

    def drop(self) -> int:
        """How many connections it reset."""
        return self._call(self._drop())

    def refuse(self, refusing: bool = True) -> None:
        self._refusing = refusing

    def delay(self, seconds: float) -> None:
        self._delay = seconds

    def hole(self, holding: bool = True) -> None:
        self._call(self._hold(holding))

    def half_close(self) -> None:
        self._call(self._half_close())

    def close(self) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    # ── on the loop ────────────────────────────────────────────────────────

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)

    async def _start(self) -> str:
        self._open = asyncio.Event()
        self._open.set()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        if self._refusing:
            writer.transport.abort()
            return
        try:
            there = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        link = _Link((reader, writer), there)
        self._links.add(link)
        try:
            await asyncio.gather(
                self._pump(reader, there[1]), self._pump(there[0], writer), return_exceptions=True
            )
        finally:
            self._links.discard(link)
            link.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            await self._open.wait()
            if self._delay:
                await asyncio.sleep(self._delay)
            writer.write(data)
            await writer.drain()
        await self._open.wait()
        if writer.can_write_eof():
            writer.write_eof()

    async def _drop(self) -> int:
        links = list(self._links)
        for link in links:
            link.abort()
        return len(links)

    async def _hold(self, holding: bool) -> None:
        if holding:
            self._open.clear()
        else:
            self._open.set()

    async def _half_close(self) -> None:
        for link in list(self._links):
            with contextlib.suppress(OSError, RuntimeError):
                link.there[1].write_eof()

    async def _stop(self) -> None:
        self._server.close()
        await self._hold(False)
        await self._drop()
        await asyncio.gather(*self._serving, return_exceptions=True)


class _Link:
    Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]

    def __init__(self, here: Ends, there: Ends) -> None:
        self.here, self.there = here, there

    def abort(self) -> None:
        for _, writer in (self.here, self.there):
            writer.transport.abort()
