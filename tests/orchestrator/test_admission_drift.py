"""Jobs that change while they run: it is noticed, all are judged anew, and what follows is done. Live."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from orchestrator.hours import Hours, Job

from coslice.errors import NotAdmitted


@pytest.fixture
async def hours(tmp_path: Path) -> AsyncIterator[Hours]:
    async with AsyncExitStack() as stack:
        yield Hours(stack, tmp_path)


async def drifted(hours: Hours, job: Job, *, after: int) -> list[str]:
    """Both jobs are known and seated; then the phases of one grow by half. What was decided from there on."""
    job.changes[after] = 1.5
    before = await hours.play(lambda codes: job.turns == after)
    assert before == ["probation", "admitted"]
    codes = await hours.play(lambda codes: "drifted" in codes)
    return codes[len(before) :]


async def test_a_member_is_queued_for_a_job_that_grew_and_comes_back_when_it_shrinks(hours: Hours) -> None:
    await hours.start()
    math, code = hours.job("math", 40.0, 60.0), hours.job("code", 40.0, 60.0)
    assert await drifted(hours, math, after=10) == ["drifted", "queued"]
    told = await hours.explain("math")
    assert "math has changed: a cycle was 40.0 s on and 60.0 s off, and is now 60.0 s and 90.0 s" in told
    told = await hours.explain("code")
    assert "admission, queued: code is queued from its next turn on" in told
    assert "without it math would keep the bound" in told
    turns = math.turns
    await hours.play(lambda codes: math.turns > turns + 3)
    assert hours.jobs["code"].asked is not None  # at the door; math goes on alone
    assert not hours.status.waiters
    math.changes[math.turns + 1] = 1 / 1.5
    codes = await hours.play(lambda codes: codes[-1] == "lifted")
    assert codes[-2:] == ["drifted", "lifted"]
    turns = code.turns
    await hours.play(lambda codes: code.turns > turns + 1)


async def test_a_member_that_was_queued_for_too_long_is_evicted(hours: Hours) -> None:
    await hours.start(queue_limit=1000.0)
    math, code = hours.job("math", 40.0, 60.0), hours.job("code", 40.0, 60.0)
    assert await drifted(hours, math, after=10) == ["drifted", "queued"]
    codes = await hours.play(lambda codes: "evicted" in codes and code.error is not None)
    assert codes[-2:] == ["queued", "evicted"]
    assert isinstance(code.error, NotAdmitted)
    assert "code was queued for 1000 s and there was no room for it" in str(code.error)
    assert str(code.error) in await hours.explain("code")
    turns = math.turns
    await hours.play(lambda codes: math.turns > turns + 1)


async def test_another_order_is_enough_where_one_waits_for_the_others_long_turns(hours: Hours) -> None:
    await hours.start(max_slowdown=1.2)
    long, _ = hours.job("long", 90.0, 250.0), hours.job("short", 25.0, 120.0)
    assert await drifted(hours, long, after=13) == ["drifted", "reordered"]
    status = await hours.until(lambda status: status.policy.startswith("reservation"))
    told = await hours.explain()
    assert "short would be slowed down" in told or "of short's rolling means" in told
    assert f"with the policy {status.policy}: long" in told
    turns = long.turns
    await hours.play(lambda codes: long.turns > turns + 10)
    for member in hours.status.admission.members:
        assert 1.0 <= member.slowdown <= 1.2
        assert member.state == "seated"
