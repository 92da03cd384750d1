"""Whoever was served longest ago: round robin among those who wait, whatever the order of their requests.

Between two turns of a job every other that waits has one: nobody waits for more than one turn of each.
"""

from collections.abc import Sequence

from coslice.core.ids import JobId
from coslice.core.policy.base import NOTHING, Choice, Memory, Waiter


class LeastRecent:
    name = "least_recent"
    remembers = True

    def choose(
        self,
        waiters: Sequence[Waiter],
        *,
        resident: JobId | None,
        now: float,
        past: Memory = NOTHING,
    ) -> Choice:
        def key(waiter: Waiter) -> float:
            mine = past.get(waiter.job)
            return -1.0e18 if mine is None or mine.last_end is None else mine.last_end

        chosen = min(waiters, key=key)  # of equals the first in the queue
        mine = past.get(chosen.job)
        if mine is None or mine.last_end is None:
            return Choice(chosen, f"the first of {len(waiters)} that had no turn yet")
        return Choice(chosen, f"served longest ago, {max(0.0, now - mine.last_end):.1f} s, of {len(waiters)}")
