"""Whoever has callers waiting is elected before one who has none."""

import asyncio

from coslice.store.election import HEAD_START_S, Hearsay


async def test_a_candidate_gives_way_until_somebody_calls() -> None:
    hearsay, loop = Hearsay(), asyncio.get_running_loop()
    began = loop.time()
    await hearsay.give_way()
    assert loop.time() - began >= HEAD_START_S
    waiting = asyncio.ensure_future(hearsay.give_way())
    await asyncio.sleep(0)
    assert not waiting.done()
    with hearsay.calling(), hearsay.calling():
        assert hearsay.callers == 2
        await waiting
        await hearsay.give_way()  # at once
    assert not hearsay.callers
    waiting = asyncio.ensure_future(hearsay.give_way())
    await asyncio.sleep(0)
    assert not waiting.done(), "they have left"
    await waiting
