"""Time for the shell. The core never reads a clock: drivers stamp events with one of these.

Deadlines are seconds of a monotonic clock and mean nothing outside the process that made them.
"""

import asyncio
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, monotonic, on the scale that the running event loop's timers use."""
        ...


class LoopClock:
    """The running event loop's own clock, so that a loop with virtual time carries everything along."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()
