"""Prefer the job whose state is on the accelerators already, until somebody has waited too long.

Serving the resident job costs no copy; ``max_wait`` bounds what the others pay for that.
"""

from collections.abc import Sequence

from coslice.core.ids import JobId
from coslice.core.policy.base import NOTHING, Choice, Memory, Waiter, check_max_wait, overdue


class FewestSwaps:
    name = "fewest_swaps"
    remembers = False

    def __init__(self, *, max_wait: float = 60.0) -> None:
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
        for waiter in waiters:
            if waiter.job == resident:
                return Choice(waiter, "its state is on the accelerators: no swap")
        oldest = min(waiters, key=lambda w: w.since)
        return Choice(oldest, f"nobody in the queue is resident: the oldest of {len(waiters)}")
