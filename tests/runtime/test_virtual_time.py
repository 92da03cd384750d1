"""The loop with virtual time: order as in life, waiting for free, and no test that hangs."""

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coslice.testing.virtual_time import Stuck, outside, run_virtual


@pytest.mark.timeout(30)
def test_a_year_takes_no_time_and_timeouts_hold() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(365 * 86_400):
                await loop.create_future()
        return loop.time() - start

    assert run_virtual(main()) == pytest.approx(365 * 86_400)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), max_size=20))
def test_timers_fire_in_order_and_at_their_time(delays: list[float]) -> None:
    async def main() -> list[tuple[float, float]]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        fired: list[tuple[float, float]] = []

        async def sleep(delay: float) -> None:
            await asyncio.sleep(delay)
            fired.append((delay, loop.time() - start))

        await asyncio.gather(*map(sleep, delays))
        return fired

    fired = run_virtual(main())
    assert sorted(delay for delay, _ in fired) == sorted(delays)
    for delay, at in fired:
        assert at == pytest.approx(delay, abs=1e-6)


def test_waiting_for_nothing_is_an_error_instead_of_a_hang() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Stuck):
        run_virtual(main())


def test_the_clock_rests_while_something_real_happens() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        ticking = asyncio.create_task(asyncio.sleep(1))
        with outside():
            await asyncio.to_thread(time.sleep, 0.05)
        assert not ticking.done()
        return loop.time() - start

    assert run_virtual(main()) == 0
