"""The same replay as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: JSON, microseconds.

A group is a process, a job one of its threads; a swap is on a thread of its own, the queue is a counter, a
decision an instant. The format is Chrome's trace event format.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from coslice.observe.timeline import GroupReplay, Interval
from coslice.replay.model import Replay, build
from coslice.replay.page import write_whole
from coslice.runtime.journal import read_journals

Event = dict[str, Any]
SWAPS, DECISIONS = 1, 2
FIRST_JOB = 10


def render_perfetto(journal: str | Path, out: str | Path) -> None:
    """Draw ``journal``, of a live run or a simulation, as the trace ``out``, replaced whole or not at all.

    Raises ``ConfigError`` if the file is not a journal.
    """
    content = read_journals(Path(journal))
    replay = build(content.header, content.records, torn=content.torn)
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {"orchestrator": replay.orchestrator, "torn": str(replay.torn).lower()},
        "traceEvents": list(trace_events(replay)),
    }
    write_whole(Path(out), msgspec.json.encode(trace).decode())


def trace_events(replay: Replay) -> Iterator[Event]:
    for pid, group in enumerate(replay.groups, 1):
        yield _named("process_name", pid, 0, f"group {group.group}")
        yield _named("thread_name", pid, SWAPS, "swaps")
        yield _named("thread_name", pid, DECISIONS, "decisions")
        threads = {job: FIRST_JOB + n for n, job in enumerate(group.jobs)}
        for job, tid in threads.items():
            yield _named("thread_name", pid, tid, job)
        yield from _group(group, pid, threads, replay.begin)


def _group(group: GroupReplay, pid: int, threads: dict[str, int], zero: float) -> Iterator[Event]:
    for interval in group.intervals:
        tid = SWAPS if interval.kind == "swapping" else threads[interval.job]
        yield {
            "name": _name(interval),
            "cat": interval.kind,
            "ph": "X",
            "ts": _us(interval.begin, zero),
            "dur": round(1e6 * (interval.end - interval.begin), 3),
            "pid": pid,
            "tid": tid,
            "args": _details(interval),
        }
    for at, depth in group.queue:
        counter = {"name": "waiting", "ph": "C", "ts": _us(at, zero), "pid": pid, "args": {"jobs": depth}}
        yield counter
    for decision in group.decisions:
        yield {
            "name": decision.code,
            "cat": "decision",
            "ph": "i",
            "s": "t",
            "ts": _us(decision.at, zero),
            "pid": pid,
            "tid": DECISIONS,
            "args": {"text": decision.text, "job": decision.job},
        }


def _name(interval: Interval) -> str:
    match interval.kind:
        case "swapping":
            return f"swap to {interval.job}"
        case "held":
            return interval.phase or "held"
        case kind:
            return kind


def _details(interval: Interval) -> dict[str, object]:
    found = {"job": interval.job, "epoch": interval.epoch, "bytes": interval.bytes, "text": interval.text}
    return {key: value for key, value in found.items() if value}


def _named(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _us(at: float, zero: float) -> float:
    return round(1e6 * (at - zero), 3)
