"""Per job: how often and how long it held, how long it waited, and how much sharing slows it down.

Kept while the job is there (or faulted); what is over is dropped, and beyond ``MAX_JOBS`` jobs share one
name. So the number of series is bounded, however many jobs come and go.

The slowdown is an estimate from the lock alone. A job's cycle is *away* (from the end of a turn to the next
request), *wait* and *hold*; alone it would not wait::

    slowdown = Σ (away + wait + hold) ÷ Σ (away + hold)

over its last turns, the newest weighing most. That takes hold and away for what they would be alone: what
jobs cost each other in CPU, network or caches is not in it, and neither is a swap that a lone job would need
to start.
"""

from collections.abc import Iterator, Mapping

from coslice.core.group_state import Group, Held
from coslice.core.ids import GroupId
from coslice.observe.metric import MAX_JOBS, OTHER, Metric, Reading

SLOWDOWN = Metric(
    "coslice_job_slowdown_ratio",
    "gauge",
    "Estimated step time shared ÷ alone, over the last turns; from the third turn on.",
    ("group", "job_id"),
)
TURNS = Metric("coslice_job_turns_total", "counter", "Leases that ended.", ("group", "job_id"))
HELD = Metric(
    "coslice_job_held_seconds_total", "counter", "Time held, of leases that ended.", ("group", "job_id")
)
WAITED = Metric(
    "coslice_job_waited_seconds_total", "counter", "Time waited, of leases that ended.", ("group", "job_id")
)
OF_JOBS = (SLOWDOWN, TURNS, HELD, WAITED)

FADE = 0.9
"""What a turn weighs less with every turn after it: about the last ten count."""
ENOUGH = 3
"""Turns without which there is no estimate."""
Key = tuple[GroupId, str]


class _Turns:
    __slots__ = ("away", "count", "ended_at", "held", "shared", "solo", "wait", "waited")

    def __init__(self) -> None:
        self.count, self.held, self.waited = 0, 0.0, 0.0
        self.ended_at: float | None = None
        self.away = self.wait = 0.0  # of the turn that is on
        self.shared = self.solo = 0.0

    def slowdown(self) -> float | None:
        return self.shared / self.solo if self.count >= ENOUGH and self.solo > 0 else None


Turns = tuple[tuple[Key, _Turns], ...]


class JobMeter:
    def __init__(self, limit: int = MAX_JOBS) -> None:
        self._limit = limit
        self._jobs: dict[Key, _Turns] = {}
        self._others: dict[Key, _Turns] = {}
        """By group, of those beyond the limit: sums only."""

    def began(self, group: GroupId, held: Held, at: float) -> None:
        turns = self._jobs.get((group, held.job))
        if turns is None:
            if len(self._jobs) >= self._limit:
                return
            turns = self._jobs[group, held.job] = _Turns()
        turns.wait = max((holder.waited for holder in held.holders), default=0.0)
        turns.away = 0.0
        if turns.ended_at is not None:  # a request made while it still held does not wait before its end
            since = max(at - turns.wait, turns.ended_at)
            turns.away, turns.wait = since - turns.ended_at, at - since

    def ended(self, group: GroupId, held: Held, at: float) -> None:
        hold = max(0.0, at - held.since)
        turns = self._jobs.get((group, held.job))
        if turns is None:
            turns = self._others.setdefault((group, OTHER), _Turns())
            turns.wait = max((holder.waited for holder in held.holders), default=0.0)
        elif turns.ended_at is not None:
            turns.shared = FADE * turns.shared + turns.away + turns.wait + hold
            turns.solo = FADE * turns.solo + turns.away + hold
        turns.count, turns.ended_at = turns.count + 1, at
        turns.held, turns.waited = turns.held + hold, turns.waited + turns.wait

    def prune(self, groups: Mapping[GroupId, Group]) -> None:
        """Drop what ended: jobs that no group knows any more, and groups that are gone."""
        known = {key[0]: groups[key[0]].jobs for key in self._jobs if key[0] in groups}
        live = {(group, record.job) for group, records in known.items() for record in records}
        for key in self._jobs.keys() - live:
            del self._jobs[key]
        for key in [key for key in self._others if key[0] not in groups]:
            del self._others[key]

    def take(self) -> Turns:
        """A job may be named as the others are: no series is told twice."""
        return tuple({**self._jobs, **self._others}.items())


def of_jobs(taken: Turns) -> Iterator[Reading]:
    """Others may have turns meanwhile."""
    for labels, turns in taken:
        if (slowdown := turns.slowdown()) is not None and labels[1] != OTHER:
            yield SLOWDOWN, labels, slowdown
        yield TURNS, labels, turns.count
        yield HELD, labels, turns.held
        yield WAITED, labels, turns.waited
