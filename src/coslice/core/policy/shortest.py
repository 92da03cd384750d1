"""The shortest phase first, with ageing: every second of waiting counts as ``ageing`` seconds less of phase.

How long a job's phase takes is a running mean of its last ones of that name; a job without a past counts as
short, so that it is seen soon. Nobody who waits is passed by a newcomer once it has waited for its own phase
÷ ``ageing``, nor by anybody once it has waited for ``max_wait``.
"""

from collections.abc import Sequence

from coslice.core.ids import JobId
from coslice.core.policy.base import NOTHING, Choice, Memory, Waiter, check_max_wait, overdue


class Shortest:
    name = "shortest"
    remembers = True

    def __init__(self, *, ageing: float = 0.5, max_wait: float = 900.0) -> None:
        if not ageing > 0:
            raise ValueError(f"ageing is {ageing}: use more than 0, or long phases starve")
        self._ageing, self._max_wait = ageing, check_max_wait(max_wait)

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

        def phase(waiter: Waiter) -> float:
            mine = past.get(waiter.job)
            return (mine.hold(waiter.phase) if mine is not None else None) or 0.0

        chosen = min(waiters, key=lambda w: phase(w) - self._ageing * (now - w.since))
        return Choice(
            chosen,
            f"its phase takes {phase(chosen):.1f} s and it waited {now - chosen.since:.1f} s: "
            f"the least after ageing of {len(waiters)}",
        )
