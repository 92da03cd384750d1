"""Weighted fair shares of the time on the accelerators: whoever is furthest behind its share goes next.

A job's deficit is its share, by weight, of what the waiting jobs got together, less what it got itself. Both
are forgotten by half every half-hour, so that a job neither saves up a claim while it is away nor pays for
ever. Weights say how ties over a full device are broken; a job that asks for less than its share is served
nearly at once. ``weight/NAME`` sets one; 1 is the default.
"""

from collections.abc import Mapping, Sequence

from coslice.core.ids import JobId
from coslice.core.policy.base import NOTHING, Choice, Memory, Waiter, check_max_wait, overdue


class FairShare:
    name = "fair_share"
    remembers = True

    def __init__(self, *, weight: Mapping[str, float] | None = None, max_wait: float = 900.0) -> None:
        self._weight = dict(weight or {})
        for job, value in self._weight.items():
            if not 0 < value < float("inf"):
                raise ValueError(f"the weight of {job} is {value}: use a number above 0")
        self._max_wait = check_max_wait(max_wait)

    def choose(
        self,
        waiters: Sequence[Waiter],
        *,
        resident: JobId | None,
        now: float,
        past: Memory = NOTHING,
    ) -> Choice:
        if (late := overdue(waiters, now=now, max_wait=self._max_wait)) is not None:
            return late
        got = {w.job: past[w.job].served_at(now) if w.job in past else 0.0 for w in waiters}
        weights = {w.job: self._weight.get(w.job, 1.0) for w in waiters}
        per_weight = sum(got.values()) / sum(weights.values())
        chosen = min(waiters, key=lambda w: got[w.job] / weights[w.job])  # the greatest deficit per weight
        deficit = per_weight * weights[chosen.job] - got[chosen.job]
        return Choice(chosen, f"{max(0.0, deficit):.1f} s behind its share, the most of {len(waiters)}")
