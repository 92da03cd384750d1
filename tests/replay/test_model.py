import pytest
from replay import sample

from coslice.replay.model import build


def test_intervals_say_who_had_the_accelerator_and_who_waited() -> None:
    header, *lines = sample.lines()
    (group,) = build(header, lines, torn=False).groups
    found = [(i.kind, i.job, i.begin, i.end) for i in group.intervals if i.kind != "off"]
    assert found == [
        ("held", "job-a", 100.0, 102.0),
        ("waiting", "job-b", 101.0, 103.0),
        ("swapping", "job-b", 102.0, 103.0),
        ("held", "job-b", 103.0, 105.0),
        ("waiting", "job-a", 104.0, 106.0),
        ("swapping", "job-a", 105.0, 106.0),
        ("held", "job-a", 106.0, 108.0),
    ]
    assert [i.bytes for i in group.intervals if i.kind == "swapping"] == [3 * sample.MIB] * 2
    assert [(i.job, i.begin, i.end) for i in group.intervals if i.kind == "off"] == [("job-a", 102.0, 104.0)]
    assert group.queue == [(101.0, 1), (102.0, 0), (104.0, 1), (105.0, 0)]
    assert group.blocks == [(100.0, 108.0)]


def test_rewards_are_kept_for_each_run_of_a_job() -> None:
    header, *lines = sample.lines()
    assert build(header, lines, torn=False).rewards == {"job-a": [[0.25, 0.5]]}


def test_a_demo_journal_brings_the_solo_runs_and_the_summary() -> None:
    header, *lines = sample.lines()
    replay = build(header, [*lines, *sample.solo()], torn=False)
    (run,) = replay.solo
    assert (run.job, run.begin, run.rewards) == ("job-a", 10.0, [0.25, 0.5])
    assert [i.kind for i in run.intervals] == ["held", "off", "held"]
    assert replay.summary["useful_duty"] == pytest.approx(0.875)


def test_a_waiter_at_the_end_of_the_journal_is_shown_waiting() -> None:
    header, *lines = sample.lines()
    (group,) = build(header, lines[:2], torn=False).groups
    assert [(i.job, i.kind) for i in group.intervals] == [("job-a", "held")]
    (group,) = build(header, lines[:4], torn=False).groups
    assert ("waiting", "job-b", 101.0, 102.0) in [(i.kind, i.job, i.begin, i.end) for i in group.intervals]
