from typing import Any

import pytest
from replay import sample

from coslice.core.effects import ReasonCode
from coslice.observe.timeline import TROUBLE, GroupReader, Interval
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


def test_what_admission_decided_is_told_and_who_is_queued_is_not_just_off() -> None:
    header, *lines = sample.lines()

    def said(t: float, code: str) -> dict[str, Any]:
        return {"t": t, "admission": {"group": "pool", "job": "job-a", "code": code, "text": f"a is {code}"}}

    at = next(number for number, line in enumerate(lines) if line["t"] > 102.0)
    name = lines[0]["group"]
    extra = [said(102.5, "queued"), said(103.5, "lifted")]
    for line in extra:
        line["admission"]["group"] = name
    (group,) = build(header, [*lines[:at], *extra, *lines[at:]], torn=False).groups
    assert [i.text for i in group.intervals if i.kind == "off"] == [
        "off the accelerator, and queued by admission"
    ]
    told = [(d.at, d.code, d.text, d.trouble) for d in group.decisions if d.code.startswith("admission")]
    assert told == [
        (102.5, "admission_queued", "a is queued", True),
        (103.5, "admission_lifted", "a is lifted", False),
    ]


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


def test_a_job_frozen_in_a_phase_is_shown_until_it_holds_again() -> None:
    def line(t: float, occupancy: str, job: str, epoch: int, **more: Any) -> dict[str, Any]:
        state = {"occupancy": occupancy, "job": job, "epoch": epoch, "waiting": [], **more}
        return {"t": t, "group": "g", "event": {"type": "X"}, "effects": [], "reasons": [], "state": state}

    lines = [
        line(1.0, "held", "a", 1),
        line(3.0, "held", "b", 2, frozen=["a"]),
        line(5.0, "held", "a", 3),
        line(6.0, "resident", "a", 3),
    ]
    found = build({"clock": 0.0}, lines, torn=False).groups[0].intervals
    kinds = [(one.kind, one.job, one.begin, one.end) for one in found]
    assert kinds == [("held", "a", 1, 3), ("frozen", "a", 3, 5), ("held", "b", 3, 5), ("held", "a", 5, 6)]


def test_read_on_from_the_middle_nothing_is_lost_or_told_twice() -> None:
    """What the dashboard does: it begins within a lease, and takes what ended, again and again."""
    reader = GroupReader("g")
    lease = Interval(kind="held", job="a", begin=1.0, end=0, phase="train", epoch=4)
    reader.resume(lease, {"r": ("b", 2.0, "generate")}, 1)
    assert {(one.kind, one.job, one.begin) for one in reader.going_on()} == {
        ("held", "a", 1.0),
        ("waiting", "b", 2.0),
    }
    grant = {"type": "Grant", "request": "r", "reason": {"code": "granted_swapped", "text": "its turn"}}
    state = {"occupancy": "held", "job": "b", "epoch": 5, "waiting": []}
    reader.read({"t": 9.0, "event": {"type": "LeaseYielded", "job": "a"}, "effects": [grant], "state": state})
    intervals, queue, _ = reader.take()
    assert [(one.kind, one.job, one.begin, one.end, one.phase) for one in intervals] == [
        ("waiting", "b", 2.0, 9.0, "generate"),
        ("held", "a", 1.0, 9.0, "train"),
    ]
    assert queue == [(9.0, 0)]
    assert reader.take() == ([], [], [])
    assert [(one.kind, one.job, one.begin) for one in reader.going_on()] == [("held", "b", 9.0)]


def test_what_counts_as_trouble_are_codes_that_exist() -> None:
    assert {code.value for code in ReasonCode} >= TROUBLE
