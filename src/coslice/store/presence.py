"""Is the process that leads still there? Its machine tells sooner than its lease does.

Only what a kernel says counts: a connection that stood has ended, and a new one is refused. A machine that is
silent, cut off or was never reached says nothing; then the lease decides. To be wrong costs a change of
leaders and nothing else: who may write is not decided here.
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from coslice.store.election import Seat

T = TypeVar("T")

CONNECT_S, AGAIN_S = 2.0, 0.2


class Presence:
    """What one standby knows of leaders' processes."""

    def __init__(self) -> None:
        self._reached: set[Seat] = set()

    async def gone(self, seat: Seat) -> None:
        """Returns once nobody listens any more at the seat's address, where we reached somebody while it led.
        Waits for as long as that cannot be told."""
        host, _, port = seat.address.rpartition(":")
        if host.startswith("unix") or not port.isdigit():
            await asyncio.Event().wait()
        while True:
            try:
                reader, writer = await _connected(host.strip("[]"), int(port))
            except ConnectionRefusedError:
                if seat in self._reached:
                    return
            except (OSError, TimeoutError):  # unreachable, too slow, or dying just now
                pass
            else:
                self._reached.add(seat)
                try:
                    await _ended(reader)
                finally:
                    writer.close()
                continue
            await asyncio.sleep(AGAIN_S)  # nobody tells when it can be reached


async def _connected(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(CONNECT_S):
        return await asyncio.open_connection(host, port)


async def _ended(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(4096):
            pass


async def first_of(*works: Awaitable[T]) -> T:
    """The result of the first that is done; the others are cancelled, and over when this returns."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
