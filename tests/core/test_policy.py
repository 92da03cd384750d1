"""Who goes next, by each policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coslice.core.ids import Incarnation, JobId, RequestId, SessionId
from coslice.core.policy import Ask, FewestSwaps, Fifo, Waiter, policy_named


def waiter(job: str, since: float) -> Waiter:
    ask = Ask(request=RequestId(f"{job}/1"), session=SessionId(job), since=since)
    return Waiter(job=JobId(job), incarnation=Incarnation("i"), asks=(ask,), since=since)


def test_fifo_takes_the_first_whoever_is_resident() -> None:
    queue = (waiter("a", 1.0), waiter("b", 2.0))
    choice = Fifo().choose(queue, resident=JobId("b"), now=100.0)
    assert choice.waiter.job == "a"
    assert "first" in choice.reason


def test_fewest_swaps_prefers_the_resident_job() -> None:
    queue = (waiter("a", 1.0), waiter("b", 2.0))
    choice = FewestSwaps(max_wait=60.0).choose(queue, resident=JobId("b"), now=3.0)
    assert choice.waiter.job == "b"
    assert "no swap" in choice.reason


def test_fewest_swaps_lets_nobody_wait_longer_than_its_bound() -> None:
    queue = (waiter("a", 1.0), waiter("b", 2.0))
    choice = FewestSwaps(max_wait=60.0).choose(queue, resident=JobId("b"), now=61.0)
    assert choice.waiter.job == "a"
    assert "60.0 s" in choice.reason


def test_fewest_swaps_without_a_resident_is_fifo() -> None:
    queue = (waiter("a", 1.0), waiter("b", 2.0))
    assert FewestSwaps().choose(queue, resident=None, now=3.0).waiter.job == "a"


@given(
    st.lists(st.sampled_from("abcdef"), min_size=1, unique=True),
    st.sampled_from([None, *"abcdefg"]),
    st.sampled_from(["fifo", "fewest_swaps"]),
    st.floats(0, 1000),
)
def test_every_policy_chooses_one_of_the_queue_and_says_why(
    jobs: list[str], resident: str | None, name: str, now: float
) -> None:
    queue = tuple(waiter(job, float(i)) for i, job in enumerate(jobs))
    policy = policy_named(name)
    choice = policy.choose(queue, resident=JobId(resident) if resident else None, now=now)
    assert choice.waiter in queue
    assert choice.reason
    assert policy.name == name


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'lifo'.*fewest_swaps, fifo"):
        policy_named("lifo")


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="max_wait"):
        FewestSwaps(max_wait=-1)
