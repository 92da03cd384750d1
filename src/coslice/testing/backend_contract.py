"""What every ``Backend`` has to do, as tests. Subclass in a test module and say how jobs are made::

    class TestMyBackend(BackendContract):
        @pytest.fixture
        async def world(self):
            yield MyWorld()          # see ``World``

Needs pytest and pytest-asyncio (auto mode). What a backend cannot have (nobody can measure a TPU's memory)
its world says; the suite is the same for all.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import pytest

from coslice.agent.backends.base import Backend, MoveError
from coslice.agent.members import Member
from coslice.errors import ConfigError

PATIENCE = 60.0
TRUTH = 0.1
"""Bytes are reported truthfully when they are within this share of what was measured."""


class Job(Protocol):
    """A running job with state on the device."""

    @property
    def members(self) -> Sequence[Member]: ...

    async def intact(self) -> bool:
        """Is its state on the device, and bit-equal to what it was?"""
        ...

    def device_bytes(self) -> int | None:
        """What it has on the device now, measured from outside; None: that cannot be measured."""
        ...

    async def kill(self) -> None: ...


class World(Protocol):
    """A node for one test, with room on the device for two jobs at least."""

    @property
    def backend(self) -> Backend: ...

    async def job(self, name: str) -> Job: ...

    async def break_next_snapshot(self, job: Job) -> None:
        """Have the next snapshot of this job fail, half-way if possible, and the one after succeed."""
        ...

    def make(self, settings: Mapping[str, object]) -> Backend:
        """Another backend with these settings, as the entry point makes it."""
        ...


class BackendContract:
    @pytest.fixture
    def world(self) -> "World | AsyncIterator[World]":
        raise AssertionError("say how jobs are made")

    async def test_it_says_what_it_can(self, world: World) -> None:
        can = world.backend.capabilities()
        assert can.name
        assert "offload" in can.modes
        assert not (can.whole_process and can.in_process)

    async def test_deadlines_grow_with_the_size(self, world: World) -> None:
        small, large = world.backend.deadline(0), world.backend.deadline(1 << 40)
        assert 0 < small <= large < float("inf")

    async def test_state_leaves_and_comes_back_bit_equal(self, world: World) -> None:
        job = await world.job("a")
        for turn in range(2):
            await world.backend.snapshot(job.members, op=f"{turn}/out")
            assert all(member.parked for member in job.members)
            await world.backend.restore(job.members, op=f"{turn}/in")
            assert not any(member.parked for member in job.members)
            assert await job.intact()

    async def test_bytes_and_seconds_are_reported_truthfully(self, world: World) -> None:
        job = await world.job("a")
        before = job.device_bytes()
        began = time.monotonic()
        out = await world.backend.snapshot(job.members, op="out")
        spent = time.monotonic() - began
        after = job.device_bytes()
        assert 0 < out.seconds <= spent
        if before is not None and after is not None:
            assert out.bytes == pytest.approx(before - after, rel=TRUTH)
            assert out.residual <= TRUTH * before
        began = time.monotonic()
        back = await world.backend.restore(job.members, op="in")
        assert 0 < back.seconds <= time.monotonic() - began
        assert back.bytes == out.bytes

    async def test_what_is_away_does_not_move_again(self, world: World) -> None:
        job = await world.job("a")
        first = await world.backend.snapshot(job.members, op="1")
        second = await world.backend.snapshot(job.members, op="2")
        assert second.bytes in (0, first.bytes)
        await world.backend.restore(job.members, op="3")
        again = await world.backend.restore(job.members, op="4")
        assert again.bytes == 0
        assert await job.intact()

    async def test_a_probe_sees_and_moves_nothing(self, world: World) -> None:
        job = await world.job("a")
        live = await world.backend.probe(job.members)
        assert (live.live, live.parked) == (len(job.members), 0)
        assert await job.intact()
        await world.backend.snapshot(job.members, op="1")
        for _ in range(2):
            away = await world.backend.probe(job.members)
            assert (away.live, away.parked) == (0, len(job.members))
            assert away.device_bytes <= live.device_bytes
        await world.backend.restore(job.members, op="2")
        back = await world.backend.probe(job.members)
        assert (back.live, back.parked) == (live.live, 0)
        assert back.device_bytes == pytest.approx(live.device_bytes, rel=TRUTH)

    async def test_a_failed_snapshot_leaves_the_state_on_the_device(self, world: World) -> None:
        job = await world.job("a")
        await world.break_next_snapshot(job)
        with pytest.raises(MoveError) as caught:
            await world.backend.snapshot(job.members, op="1")
        assert str(caught.value)
        assert caught.value.pid in {0, *(member.pid for member in job.members)}
        assert not any(member.parked for member in job.members)
        assert await job.intact()
        await world.backend.snapshot(job.members, op="2")
        await world.backend.restore(job.members, op="3")
        assert await job.intact()

    async def test_jobs_move_independently(self, world: World) -> None:
        a, b = await world.job("a"), await world.job("b")
        await world.backend.snapshot(a.members, op="1")
        assert await b.intact()
        await world.backend.snapshot(b.members, op="2")
        await world.backend.restore(a.members, op="3")
        assert await a.intact()
        await world.backend.restore(b.members, op="4")
        assert await b.intact()

    async def test_operations_asked_for_at_once_do_no_harm(self, world: World) -> None:
        job = await world.job("a")
        out = asyncio.ensure_future(world.backend.snapshot(job.members, op="1"))
        await asyncio.sleep(0)  # it has been asked for
        back = asyncio.ensure_future(world.backend.restore(job.members, op="2"))
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(out, back)
            await world.backend.restore(job.members, op="3")
        assert await job.intact()

    async def test_a_caller_that_goes_away_does_no_harm(self, world: World) -> None:
        job = await world.job("a")
        moving = asyncio.ensure_future(world.backend.snapshot(job.members, op="1"))
        await asyncio.sleep(0)
        moving.cancel()
        await asyncio.gather(moving, return_exceptions=True)
        async with asyncio.timeout(PATIENCE):
            await world.backend.snapshot(job.members, op="2")
            await world.backend.restore(job.members, op="3")
        assert await job.intact()

    async def test_a_job_that_has_ended_fails_soon_and_says_so(self, world: World) -> None:
        job = await world.job("a")
        await world.backend.snapshot(job.members, op="1")
        await job.kill()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(MoveError) as caught:
                await world.backend.restore(job.members, op="2")
        assert caught.value.lost

    async def test_settings_that_make_no_sense_are_refused(self, world: World) -> None:
        with pytest.raises(ConfigError, match="no_such_setting"):
            world.make({"no_such_setting": 1})
        with pytest.raises(ConfigError):
            world.backend.check({"no_such_setting": "1"})

    async def test_retiring_a_job_never_fails(self, world: World) -> None:
        job = await world.job("a")
        async with asyncio.timeout(PATIENCE):
            further = await world.backend.retire(job.members)
        assert not {each.pid for each in further} & {member.pid for member in job.members}
