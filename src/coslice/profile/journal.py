"""Coslice's own journal: who asked, was granted and yielded when. A job that shares is profiled as it runs.

Waits for the lock and swaps are left out: they belong to the sharing, not to the job. Every pair of group and
job makes a pool; a job that uses two groups has two. Cycles are from one acquire of the job's first phase to
the next; the off-time before a phase is named after it. A buffered job that waited for others finds batches
ready and waits less for them than alone: with ``staleness`` its off-time is what its batches say it would be.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from coslice.errors import ConfigError
from coslice.profile.holds import Hold, Holds, alone, batch_made_in, computed, cycles_of, order_of, pool_of
from coslice.profile.model import Pool, Profile, Source
from coslice.profile.number import LONGEST, seconds
from coslice.profile.options import ReadOptions
from coslice.profile.steps import trend
from coslice.runtime.journal import read_journals

Line = Mapping[str, Any]


class _Job(Struct):
    holds: list[Hold] = []
    asked_at: list[float] = []
    """When, for each of ``holds``."""
    asked: dict[str, tuple[float, str]] = {}
    """Request → when, for which phase."""
    left: float | None = None
    off: float = -1.0
    phase: str = ""
    since: float = 0.0
    """When it asked for the turn that it has."""
    incarnation: str = ""
    bytes: int = 0
    queued: bool = False
    """By admission, which journals nothing of the requests that wait for it: when it will have asked for its
    next turn nobody knows."""
    cut: int = 0
    """Turns that did not end with a yield: they say nothing."""


def looks_like_journal(text: str) -> bool:
    return text.startswith('{"coslice_journal"')


def read_journal_profiles(file: str, options: ReadOptions) -> list[Profile]:
    """One profile per job of the journal and its predecessors (``<file>.1``, …). Raises ``ConfigError`` if
    nobody ever held and yielded twice."""
    journal = read_journals(Path(file))
    jobs: dict[tuple[str, str], _Job] = {}
    skipped: Counter[str] = Counter()
    held: dict[str, tuple[str, float]] = {}
    for line in journal.records:
        if "event" not in line:
            skipped[_kind(line)] += 1
            _queued(line, jobs)
            if "coslice_journal" in line:  # a restart: another clock
                for group, (holder, _) in held.items():
                    if (job := jobs.get((group, holder))) is not None:
                        _cut(job)
                held.clear()
                for job in jobs.values():
                    job.left, job.asked = None, {}
            continue
        try:
            _read(line, jobs, held)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            skipped["damaged lines"] += 1
    used = len(journal.records) - sum(skipped.values())
    if journal.damaged:
        skipped["damaged lines"] += journal.damaged
    if journal.torn:
        skipped["the last line, torn"] += 1
    pools: dict[str, list[Pool]] = defaultdict(list)
    notes: dict[str, list[str]] = defaultdict(list)
    for (group, job_name), job in jobs.items():
        pool = _pool(group, job, options, notes[job_name])
        if pool is not None:
            pools[job_name].append(pool)
            notes[job_name] += trend(pool)
    if not pools:
        raise ConfigError(
            f"{file}: no job in this journal held the lock and came back for it: nothing to profile"
        )
    unknown = sorted({job_name for _, job_name in jobs} - set(pools))
    rest = [f"no whole cycle, and so no profile: {_some(unknown)}"] if unknown else []
    return [
        Profile(
            name=job_name,
            pools=tuple(found),
            source=Source(
                kind="journal",
                file=file,
                read=len(journal.records) + journal.damaged + journal.torn,
                used=used,
                skipped=dict(skipped),
                notes=(*notes[job_name], *rest),
            ),
        )
        for job_name, found in pools.items()
    ]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _pool(group: str, job: _Job, options: ReadOptions, notes: list[str]) -> Pool | None:
    staleness = options.staleness or 0.0
    every = cycles_of(job.holds)
    whole = _whole(every)[options.skip_first :]
    if not whole:
        notes.append(f"group {group}: held {len(job.holds)} times, too few for a cycle")
        return None
    if job.cut:
        notes.append(
            f"group {group}: {job.cut} turns did not end with a yield, and their cycles are left out"
        )
    if staleness:
        makes = _makes(every, job.asked_at, staleness)
        if makes:
            befores = [whole[-1], *whole]  # it goes round, as ``profile.cycle`` plays it
            turn = itertools.cycle(makes)
            whole = [
                alone(cycle, next(turn), computed(before), staleness)
                for cycle, before in zip(whole, befores, strict=False)
            ]
        else:
            notes.append(
                f"group {group}: batches always lay ready, so that nobody knows how long one takes: off-time "
                "is what was seen, and may be longer alone"
            )
    elif options.staleness is None:
        notes.append("off-time is taken as closed; say --staleness N if batches queue up meanwhile")
    return pool_of(
        whole, name=group, staleness=staleness, accelerators=options.accelerators, state_bytes=job.bytes
    )


def _whole(cycles: Sequence[Holds]) -> list[Holds]:
    """Without those of which a turn is not known, and the one that the end of the journal cut off."""
    order = order_of([hold for cycle in cycles for hold in cycle])
    some = list(cycles)
    if some and some[-1][-1].phase != order[-1]:
        some.pop()
    return [cycle for cycle in some if all(hold.off >= 0 for hold in cycle)]


def _makes(cycles: Sequence[Holds], asked_at: Sequence[float], staleness: float) -> list[float]:
    """Seconds that batches took, as far as the waits for them show it."""
    starts = itertools.accumulate((len(cycle) for cycle in cycles[:-1]), initial=0)
    firsts = [(cycle[0], asked_at[start]) for cycle, start in zip(cycles, starts, strict=True)]
    made = [
        batch_made_in(before, hold, at - at_before, staleness)
        for (before, at_before), (hold, at) in itertools.pairwise(firsts)
    ]
    return [one for one in made if one is not None]


def _read(line: Line, jobs: dict[tuple[str, str], _Job], held: dict[str, tuple[str, float]]) -> None:
    at, group, event = float(line["t"]), str(line["group"]), line["event"]
    kind = event.get("type")
    if kind == "AcquireRequested":
        job = jobs.setdefault((group, str(event["job"])), _Job())
        if (start := str(event.get("incarnation", ""))) != job.incarnation:
            job.incarnation, job.left = start, None  # it began anew: no off-time of its loop
        if job.queued:
            job.queued, job.left = False, None
        job.asked.setdefault(str(event["request"]), (at, str(event.get("phase", ""))))
    for effect in line.get("effects", ()):
        granted = jobs.get((group, str(effect.get("job"))))
        if effect.get("type") == "Grant" and granted is not None:
            asked, phase = granted.asked.pop(str(effect.get("request")), (at, granted.phase))
            if held.get(group, ("", 0.0))[0] != effect.get("job"):  # not another process of the holder
                granted.off = asked - granted.left if granted.left is not None else -1.0
                granted.phase, granted.since = phase, asked
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
        _ended(holder, at - since, at, whole=kind == "LeaseYielded")
    held[group] = (now, at)


def _queued(line: Line, jobs: dict[tuple[str, str], _Job]) -> None:
    said = line.get("admission")
    if isinstance(said, dict) and said.get("code") == "queued":
        job = jobs.get((str(said.get("group")), str(said.get("job"))))
        if job is not None:
            job.queued = True


def _ended(job: _Job, on: float, at: float, *, whole: bool) -> None:
    if not whole or seconds(on) is None or job.off > LONGEST:
        _cut(job)
        return
    job.holds.append(Hold(job.phase, job.off, on))
    job.asked_at.append(job.since)
    job.left, job.off = at, -1.0


def _cut(job: _Job) -> None:
    """Its turn did not end by a yield. Neither the cycle with it nor the next one is whole."""
    job.holds.append(Hold(job.phase, -1.0, 0.0))
    job.asked_at.append(job.since)
    job.left, job.off, job.cut = None, -1.0, job.cut + 1


def _sizes(group: str, facts: Line, jobs: dict[tuple[str, str], _Job]) -> None:
    for context in facts.get("contexts", ()):
        if (job := jobs.get((group, str(context.get("job"))))) is not None:
            job.bytes = max(job.bytes, int(context.get("bytes", 0)))


def _kind(line: Line) -> str:
    if "coslice_journal" in line:
        return "restarts of the orchestrator"
    return next(
        (f"{key} lines" for key in ("note", "solo", "summary", "admission") if key in line), "other lines"
    )
