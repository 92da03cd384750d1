"""Who goes next, by each policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coslice.core.ids import Incarnation, JobId, RequestId, SessionId
from coslice.core.policy import (
    NAMES,
    Ask,
    Choice,
    FairShare,
    FewestSwaps,
    Fifo,
    LeastRecent,
    Past,
    Priority,
    Reservation,
    Reserve,
    Shortest,
    Waiter,
    policy_named,
)
from coslice.core.policy.past import HALF_LIFE, asked, ended


def waiter(job: str, since: float, phase: str = "") -> Waiter:
    ask = Ask(request=RequestId(f"{job}/1"), session=SessionId(job), since=since, phase=phase)
    return Waiter(job=JobId(job), incarnation=Incarnation("i"), asks=(ask,), since=since)


def turns(*, hold: float, away: float, count: int = 3, end: float = 0.0) -> Past:
    """The past of a job after ``count`` equal turns, the last of which ended at ``end``."""
    past = Past()
    at = end - count * hold - (count - 1) * away
    for _ in range(count):
        past = ended(asked(past, at), "", since=at, at=at + hold)
        at += hold + away
    return past


def memory(**pasts: Past) -> dict[JobId, Past]:
    return {JobId(job): past for job, past in pasts.items()}


def chosen(answer: Choice | Reserve) -> str:
    assert isinstance(answer, Choice), answer
    return answer.waiter.job


QUEUE = (waiter("a", 1.0), waiter("b", 2.0))


def test_fifo_takes_the_first_whoever_is_resident() -> None:
    choice = Fifo().choose(QUEUE, resident=JobId("b"), now=100.0)
    assert choice.waiter.job == "a"
    assert "first" in choice.reason


def test_fewest_swaps_prefers_the_resident_job() -> None:
    choice = FewestSwaps(max_wait=60.0).choose(QUEUE, resident=JobId("b"), now=3.0)
    assert choice.waiter.job == "b"
    assert "no swap" in choice.reason


def test_fewest_swaps_lets_nobody_wait_longer_than_its_bound() -> None:
    choice = FewestSwaps(max_wait=60.0).choose(QUEUE, resident=JobId("b"), now=61.0)
    assert choice.waiter.job == "a"
    assert "60.0 s" in choice.reason


def test_fewest_swaps_without_a_resident_is_fifo() -> None:
    assert FewestSwaps().choose(QUEUE, resident=None, now=3.0).waiter.job == "a"


def test_least_recent_takes_who_was_served_longest_ago_and_newcomers_first() -> None:
    past = memory(a=turns(hold=1, away=1, end=50), b=turns(hold=1, away=1, end=40))
    assert chosen(LeastRecent().choose(QUEUE, resident=None, now=60.0, past=past)) == "b"
    newcomers = (*QUEUE, waiter("c", 59.0))
    assert chosen(LeastRecent().choose(newcomers, resident=None, now=60.0, past=past)) == "c"


def test_shortest_takes_the_shorter_phase_until_the_longer_has_aged() -> None:
    past = memory(a=turns(hold=100, away=1), b=turns(hold=10, away=1))
    queue, policy = (waiter("a", 0.0), waiter("b", 100.0)), Shortest(ageing=0.5)
    assert chosen(policy.choose(queue, resident=None, now=101.0, past=past)) == "b"
    late = (waiter("a", 0.0), waiter("b", 181.0))
    assert chosen(policy.choose(late, resident=None, now=182.0, past=past)) == "a"  # 100 - 91 < 10 - 0.5


def test_shortest_knows_phases_by_name() -> None:
    past = ended(ended(Past(), "generate", since=0, at=50), "train", since=60, at=65)
    other = ended(Past(), "train", since=0, at=20)
    queue = (waiter("a", 70.0, "generate"), waiter("b", 70.0, "train"))
    assert chosen(Shortest().choose(queue, resident=None, now=71.0, past=memory(a=past, b=other))) == "b"
    queue = (waiter("b", 70.0, "train"), waiter("a", 70.0, "train"))
    assert chosen(Shortest().choose(queue, resident=None, now=71.0, past=memory(a=past, b=other))) == "a"


def test_fair_share_serves_the_greatest_deficit_by_weight() -> None:
    past = memory(a=turns(hold=30, away=0, count=1, end=99), b=turns(hold=20, away=0, count=1, end=99))
    assert chosen(FairShare().choose(QUEUE, resident=None, now=100.0, past=past)) == "b"
    weighted = FairShare(weight={"a": 2.0})
    answer = weighted.choose(QUEUE, resident=None, now=100.0, past=past)
    assert chosen(answer) == "a"
    assert "3.3 s behind" in answer.reason  # 2/3 of 50 less 30, a little of it forgotten


def test_what_a_job_got_is_half_forgotten_after_the_half_life() -> None:
    past = turns(hold=40, away=0, count=1, end=0.0)
    assert past.served_at(HALF_LIFE) == pytest.approx(20.0)


def test_priority_serves_the_higher_class_and_bounds_what_the_lower_waits() -> None:
    policy = Priority(classes={"b": 1}, max_wait=30)
    assert chosen(policy.choose(QUEUE, resident=None, now=10.0)) == "b"
    assert chosen(policy.choose(QUEUE, resident=None, now=31.0)) == "a"


def test_reservation_keeps_the_lock_for_a_short_job_that_is_due() -> None:
    """Serving a (200 s) now would delay b, which has turns of 10 s every 50 s, by four of its periods."""
    past = memory(a=turns(hold=200, away=200), b=turns(hold=10, away=40, end=65))
    queue = (waiter("a", 99.0),)
    answer = Reservation(idle=0.15).choose(queue, resident=None, now=100.0, past=past)
    assert isinstance(answer, Reserve)
    assert answer.job == "b"
    assert answer.until == pytest.approx(105 + 8)  # due, and a fifth of its time away
    assert "due in 5.0 s" in answer.reason


def test_reservation_lapses_when_the_other_is_late_or_too_far_away() -> None:
    past = memory(a=turns(hold=200, away=200), b=turns(hold=10, away=40, end=65))
    policy = Reservation(idle=0.15)
    for now in (114.0, 200.0):
        assert chosen(policy.choose((waiter("a", now),), resident=None, now=now, past=past)) == "a"
    away = memory(a=turns(hold=200, away=200), b=turns(hold=10, away=400, end=65))
    assert chosen(policy.choose((waiter("a", 99.0),), resident=None, now=100.0, past=away)) == "a"


def test_reservation_serves_first_whose_turn_delays_the_others_least() -> None:
    past = memory(a=turns(hold=200, away=200), b=turns(hold=10, away=40))
    assert chosen(Reservation().choose(QUEUE, resident=None, now=3.0, past=past)) == "b"


def test_reservation_serves_whom_it_does_not_know() -> None:
    past = memory(a=turns(hold=200, away=200), b=Past())
    assert chosen(Reservation().choose(QUEUE, resident=None, now=3.0, past=past)) == "b"


pasts = st.one_of(
    st.just(Past()),
    st.builds(
        lambda hold, away, count, end: turns(hold=hold, away=away, count=count, end=end),
        st.floats(0.0, 500),
        st.floats(0.0, 500),
        st.integers(1, 4),
        st.floats(0.0, 900),
    ),
)


@given(
    st.lists(st.sampled_from("abcdef"), min_size=1, unique=True),
    st.sampled_from([None, *"abcdefg"]),
    st.sampled_from(NAMES),
    st.floats(0, 1000),
    st.dictionaries(st.sampled_from([JobId(job) for job in "abcdefgh"]), pasts),
)
def test_every_policy_chooses_one_of_the_queue_or_keeps_the_lock_for_another_with_an_end(
    jobs: list[str], resident: str | None, name: str, now: float, past: dict[JobId, Past]
) -> None:
    queue = tuple(waiter(job, float(i)) for i, job in enumerate(jobs))
    policy = policy_named(name)
    known = past if policy.remembers else {}
    answer = policy.choose(queue, resident=JobId(resident) if resident else None, now=now, past=known)
    again = policy.choose(queue, resident=JobId(resident) if resident else None, now=now, past=known)
    assert answer == again
    assert answer.reason
    assert policy.name == name
    if isinstance(answer, Choice):
        assert answer.waiter in queue
    else:
        assert answer.job not in jobs
        assert answer.until > now


@given(st.sampled_from([n for n in NAMES if n not in ("fifo", "least_recent")]), st.data())
def test_who_has_waited_for_the_bound_goes_first_whatever_the_policy_prefers(
    name: str, data: st.DataObject
) -> None:
    sinces = data.draw(st.lists(st.floats(0, 100), min_size=1, max_size=6))
    past = {JobId(f"j{i}"): data.draw(pasts) for i in range(8)}
    queue = tuple(waiter(f"j{i}", since) for i, since in enumerate(sinces))
    now = data.draw(st.floats(100, 200))
    policy = policy_named(f"{name}:max_wait=50")
    answer = policy.choose(queue, resident=JobId("j0"), now=now, past=past)
    if now - min(sinces) >= 50:
        assert isinstance(answer, Choice)
        assert answer.waiter.since == min(sinces)


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("lifo", r"'lifo'.*fewest_swaps, fifo"),
        ("fifo:max_wait=3", "no setting of fifo; it has: none"),
        ("shortest:aging=3", "it has: ageing, max_wait"),
        ("shortest:ageing=fast", "'fast' is not a number"),
        ("shortest:ageing=nan", "'nan' is not a number"),
        ("shortest:ageing=0", "starve"),
        ("fair_share:weight/a=0", "weight of a"),
        ("fair_share:weight=2", "weight/JOB"),
        ("fair_share:class/a=2", "weight/JOB"),
        ("priority:class/a", "class/JOB"),
        ("fewest_swaps:max_wait=-1", "max_wait"),
        ("reservation:idle=-1", "idle"),
        ("reservation:,", "no setting"),
    ],
)
def test_a_wrong_policy_is_refused_with_what_would_be_right(spec: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        policy_named(spec)


def test_settings_arrive() -> None:
    policy = policy_named("priority:class/b=1,max_wait=30")
    assert chosen(policy.choose(QUEUE, resident=None, now=10.0)) == "b"
    assert chosen(policy.choose(QUEUE, resident=None, now=32.0)) == "a"
