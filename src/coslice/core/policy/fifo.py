"""First come, first served. Nobody waits for more than one turn of each of the others."""

from collections.abc import Sequence

from coslice.core.ids import JobId
from coslice.core.policy.base import NOTHING, Choice, Memory, Waiter


class Fifo:
    name = "fifo"
    remembers = False

    def choose(
        self,
        waiters: Sequence[Waiter],
        *,
        resident: JobId | None,
        now: float,
        past: Memory = NOTHING,
    ) -> Choice:
        return Choice(waiters[0], f"first of {len(waiters)} in the queue")
