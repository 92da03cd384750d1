"""Who goes next: the shape of the question and of the answer.

A policy is a pure function of the queue and of what the lock remembers of jobs. The group calls it only when
its lock is free, only with waiters that may be granted now (connected, not faulted, not blocked), and never
with none. It does not know the lock, the nodes or the clock.

Every policy but FIFO bounds what its preference may cost: who has waited for ``max_wait`` seconds goes first,
the oldest first.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, final

from msgspec import Struct

from coslice.core.ids import Incarnation, JobId, RequestId, SessionId
from coslice.core.policy.past import Past


class Ask(Struct, frozen=True, gc=False, kw_only=True):
    """One process's request to hold the lock."""

    request: RequestId
    session: SessionId
    since: float
    more: bool = False
    phase: str = ""
    final: bool = False
    """Nobody will confirm the grant: it counts as confirmed when it is given."""


class Waiter(Struct, frozen=True, gc=False, kw_only=True):
    """One incarnation of a job in the queue. All its processes share one place and will share one lease."""

    job: JobId
    incarnation: Incarnation
    asks: tuple[Ask, ...]
    since: float
    world: int = 0
    need: int = 0
    attempts: int = 0
    """Swaps begun for it that failed by another job's fault."""

    @property
    def phase(self) -> str:
        return self.asks[0].phase if self.asks else ""


@final
class Choice(Struct, frozen=True, gc=False):
    waiter: Waiter
    reason: str


@final
class Reserve(Struct, frozen=True, gc=False, kw_only=True):
    """Nobody yet: the lock stays free for a job that is not in the queue, until ``until`` at the latest."""

    job: JobId
    until: float
    """On the driver's clock, later than now."""
    reason: str


Memory = Mapping[JobId, Past]
NOTHING: Memory = {}


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def remembers(self) -> bool:
        """Does it want to know what was? If not, nothing is kept and ``past`` is empty."""
        ...

    def choose(
        self,
        waiters: Sequence[Waiter],
        *,
        resident: JobId | None,
        now: float,
        past: Memory = ...,
    ) -> Choice | Reserve:
        """Choose one of ``waiters`` (never empty, in the order of the queue).

        ``resident``: whose state was on the accelerators last; ``now``: the driver's clock in seconds;
        ``past``: of every job that is known, waiting or not.
        """
        ...


def overdue(waiters: Sequence[Waiter], *, now: float, max_wait: float) -> Choice | None:
    """The oldest waiter, if it has waited for ``max_wait`` seconds or more."""
    oldest = min(waiters, key=_since)  # of equals the first in the queue
    waited = now - oldest.since
    if waited >= max_wait:
        return Choice(oldest, f"waited {waited:.1f} s, longer than {max_wait:g} s")
    return None


def check_max_wait(max_wait: float) -> float:
    if not max_wait >= 0:
        raise ValueError(f"max_wait is {max_wait} s: use 0 or more seconds")
    return max_wait


def _since(waiter: Waiter) -> float:
    return waiter.since
