"""An asyncio event loop whose clock jumps to the next timer when nothing is ready: hours pass in
milliseconds.

Everything on the loop runs as it does in production; only waiting is free. Where nothing is ready and no
timer is set the test would hang for ever, so ``Stuck`` is raised instead. What happens outside the loop (a
thread, a socket, a child process) takes real time: wait for it inside ``with outside():``, during which the
clock rests.
"""

import asyncio
import contextlib
import math
import selectors
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE = 30.0  # real seconds for something outside the loop


_RESOLUTION = time.get_clock_info("monotonic").resolution


class Stuck(AssertionError):
    """Every task waits and nothing will ever wake one of them."""


class _JumpingSelector(selectors.DefaultSelector):
    """Asked to sleep, it looks whether anything is ready, and otherwise moves the clock on."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.now = start
        self.outside = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self.outside:
            ready = super().select(_PATIENCE)
            if not ready:
                raise Stuck(f"nothing came from outside the loop within {_PATIENCE:.0f} real seconds")
            return ready
        if timeout is None:
            raise Stuck("every task waits, no timer is set, and nothing outside the loop was announced")
        self.now += timeout
        if self.now + _RESOLUTION <= self.now:  # so large that asyncio would think the timer not due yet
            self.now = math.nextafter(self.now, math.inf)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """``asyncio.Runner(loop_factory=VirtualLoop)``. Time starts at 1000 s, so that 0.0 is visibly a
    mistake."""

    def __init__(self, start: float = 1000.0) -> None:
        self._jumping = _JumpingSelector(start)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """The clock rests meanwhile: whoever waits here waits for something real."""
        self._jumping.outside += 1
        try:
            yield
        finally:
            self._jumping.outside -= 1

    async def shutdown_default_executor(self) -> None:  # its threads end in real time
        with self.outside():
            await super().shutdown_default_executor()


def outside() -> contextlib.AbstractContextManager[None]:
    """``VirtualLoop.outside`` of the running loop; does nothing on any other loop."""
    loop = asyncio.get_running_loop()
    return loop.outside() if isinstance(loop, VirtualLoop) else contextlib.nullcontext()


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on a loop with virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
