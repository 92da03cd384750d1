"""Keeps the garbage collector's pauses short in a process whose heap is large and lives long.

A collection of everything stops a process with 10,000 sessions for most of a second, and nobody is granted
anything meanwhile. So what has survived one collection is looked at no more (``gc.freeze``), and the newest
is collected before there is much of it. Reference counts free nearly all there is; what they cannot free
(circles) is left behind by sessions that ended: everything is looked at again once many of them have.

Concerns the whole process: for one that only is a server.
"""

import asyncio
import gc

STEPS = 200
"""Steps of all groups together between two collections of the newest; a hand-over is about four. Python
itself counts what is new less what is freed: next to nothing where the new takes the place of the old."""
SESSION = 5
"""Steps that a new session counts as."""
ENDED = 1000
"""Sessions that ended, at least, before everything is looked at; and no fewer than are there."""

ROUNDS = 500
"""Collections of the newest between two looks at how much has been set apart; one takes 9 ms at a million
objects. Twice as much as at the last time, whatever it came from: everything is looked at."""


class Heap:
    def __init__(self) -> None:
        self._steps = self._ended = self._rounds = 0
        self._apart = 0

    def stepped(self, steps: int = 1) -> None:
        """Some group took a step. Call it, and the others, from the event loop's thread."""
        self._steps += steps
        if self._steps >= STEPS:
            self._steps = 0
            asyncio.get_running_loop().call_soon(self._newest)  # once this step's answers are on their way

    def began(self) -> None:
        """A session is new."""
        self.stepped(SESSION)

    def ended(self, left: int) -> None:
        """A session is over; ``left``: how many there are."""
        self._ended += 1
        if self._ended >= max(ENDED, left):
            self._ended = 0
            asyncio.get_running_loop().call_soon(self._everything)

    def _newest(self) -> None:
        gc.collect(0)
        gc.freeze()
        self._rounds += 1
        if self._rounds >= ROUNDS:
            self._rounds = 0
            apart = gc.get_freeze_count()
            if self._apart and apart > 2 * self._apart:
                self._everything()
            self._apart = self._apart or apart

    def _everything(self) -> None:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        self._apart = gc.get_freeze_count()
