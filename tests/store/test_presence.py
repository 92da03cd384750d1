"""Whether a process is gone is known only from those who were reached once."""

import asyncio

from store.listener import Listener

from coslice.store.presence import process_gone

BOUND = 20.0


async def test_it_is_gone_when_nobody_listens_where_somebody_did() -> None:
    async with Listener() as process:
        gone = asyncio.ensure_future(process_gone(process.address))
        async with asyncio.timeout(BOUND):
            await process.visited.wait()
            for _ in range(3):  # it hangs up, and is there all the same
                process.hang_up()
                await process.visited.wait()
        assert not gone.done()
    async with asyncio.timeout(BOUND):
        await gone


async def test_of_one_that_was_never_reached_nothing_is_known() -> None:
    async with Listener() as process:
        pass
    for address in (process.address, "unix:/nowhere", ""):
        gone = asyncio.ensure_future(process_gone(address))
        await asyncio.sleep(0.1)  # time for an answer that must not come
        assert not gone.done()
        gone.cancel()
