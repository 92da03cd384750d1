"""Prefer the job whose state is on the accelerators already, until somebody has waited too long.

Serving the resident job costs no copy; ``max_wait`` bounds what the others pay for that.
"""

from collections.abc import Sequence

from coslice.core.ids import JobId
from coslice.core.policy.base import Choice, Waiter


class FewestSwaps:
    name = "fewest_swaps"

    def __init__(self, *, max_wait: float = 60.0) -> None:
        if max_wait < 0:
            raise ValueError(f"max_wait is {max_wait} s: use 0 or more seconds")
        self._max_wait = max_wait

    def choose(self, waiters: Sequence[Waiter], *, resident: JobId | None, now: float) -> Choice:
        oldest = min(waiters, key=lambda w: w.since)  # of equals the first in the queue
        waited = now - oldest.since
        if waited >= self._max_wait:
            return Choice(oldest, f"waited {waited:.1f} s, longer than {self._max_wait:g} s")
        for waiter in waiters:
            if waiter.job == resident:
                return Choice(waiter, "its state is on the accelerators: no swap")
        return Choice(oldest, f"nobody in the queue is resident: the oldest of {len(waiters)}")
