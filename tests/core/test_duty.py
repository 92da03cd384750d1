"""The formulas of duty and slowdown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coslice.core.duty import covered, duty_bound, held_duty, slowdown, slowdown_bound

spans = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)).map(lambda p: (min(p), max(p))))
duties = st.lists(st.floats(0, 1), max_size=6)


def test_held_duty_is_the_share_of_the_span_with_a_lease() -> None:
    assert held_duty([(0, 1), (2, 4), (9, 20)], start=0, end=10) == pytest.approx(0.4)


@given(spans)
def test_overlaps_count_once(intervals: list[tuple[float, float]]) -> None:
    total = covered(intervals, start=10, end=60)
    assert 0 <= total <= 50
    assert covered(intervals * 2, start=10, end=60) == total


@given(duties)
def test_the_two_bounds_meet_where_the_device_is_full(solo: list[float]) -> None:
    assert 0 <= duty_bound(solo) <= 1 <= slowdown_bound(solo)
    assert duty_bound(solo) * slowdown_bound(solo) == pytest.approx(sum(solo))


def test_slowdown_compares_medians() -> None:
    assert slowdown([2.0, 2.2, 90.0], [1.0, 1.1, 1.2]) == pytest.approx(2.0)
    assert slowdown([1.0, 3.0], [2.0]) == pytest.approx(1.0)


def test_what_has_no_duty_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        held_duty([], start=1, end=1)
    with pytest.raises(ValueError, match="at least one"):
        slowdown([], [1.0])
    with pytest.raises(ValueError, match="cannot take"):
        slowdown([1.0], [0.0])
