"""Is the process that leads still there? Its machine tells sooner than its lease does.

Only what a kernel says counts: a connection that stood has ended, and a new one is refused. A machine that is
silent, cut off or was never reached says nothing; then the lease decides. To be wrong costs a change of
leaders and nothing else: who may write is not decided here.
"""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

CONNECT_S = 5.0


async def process_gone(address: str) -> None:
    """Returns once nobody listens any more at ``host:port`` where somebody did when this was called. Waits
    for ever where that cannot be told."""
    host, _, port = address.rpartition(":")
    if not host.startswith("unix") and port.isdigit():
        with contextlib.suppress(OSError, TimeoutError):  # unreachable, or too slow: not for us to tell
            reader, writer = await _connected(host.strip("[]"), int(port))
            while True:
                try:
                    await _ended(reader)
                finally:
                    writer.close()
                try:
                    reader, writer = await _connected(host.strip("[]"), int(port))
                except ConnectionRefusedError:
                    return
    await asyncio.Event().wait()


async def _connected(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(CONNECT_S):
        return await asyncio.open_connection(host, port)


async def _ended(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
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
