"""The figures follow from what was measured, and a target that is missed is called missed."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from coslice.demo.accounting import Section
from coslice.demo.blocks import GROUP, Block, JobPlan, JobRun, StepRecord
from coslice.demo.calibration import Calibration
from coslice.demo.figures import Figures, Round, Turns, turns_of
from coslice.demo.report import print_report
from coslice.demo.runner import Result

MIB = 1 << 20
KEYS = {
    "solo_duty", "useful_duty", "held_duty", "duty_bound", "slowdown", "state_identical", "swaps",
    "bytes_moved",
    "peak_device_bytes", "device_budget_bytes", "host_cpu", "solo_wall_s", "shared_wall_s",
}  # fmt: skip


def _run(
    name: str, *, period: float, begin: float, digest: str = "d", steps: int = 9, rise: float = 0.1
) -> JobRun:
    steps = 9
    run = JobRun(JobPlan(name, "sort", 1, questions=16, steps=steps), digest=digest)
    for index in range(steps):
        at = begin + index * period
        run.steps.append(
            StepRecord(
                begin=at,
                end=at + period,
                section=Section(at, at + 0.45, cpu=0.45),
                phases=[("train", at, at + 0.45), ("reward", at + 0.45, at + period)],
                reward=rise * index,
                core_busy=0.0,
                off_section_cpu=0.01 * index,
                services_cpu=0.02 * index,
            )
        )
    return run


def _busy(block: Block, per_second: float) -> Block:
    for run in block.runs.values():
        for step in run.steps:
            step.core_busy = per_second * step.end
    return block


def _round(*, shared_period: float = 1.02, digest: str = "d", rise: float = 0.1) -> Round:
    solo = {
        name: _busy(Block({name: _run(name, period=1.0, begin=0.0, rise=rise)}), 0.45)
        for name in ("job-a", "job-b")
    }
    runs = {
        "job-a": _run("job-a", period=shared_period, begin=100.0, digest=digest, rise=rise),
        "job-b": _run("job-b", period=shared_period, begin=100.5, rise=rise),
    }
    shared = _busy(Block(runs, peak_device_bytes=40 * MIB, device_budget_bytes=50 * MIB), 0.9 / shared_period)
    return Round(solo, shared)


def _figures(
    round_: Round, *, swaps: int = 16, budget: int = 50 * MIB, reasons: tuple[str, ...] = ()
) -> Figures:
    begin, end = round_.shared.window.begin, round_.shared.window.end
    turns = Turns(held=((begin, end),), swaps=swaps, bytes_moved=swaps * 60 * MIB, reasons=reasons)
    return Figures([round_], [turns], budget=budget, need=42 * MIB)


def _missed(figures: Figures) -> list[str]:
    return [target.name for target in figures.targets() if not target.met]


def test_a_good_run_meets_every_target_and_has_every_public_key() -> None:
    figures = _figures(_round())
    assert _missed(figures) == []
    document = json.loads(json.dumps(figures.as_json()))
    assert document.keys() >= KEYS
    assert document["solo_duty"] == {"job-a": pytest.approx(0.45), "job-b": pytest.approx(0.45)}
    assert document["duty_bound"] == pytest.approx(0.9)
    assert document["useful_duty"] == pytest.approx(0.9 / 1.02, rel=0.02)
    assert document["slowdown"]["job-a"] == pytest.approx(1.02)
    assert document["held_duty"] == pytest.approx(1.0)
    assert document["host_cpu"] == pytest.approx((2 * 0.01 + 0.02) / 1.02, rel=0.1)


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        (_figures(_round(digest="other")), "final parameters"),
        (_figures(_round(shared_period=1.2)), "slowdown, job-a"),
        (_figures(_round(shared_period=1.2)), "useful duty shared"),
        (_figures(_round(rise=0.0)), "reward, job-b"),
        (_figures(_round(), swaps=0), "swaps"),
        (_figures(_round(), budget=39 * MIB), "device memory, peak"),
    ],
)
def test_each_promise_that_is_broken_is_called_so(figures: Figures, missed: str) -> None:
    assert missed in _missed(figures)


def test_busy_core_without_the_jobs_and_sections_off_the_core_do_not_count_as_useful() -> None:
    block = _round().shared
    fair = block.useful_duty
    assert _busy(block, 1.0).useful_duty == pytest.approx(fair), "a stray process on the core adds nothing"
    assert _busy(block, 0.3).useful_duty == pytest.approx(0.3), "sections that were elsewhere add nothing"


def test_where_all_fit_nothing_may_move_and_the_reason_is_told() -> None:
    figures = _figures(_round(), swaps=0, budget=100 * MIB, reasons=("both fit: 42 + 42 of 100 MiB",))
    assert _missed(figures) == []
    assert "both fit: 42 + 42 of 100 MiB" in _report(figures)
    assert "swaps" in _missed(_figures(_round(), swaps=3, budget=100 * MIB))


def _report(figures: Figures) -> str:
    plans = tuple(figures.rounds[0].solo[job].runs[job].plan for job in figures.jobs)
    calibration = Calibration(0.45, 16, 300.0, 30 * MIB, figures.need, 3 * MIB)
    text = StringIO()
    result = Result(figures, calibration, plans, Path("journal.jsonl"), Path("replay.html"), 170.0)
    print_report(Console(file=text, width=200), result)
    return text.getvalue()


def test_the_report_says_what_was_missed_and_how_it_was_calibrated() -> None:
    good, bad = _report(_figures(_round())), _report(_figures(_round(digest="other")))
    assert "targets met" in good
    assert "300 answers/s" in good
    assert "DIFFERENT" in bad
    assert "1 of 11 targets missed" in bad


def test_a_disturbed_measurement_is_called_so() -> None:
    round_ = _round()
    assert "other processes" not in _report(_figures(round_))
    _busy(round_.solo["job-b"], 0.60)
    assert "other processes kept the accelerator's core busy for up to 15%" in _report(_figures(round_))


def test_the_journal_gives_swaps_bytes_and_held_time(tmp_path: Path) -> None:
    def line(
        t: float, event: dict[str, object], occupancy: str, job: str, reasons: tuple[object, ...] = ()
    ) -> str:
        state = {"occupancy": occupancy, "job": job, "epoch": 1, "waiting": []}
        record = {
            "t": t,
            "group": GROUP,
            "event": event,
            "effects": [],
            "reasons": list(reasons),
            "state": state,
        }
        return json.dumps(record)

    done = {"type": "OpSucceeded", "op": "x", "node": "n", "bytes_in": 3, "bytes_out": 4}
    path = tmp_path / "journal.jsonl"
    path.write_text(
        "\n".join(
            [
                json.dumps({"coslice_journal": 1, "started": 0.0, "clock": 0.0, "orchestrator": "o"}),
                line(1.0, {"type": "NodeAttached", "node": "n"}, "swapping", "job-a"),
                line(2.0, done, "held", "job-a"),
                line(5.0, {"type": "LeaseYielded", "job": "job-a"}, "swapping", "job-b"),
                line(5.5, done | {"bytes_in": 0, "bytes_out": 0}, "held", "job-b", (("fits", "it fits"),)),
                line(6.0, {"type": "LeaseYielded", "job": "job-b"}, "resident", "job-b"),
                '{"t": 7, "gro',
            ]
        )
    )
    block = replace(_round().shared, journal=path)
    turns = turns_of(block)
    assert (turns.swaps, turns.bytes_moved, turns.reasons) == (1, 7, ("it fits",))
    assert turns.held == ((2.0, 5.0), (5.5, 6.0))
