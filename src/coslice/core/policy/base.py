"""Who goes next: the shape of the question and of the answer.

A policy is a pure function of the queue. The group calls it only when its lock is free, only with waiters
that may be granted now (connected, not faulted, not blocked), and never with none. It does not know the
lock, the nodes or the clock.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from coslice.core.ids import Incarnation, JobId, RequestId, SessionId


class Ask(Struct, frozen=True, kw_only=True):
    """One process's request to hold the lock."""

    request: RequestId
    session: SessionId
    since: float
    more: bool = False
    phase: str = ""


class Waiter(Struct, frozen=True, kw_only=True):
    """One incarnation of a job in the queue. All its processes share one place and will share one lease."""

    job: JobId
    incarnation: Incarnation
    asks: tuple[Ask, ...]
    since: float
    world: int = 0
    need: int = 0
    attempts: int = 0
    """Swaps begun for it that failed by another job's fault."""


class Choice(Struct, frozen=True):
    waiter: Waiter
    reason: str


class Policy(Protocol):
    @property
    def name(self) -> str: ...

    def choose(self, waiters: Sequence[Waiter], *, resident: JobId | None, now: float) -> Choice:
        """Choose one of ``waiters`` (never empty, in the order of the queue).

        ``resident``: whose state was on the accelerators last; ``now``: the driver's clock in seconds.
        """
        ...
