"""What the replay page shows, computed from a journal: intervals, waits, swaps, duty, rewards.

Called by ``page.render``. It knows the journal's lines (runtime/journal.py writes them) and nothing of HTML.
All times are seconds on the orchestrator's monotonic clock; intervals are ``[begin, end)``.
"""

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from coslice.observe.timeline import GroupReader, GroupReplay, Interval, Line


class SoloRun(Struct, kw_only=True):
    job: str
    round: int
    begin: float
    intervals: list[Interval]
    rewards: list[float]
    steps: list[tuple[float, float]]


class Replay(Struct, kw_only=True):
    orchestrator: str
    begin: float
    end: float
    groups: list[GroupReplay]
    solo: list[SoloRun]
    rewards: dict[str, list[list[float]]]
    """Per job, one list for each run of it under coslice."""
    summary: dict[str, Any]
    torn: bool
    damaged: int
    """Lines that could not be read, or made no sense; they are left out."""
    lines: int


def build(header: Line, lines: Iterable[Line], *, torn: bool, damaged: int = 0) -> Replay:
    """Everything the page needs, from the lines of one journal."""
    readers: dict[str, GroupReader] = {}
    solo: list[SoloRun] = []
    rewards: dict[str, list[list[float]]] = {}
    sessions: dict[tuple[str, str], list[float]] = {}
    summary: dict[str, Any] = {}
    begin = end = float(header.get("clock", 0.0))
    count = 0

    def reader(group: object) -> GroupReader:
        return readers.setdefault(str(group), GroupReader(str(group)))

    def read(line: Line) -> None:
        nonlocal end, summary
        at = float(line.get("t", end))
        if "event" in line:
            end = max(end, at)
            reader(line["group"]).read(line)
        elif "admission" in line:
            reader(line["admission"]["group"]).admission(at, line["admission"])
        elif "note" in line:
            note = line["note"]
            if note.get("name") == "reward":
                key = (str(note["job"]), str(note.get("session", "")))
                if key not in sessions:
                    sessions[key] = []
                    rewards.setdefault(key[0], []).append(sessions[key])
                sessions[key].append(float(note.get("value", 0.0)))
        elif "solo" in line:
            solo.append(_solo(line["solo"]))
        elif "summary" in line:
            summary = dict(line["summary"])

    for line in lines:
        count += 1
        try:
            read(line)
        except (KeyError, TypeError, ValueError, AttributeError):  # valid JSON, and no line of ours
            damaged += 1
    for each in readers.values():
        each.finish(end)
    return Replay(
        orchestrator=str(header.get("orchestrator", "")),
        begin=begin,
        end=end,
        groups=[each.replay for each in readers.values()],
        solo=solo,
        rewards=rewards,
        summary=summary,
        torn=torn,
        damaged=damaged,
        lines=count,
    )


def _solo(data: Line) -> SoloRun:
    phases = [
        Interval(
            kind="held" if str(name) in ("train", "generate", "accelerator") else "off",
            job=str(data["job"]),
            begin=float(t0),
            end=float(t1),
            phase=str(name),
        )
        for name, t0, t1 in data.get("phases", ())
    ]
    steps = [(float(t0), float(t1)) for t0, t1 in data.get("steps", ())]
    begins = [interval.begin for interval in phases] or [t0 for t0, _ in steps] or [0.0]
    return SoloRun(
        job=str(data["job"]),
        round=int(data.get("round", 1)),
        begin=min(begins),
        intervals=phases,
        rewards=[float(value) for value in data.get("rewards", ())],
        steps=steps,
    )
