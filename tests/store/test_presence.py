"""Whether a process is gone is known only from one who reached it."""

import asyncio

from store.listener import Listener

from coslice.store import Seat
from coslice.store.presence import AGAIN_S, Presence

BOUND = 20.0


async def test_it_is_gone_when_nobody_listens_where_somebody_did() -> None:
    presence = Presence()
    async with Listener() as process:
        seat = Seat(process.address, id="it")
        gone = asyncio.ensure_future(presence.gone(seat))
        async with asyncio.timeout(BOUND):
            await process.visited.wait()
            for _ in range(3):  # it hangs up, and is there all the same
                process.hang_up()
                await process.visited.wait()
        assert not gone.done()
    async with asyncio.timeout(BOUND):
        await gone
        await presence.gone(seat)  # also if it is asked again
    another = asyncio.ensure_future(presence.gone(Seat(process.address, id="another")))
    await asyncio.sleep(2 * AGAIN_S)  # time for an answer that must not come
    assert not another.done()
    another.cancel()


async def test_of_one_that_was_never_reached_nothing_is_known() -> None:
    for address in ("127.0.0.1:1", "unix:/nowhere", ""):
        gone = asyncio.ensure_future(Presence().gone(Seat(address)))
        await asyncio.sleep(0.05)  # time for an answer that must not come
        assert not gone.done()
        gone.cancel()
