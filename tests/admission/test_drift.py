"""When has a job changed? Random cycles against what the test promises."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from coslice.admission.drift import BASE, DriftTest

SEEDS = st.integers(0, 10_000)
TIMES = st.tuples(st.floats(1.0, 500.0), st.floats(0.0, 500.0))


def noisy(times: tuple[float, float], dice: random.Random) -> tuple[float, float]:
    """Each part off by 4 % of the period at most."""
    period = sum(times)
    on, off = (max(0.0, part + dice.uniform(-0.04, 0.04) * period) for part in times)
    return on, off


@given(SEEDS, TIMES)
def test_small_noise_is_no_change_however_long_it_lasts(seed: int, times: tuple[float, float]) -> None:
    dice, test = random.Random(seed), DriftTest()
    assert not any(test.see(*noisy(times, dice)) for _ in range(120))


@given(SEEDS, TIMES, st.sampled_from([1.5, 2.0, 0.5]), st.integers(0, 40))
def test_a_change_is_found_within_a_few_cycles_and_told_from_what_was_before(
    seed: int, times: tuple[float, float], factor: float, before: int
) -> None:
    dice, test = random.Random(seed), DriftTest()
    for _ in range(BASE + before):
        assert not test.see(*noisy(times, dice))
    found = 0
    for count in range(1, 9):
        on, off = noisy(times, dice)
        if since := test.see(on * factor, off * factor):
            found = count
            assert 3 <= since <= count + 1  # one of the old ones may look like new
            break
    assert found >= 2


@given(SEEDS, TIMES, st.floats(0.0, 100.0))
def test_one_odd_cycle_is_no_change(seed: int, times: tuple[float, float], factor: float) -> None:
    dice, test = random.Random(seed), DriftTest()
    for _ in range(BASE + 5):
        test.see(*noisy(times, dice))
    assert not test.see(times[0] * factor, times[1] * factor)
    assert not any(test.see(*times) for _ in range(30))


@settings(max_examples=30)
@given(SEEDS, TIMES)
def test_after_a_change_the_way_back_is_another_one(seed: int, times: tuple[float, float]) -> None:
    dice, test = random.Random(seed), DriftTest()
    changes = []
    for factor in (1.0, 1.5, 1.0):
        for cycle in range(3 * BASE):
            on, off = noisy(times, dice)
            if test.see(on * factor, off * factor):
                changes.append((factor, cycle))
    assert [factor for factor, _ in changes] == [1.5, 1.0]


def test_a_declared_job_is_compared_with_what_it_declared_from_its_first_cycle_on() -> None:
    test = DriftTest([(40.0, 60.0)])
    assert [bool(test.see(60.0, 90.0)) for _ in range(3)] == [False, False, True]
