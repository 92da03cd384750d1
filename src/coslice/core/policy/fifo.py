"""First come, first served."""

from collections.abc import Sequence

from coslice.core.ids import JobId
from coslice.core.policy.base import Choice, Waiter


class Fifo:
    name = "fifo"

    def choose(self, waiters: Sequence[Waiter], *, resident: JobId | None, now: float) -> Choice:
        first = waiters[0]
        return Choice(first, f"first of {len(waiters)} in the queue")
