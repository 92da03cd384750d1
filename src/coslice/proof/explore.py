"""Every order of events of a small world, breadth first, until nothing new comes.

The real lock and the real holdings of two nodes stand in one joint state. In every state the invariants are
checked, and at the end, backwards over the graph, that from each state with a waiter an answer is reachable
by steps that are no trouble.

What is left out, and why nothing is lost by it. What a client says is heard as it is said: it does nothing in
between that others could see, and a message lost on the way is the same as one said after the stream broke.
What an agent says is heard as it is said: until its word arrives its step is seen by its own node only, so
the step may as well come later; an agent that dies before it could speak is a letter of its own. No message
that only confirms (a welcome, an answer to a yield) stays on the way; losing one is explored as a breaking
stream. A stream that breaks is noticed by its ends at different times; that of a process that dies, at once
(the system ends it; chaos also has machines that vanish without a word). Time is what may end: any deadline
that runs may pass at any moment, within the stated number.
"""

import gc
import time
from array import array
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from coslice.proof.alphabet import follow
from coslice.proof.canon import Key
from coslice.proof.device import Violation
from coslice.proof.explored import Explored, Move
from coslice.proof.moves import moves


class Figures(Struct, kw_only=True):
    states: int = 0
    edges: int = 0
    depth: int = 0
    waiting_states: int = 0
    stuck_states: int = 0
    violations: int = 0
    complete: bool = False
    seconds: float = 0.0
    letters: dict[str, int] = {}
    """How many edges each letter of the alphabet made."""
    stories: list[list[str]] = []
    """Of the first violations: the shortest way there."""


class Explorer:
    """``limit``: states at most; ``seconds``: stop then, incomplete; ``progress`` hears now and then."""

    def __init__(
        self,
        start: Explored,
        *,
        limit: int = 5_000_000,
        seconds: float = float("inf"),
        progress: Callable[[Figures, int], None] = lambda figures, waiting: None,
        every: int = 2000,
    ) -> None:
        self.figures = Figures()
        self._every = every
        self._start, self._limit, self._seconds, self._progress = start, limit, seconds, progress
        self._number: dict[Key, int] = {}
        self._parent = array("l")
        self._letter = array("H")
        self._names: list[str] = []
        self._source, self._target = array("l"), array("l")
        self._good = bytearray()
        """Per state: it has no waiter, or a step that is no trouble answers one."""
        self._waits = bytearray()

    def run(self) -> Figures:
        """To the end, or to the limit. Nothing here is in a cycle: the collector would look in vain."""
        collects = gc.isenabled()
        gc.disable()
        try:
            return self._run()
        finally:
            if collects:
                gc.enable()

    def _run(self) -> Figures:
        began, figures = time.monotonic(), self.figures
        self._add(self._start, -1, "")
        frontier: deque[tuple[int, int, Explored]] = deque([(0, 0, self._start)])
        while frontier:
            number, depth, state = frontier.popleft()
            figures.depth = depth
            for move in moves(state):
                self._follow(number, depth, state, move, frontier)
            if number % self._every == 0:
                figures.seconds = time.monotonic() - began
                self._progress(figures, len(frontier))
                if figures.states > self._limit or figures.seconds > self._seconds:
                    break
        else:
            figures.complete = True
        if figures.complete:
            self._look_back()
        figures.seconds = time.monotonic() - began
        return figures

    def _follow(
        self,
        number: int,
        depth: int,
        state: Explored,
        move: Move,
        frontier: deque[tuple[int, int, Explored]],
    ) -> None:
        figures = self.figures
        figures.letters[move.letter] = figures.letters.get(move.letter, 0) + 1
        figures.edges += 1
        try:
            after = follow(state, move)
        except Violation as broken:
            self._broken(number, move, str(broken))
            return
        except Exception as error:
            self._broken(number, move, f"{type(error).__name__}: {error}")
            return
        key = after.key()
        known = self._number.get(key)
        if known is None:
            known = self._add(after, number, move.name, key=key)
            frontier.append((known, depth + 1, after))
        if not move.trouble:
            self._source.append(number)
            self._target.append(known)
            if after.answered:
                self._good[number] = 1

    def _add(self, state: Explored, parent: int, letter: str, key: Key | None = None) -> int:
        number = len(self._number)
        self._number[key or state.key()] = number
        self._parent.append(parent)
        if letter not in self._names:
            self._names.append(letter)
        self._letter.append(self._names.index(letter))
        waits = state.waits()
        self._waits.append(waits)
        self._good.append(not waits)
        self.figures.states += 1
        return number

    def _broken(self, number: int, move: Move, text: str) -> None:
        self.figures.violations += 1
        if len(self.figures.stories) < 5:
            self.figures.stories.append([*self.way_to(number), move.name, text])

    def keys(self) -> set[Key]:
        """Every state that was found."""
        return set(self._number)

    def way_to(self, number: int) -> list[str]:
        """The shortest way to a state, as the names of its moves."""
        names = []
        while number > 0:
            names.append(self._names[self._letter[number]])
            number = self._parent[number]
        return names[::-1]

    def _look_back(self) -> None:
        """From which states is an answer to somebody reachable? Backwards from those where one is given."""
        count = len(self._number)
        heads, links, sources = array("l", [-1]) * count, array("l"), self._source
        for i, target in enumerate(self._target):
            links.append(heads[target])
            heads[target] = i
        todo = [number for number in range(count) if self._good[number]]
        while todo:
            edge = heads[todo.pop()]
            while edge >= 0:
                source = sources[edge]
                if not self._good[source]:
                    self._good[source] = 1
                    todo.append(source)
                edge = links[edge]
        self.figures.waiting_states = sum(self._waits)
        stuck = [n for n in range(count) if not self._good[n]]
        self.figures.stuck_states = len(stuck)
        for number in stuck[:2]:
            self.figures.stories.append([*self.way_to(number), "stuck: nobody can be answered from here"])
