"""Classes of priority: the highest class first, within a class the oldest.

``class/NAME`` puts a job in a class, any number; 0 is the default and higher goes first. A class never
starves another: who has waited for ``max_wait`` goes first whatever its class.
"""

from collections.abc import Mapping, Sequence

from coslice.core.ids import JobId
from coslice.core.policy.base import NOTHING, Choice, Memory, Waiter, check_max_wait, overdue


class Priority:
    name = "priority"
    remembers = False

    def __init__(self, *, classes: Mapping[str, float] | None = None, max_wait: float = 600.0) -> None:
        self._classes = dict(classes or {})
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
        chosen = max(waiters, key=lambda w: (self._classes.get(w.job, 0.0), -w.since))
        return Choice(chosen, f"class {self._classes.get(chosen.job, 0.0):g}, the highest of {len(waiters)}")
