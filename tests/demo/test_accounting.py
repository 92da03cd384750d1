"""The accounts add up, whatever the windows and the samples."""

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coslice.demo.accounting import Section, Window, cores_busy, process_cpu, value_at

STAT = """cpu  30 0 6 100 7 0 0 0 0 0
cpu0 10 1 2 50 3 4 5 90 0 0
cpu1 20 0 4 50 4 0 0 0 0 0
intr 5
"""


def test_work_on_a_core_is_everything_but_idle_waiting_and_stolen_time() -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert cores_busy([0], stat=STAT) == pytest.approx((10 + 1 + 2 + 4 + 5) * tick)
    assert cores_busy([0, 1], stat=STAT) == pytest.approx((22 + 24) * tick)
    assert cores_busy([7], stat=STAT) == 0


def test_the_kernel_counts_what_this_process_burns() -> None:
    before, core_before = process_cpu(os.getpid()), cores_busy(range(os.cpu_count() or 1))
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    assert process_cpu(os.getpid()) - before >= 0.25
    assert cores_busy(range(os.cpu_count() or 1)) - core_before >= 0.2
    assert process_cpu(2**22 + 1) == 0, "nobody burns nothing"


def test_a_counter_between_samples_is_on_the_line_and_beyond_them_is_the_last_known() -> None:
    series = [(0.0, 0.0), (10.0, 5.0), (20.0, 5.0)]
    assert [value_at(series, t) for t in (-1, 0, 4, 10, 15, 99)] == [0, 0, 2, 5, 5, 5]


times = st.floats(0, 100)


@given(st.lists(times, min_size=2, max_size=12, unique=True), times, times, times)
def test_windows_side_by_side_share_everything_once(
    moments: list[float], a: float, b: float, c: float
) -> None:
    moments.sort()
    sections = [
        Section(begin, end, cpu=end - begin) for begin, end in zip(moments[::2], moments[1::2], strict=False)
    ]
    begin, middle, end = sorted((a, b, c))
    whole = Window(begin, end).section_cpu(sections)
    parts = Window(begin, middle).section_cpu(sections) + Window(middle, end).section_cpu(sections)
    assert whole == pytest.approx(parts, abs=1e-9)
    assert whole <= (end - begin) + 1e-9, "sections that do not overlap cannot fill more than the window"
