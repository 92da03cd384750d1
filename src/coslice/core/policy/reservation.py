"""For jobs that are paired: serve whom it delays the others least, and keep the lock for a turn that is due.

A delay is counted in periods of the job that it hits: the same seconds hurt a short job more. Among those who
wait, the turn with the least product of its length and its job's period goes first: of two turns in either
order that delays both together the least (Smith's rule for weights 1 ÷ period). And if a job that is away is
expected back so soon that serving somebody now would delay it by more, in its periods, than waiting for it
and its turn would delay the other, the lock stays free for it: at most ``idle`` periods of the one who waits
for it, and until a fifth of its time away after it was due.

Expectations are running means of what was seen; while a job has no past nobody is kept waiting for it. Who
has waited for ``max_wait`` goes first.
"""

from collections.abc import Iterator, Sequence

from coslice.core.ids import JobId
from coslice.core.policy.base import NOTHING, Choice, Memory, Reserve, Waiter, check_max_wait, overdue
from coslice.core.policy.past import Past

LATE = 0.2
"""Of its time away: so much later than expected a job may be before its reservation lapses."""


class Reservation:
    name = "reservation"
    remembers = True

    def __init__(self, *, idle: float = 0.15, max_wait: float = 900.0) -> None:
        if not 0 <= idle < float("inf"):
            raise ValueError(f"idle is {idle} periods: use 0 or more")
        self._idle, self._max_wait = idle, check_max_wait(max_wait)

    def choose(
        self,
        waiters: Sequence[Waiter],
        *,
        resident: JobId | None,
        now: float,
        past: Memory = NOTHING,
    ) -> Choice | Reserve:
        if (late := overdue(waiters, now=now, max_wait=self._max_wait)) is not None:
            return late
        known = {w.job: _seen(past.get(w.job), w.phase) for w in waiters}
        unseen = next((w for w in waiters if known[w.job] is None), None)
        if unseen is not None:
            return Choice(unseen, f"the first of {len(waiters)} that is not known yet")

        def harm(waiter: Waiter) -> float:
            hold, period = known[waiter.job] or (0.0, 0.0)
            return hold * period

        chosen = min(waiters, key=harm)
        hold, period = known[chosen.job] or (0.0, 0.0)
        kept = self._keep_for(chosen, hold, period, waiters, now=now, past=past)
        if kept is not None:
            return kept
        return Choice(chosen, f"{hold:.1f} s of a period of {period:.1f} s delay the others least")

    def _keep_for(
        self,
        chosen: Waiter,
        hold: float,
        period: float,
        waiters: Sequence[Waiter],
        *,
        now: float,
        past: Memory,
    ) -> Reserve | None:
        present = {w.job for w in waiters}
        best: Reserve | None = None
        most = 0.0
        for job, due, until, its_hold, its_period in _expected(past, present, now):
            idle = max(0.0, due - now)
            if idle > self._idle * period or until - chosen.since + its_hold > self._max_wait:
                continue
            served_now = max(0.0, hold - idle) / its_period
            served_after = (idle + its_hold) / period
            if served_now - served_after > most:
                most = served_now - served_after
                reason = (
                    f"{job} is due in {idle:.1f} s: a turn of {chosen.job} now would delay it by "
                    f"{served_now:.2f} periods, waiting for it delays {chosen.job} by {served_after:.2f}"
                )
                best = Reserve(job=job, until=until, reason=reason)
        return best


def _seen(past: Past | None, phase: str) -> tuple[float, float] | None:
    """(turn, period) in seconds."""
    if past is None:
        return None
    hold, period = past.hold(phase), past.period(phase)
    return None if hold is None or period is None or period <= 0 else (hold, period)


def _expected(
    past: Memory, present: set[JobId], now: float
) -> Iterator[tuple[JobId, float, float, float, float]]:
    """Jobs that are away and not late: (job, due, lapses, turn, period)."""
    for job, mine in past.items():
        seen = _seen(mine, "")
        if job in present or mine.away_since is None or mine.away is None or seen is None:
            continue
        due = mine.away_since + mine.away
        until = due + LATE * mine.away
        if until > now:
            yield job, due, until, seen[0], seen[1]
