"""Coslice's own journal: who asked, was granted and yielded when. A job that shares is profiled as it runs.

Waits for the lock and swaps are left out: they belong to the sharing, not to the job. Every pair of group and
job makes a pool; a job that uses two groups has two. Cycles are from one acquire of the job's first phase to
the next; the off-time before a phase is named after it.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from coslice.errors import ConfigError
from coslice.profile.holds import Hold, cycles_of, pool_of
from coslice.profile.model import Pool, Profile, Source
from coslice.profile.options import ReadOptions
from coslice.profile.steps import trend
from coslice.runtime.journal import read_journal

Line = Mapping[str, Any]


class _Job(Struct):
    holds: list[Hold] = []
    asked: dict[str, tuple[float, str]] = {}
    """Request → when, for which phase."""
    left: float | None = None
    off: float = -1.0
    phase: str = ""
    bytes: int = 0


def looks_like_journal(text: str) -> bool:
    return text.startswith('{"coslice_journal"')


def read_journal_profiles(file: str, options: ReadOptions) -> list[Profile]:
    """One profile per job of the journal. Raises ``ConfigError`` if nobody ever held and yielded twice."""
    journal = read_journal(Path(file))
    jobs: dict[tuple[str, str], _Job] = {}
    skipped: Counter[str] = Counter()
    held: dict[str, tuple[str, float]] = {}
    for line in journal.records:
        if "event" not in line:
            skipped[_kind(line)] += 1
            if "coslice_journal" in line:  # a restart: another clock
                held.clear()
                for job in jobs.values():
                    job.left, job.asked = None, {}
            continue
        _read(line, jobs, held)
    used = len(journal.records) - sum(skipped.values())
    if journal.torn:
        skipped["the last line, torn"] += 1
    pools: dict[str, list[Pool]] = defaultdict(list)
    notes: dict[str, list[str]] = defaultdict(list)
    for (group, job_name), job in jobs.items():
        holds = [hold for hold in job.holds[options.skip_first :] if hold.off >= 0]
        if not holds:
            notes[job_name].append(f"group {group}: held {len(job.holds)} times, too few for a cycle")
            continue
        pool = pool_of(
            cycles_of(holds),
            name=group,
            staleness=options.staleness or 0.0,
            accelerators=options.accelerators,
            state_bytes=job.bytes,
        )
        pools[job_name].append(pool)
        notes[job_name] += trend(pool)
    if not pools:
        raise ConfigError(
            f"{file}: no job in this journal held the lock and came back for it: nothing to profile"
        )
    return [
        Profile(
            name=job_name,
            pools=tuple(found),
            source=Source(
                kind="journal",
                file=file,
                read=len(journal.records) + journal.torn,
                used=used,
                skipped=dict(skipped),
                notes=tuple(notes[job_name]),
            ),
        )
        for job_name, found in pools.items()
    ]


def _read(line: Line, jobs: dict[tuple[str, str], _Job], held: dict[str, tuple[str, float]]) -> None:
    at, group, event = float(line["t"]), str(line["group"]), line["event"]
    kind = event.get("type")
    if kind == "AcquireRequested":
        job = jobs.setdefault((group, str(event["job"])), _Job())
        job.asked.setdefault(str(event["request"]), (at, str(event.get("phase", ""))))
    for effect in line.get("effects", ()):
        granted = jobs.get((group, str(effect.get("job"))))
        if effect.get("type") == "Grant" and granted is not None:
            asked, phase = granted.asked.pop(str(effect.get("request")), (at, granted.phase))
            if held.get(group, ("", 0.0))[0] != effect.get("job"):  # not another process of the holder
                granted.off = asked - granted.left if granted.left is not None else -1.0
                granted.phase = phase
        elif effect.get("type") == "Refuse":
            for job in jobs.values():
                job.asked.pop(str(effect.get("request")), None)
    if kind == "NodeReported" or kind == "OpSucceeded":
        _sizes(group, event.get("facts") or {}, jobs)
    state = line.get("state") or {}
    now = str(state.get("job") or "") if state.get("occupancy") == "held" else ""
    before, since = held.get(group, ("", at))
    if now == before:
        return
    if before and (holder := jobs.get((group, before))) is not None:
        holder.holds.append(Hold(holder.phase, holder.off, at - since))
        holder.left, holder.off = at, -1.0
    held[group] = (now, at)


def _sizes(group: str, facts: Line, jobs: dict[tuple[str, str], _Job]) -> None:
    for context in facts.get("contexts", ()):
        if (job := jobs.get((group, str(context.get("job"))))) is not None:
            job.bytes = max(job.bytes, int(context.get("bytes", 0)))


def _kind(line: Line) -> str:
    if "coslice_journal" in line:
        return "restarts of the orchestrator"
    return next((f"{key} lines" for key in ("note", "solo", "summary") if key in line), "other lines")
