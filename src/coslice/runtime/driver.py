"""Runs one pure machine on asyncio: the only writer of its state.

Save first, then act; that order is written here and nowhere else. A turn takes everything in the inbox,
steps each event on the newest state, saves once, and only then shows the new state and performs the effects.
Whoever waits for these goes first; then it writes the journal and answers the posters. Orchestrator (one
driver per group) and agent (one per group that its node serves) use it alike. It knows no event, effect or
state by name.

When a save fails, or the machine itself breaks, nothing of that turn is acted upon: the driver stops, ``run``
raises, every poster is told. What was saved before is what a restart finds.

Call it from the thread of its event loop only.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from coslice.core.effects import Reason, ReasonCode
from coslice.core.outcome import Rejected, Step
from coslice.errors import CosliceError
from coslice.runtime.clock import Clock

S = TypeVar("S")
E = TypeVar("E")
F = TypeVar("F")

log = logging.getLogger(__name__)

UNSAVED_S = 0.2
PATIENCE_S = 0.02


class Stopped(CosliceError):
    """The driver runs no more; the event was not taken, or whether it was is known only to the store."""


class _Post(Generic[E]):
    """An event on its way, and who waits for it."""

    __slots__ = ("done", "event", "rejected")

    def __init__(self, event: E, done: asyncio.Future[None] | None) -> None:
        self.event, self.done = event, done
        self.rejected: Rejected | None = None

    def resolve(self) -> None:
        if self.done is None or self.done.done():  # nobody waits, or no longer
            return
        if self.rejected is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(self.rejected)

    def fail(self, error: Exception) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(error)


class Driver(Generic[S, E, F]):
    """``perform`` is called in the order the machine gave, must not block and must not raise.

    ``record`` hears of every event whose turn was saved, with its step (a refused event: an unchanged state
    and the refusal as its reason). ``changed`` is called at most once a turn, with a state that is durable.
    ``on_stall(state, now)`` is asked for a state with fresh grace when the event loop stood still for
    longer than ``stall_limit`` seconds while a deadline was running.

    ``on_late(before, state, now)`` is asked for a state in which nobody has less time than he was given, when
    the save of what led from ``before`` to ``state`` took until ``now``, for longer than half of that: what
    it gave somebody time for became known only then. What ran before it is to run on.

    ``told_again(event)``: would whoever sent it say it again to a restarted machine? A turn of only such
    events without effects is not worth a flush of its own: it is saved with the next turn, at the latest
    after ``UNSAVED_S``.

    ``patient(state, event)``: would it make no difference to anybody if the event came a moment later? Then
    it waits for the next that is not, and is stepped and saved with that in one turn; else for one to two
    ``PATIENCE_S``, so that all drivers that wait save together. Its poster waits as long.
    """

    def __init__(
        self,
        *,
        name: str,
        state: S,
        step: Callable[[S, E], Step[S, F]],
        next_deadline: Callable[[S], float | None],
        deadline_passed: Callable[[float], E],
        clock: Clock,
        save: Callable[[S], Awaitable[object]],
        perform: Callable[[F], None],
        record: Callable[[float, E, Step[S, F]], None] | None = None,
        changed: Callable[[S], None] | None = None,
        on_stall: Callable[[S, float], S] | None = None,
        on_late: Callable[[S, S, float], S] | None = None,
        stall_limit: float = 5.0,
        told_again: Callable[[E], bool] | None = None,
        patient: Callable[[S, E], bool] | None = None,
    ) -> None:
        self.name = name
        self._state = state
        self._step, self._next_deadline, self._deadline_passed = step, next_deadline, deadline_passed
        self._clock, self._save, self._perform = clock, save, perform
        self._record, self._changed = record, changed
        self._on_stall, self._on_late, self._stall_limit = on_stall, on_late, stall_limit
        self._told_again, self._patient = told_again, patient
        self._unsaved_by = math.inf  # when what is unsaved must be, on the loop's clock
        self._inbox: deque[_Post[E]] = deque()
        self._turn: list[_Post[E]] = []
        self._first: tuple[F, ...] = ()
        self._wake: asyncio.Future[None] | None = None
        self._hurry = False  # something in the inbox does not wait
        self._patience: float | None = None  # until when what is there waits, in the loop's time
        self._due = math.inf  # when the wait ends, in the same
        self._timer: asyncio.TimerHandle | None = None  # left as it is where it comes before that
        self._dated: tuple[object, float | None] = (object(), None)  # a state, and its deadline
        self._late: tuple[S, float] | None = None  # before what was saved late, and when it was
        self._planned: float | None = None  # when the wait should end at the latest, where that matters
        self._deaf = False  # the deadline passed and the machine had nothing to do at it
        self._running = False
        self._stopped: Stopped | None = None

    def step_with(self, step: Callable[[S, E], Step[S, F]]) -> None:
        """From the next event on."""
        self._step = step

    @property
    def state(self) -> S:
        """The newest state that is durable, but for what is told again."""
        return self._state

    def start_with(self, effects: Iterable[F]) -> None:
        """Effects to perform when ``run`` begins: what a restart has to say again. They follow from a saved
        state."""
        self._first += tuple(effects)

    async def post(self, event: E) -> None:
        """Returns once what followed from the event is durable and performed.

        Raises what the machine raised for this event (``Rejected``), the error of a failed save, or
        ``Stopped``. Being cancelled takes nothing back: the event happened.
        """
        await self.put(event)

    def put(self, event: E) -> "asyncio.Future[None]":
        """As ``post``, which waits for what this returns: what is told next comes after it, in the same turn
        if nothing is awaited between."""
        if self._stopped is not None:
            raise Stopped(str(self._stopped)) from self._stopped.__cause__
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take(_Post(event, done))
        return done

    def tell(self, event: E) -> None:
        """Post without waiting. A refusal is recorded and raised to nobody."""
        if self._stopped is not None:
            log.debug("%s is stopped and does not hear %r", self.name, event)
            return
        self._take(_Post(event, None))

    async def run(self) -> None:
        """Serve until cancelled. Raises whatever broke the driver; it is then stopped for good."""
        if self._running or self._stopped is not None:
            raise RuntimeError(f"driver {self.name} runs already, or is over")
        self._running = True
        try:
            for effect in self._first:
                self._perform(effect)
            while True:
                await self._wait()
                await self._take_turn()
        except BaseException as error:
            self._stop(error)
            raise

    # ── waiting ────────────────────────────────────────────────────────────

    def _take(self, post: _Post[E]) -> None:
        self._inbox.append(post)
        if self._hurry:
            return
        if self._patient is None or not self._patient(self._state, post.event):
            self._hurry = True
            self._ring()
        elif self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = PATIENCE_S * math.ceil(loop.time() / PATIENCE_S + 1)
            if self._wake is not None:
                self._end_by(self._patience, loop)

    def _ring(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _wait(self) -> None:
        """Until there is an event that does not wait, or patience or the next deadline is at its end."""
        if self._hurry or not all(self._still_patient(post) for post in self._inbox):
            return
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        self._plan(loop)
        try:
            await self._wake
        finally:
            self._wake, self._due = None, math.inf

    def _still_patient(self, post: _Post[E]) -> bool:
        """The state is perhaps another one than when it came."""
        return self._patient is not None and self._patient(self._state, post.event)

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        deadline = None if self._deaf else self._deadline(self._state)
        delay = math.inf
        self._planned = None
        if deadline is not None:
            now = self._clock.now()
            delay = max(0.0, deadline - now)
            if self._on_stall is not None:
                # A stall gives no notification of its own: it is seen by a timer that comes late.
                delay = min(delay, self._stall_limit / 2)
        delay = min(delay, max(0.0, self._unsaved_by - loop.time()))
        if deadline is not None:
            self._planned = now + delay
        end = loop.time() + delay
        self._end_by(end if self._patience is None else min(end, self._patience), loop)

    def _end_by(self, end: float, loop: asyncio.AbstractEventLoop) -> None:
        """The wait that is on ends then at the latest."""
        self._due = min(self._due, end)
        if self._timer is not None:
            if self._timer.when() <= self._due:
                return
            self._timer.cancel()
        self._timer = loop.call_at(self._due, self._timed) if self._due < math.inf else None

    def _timed(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        if self._wake is None:
            return  # the next wait will have a timer of its own
        if self._due > loop.time():
            self._end_by(self._due, loop)
        elif self._only_looks(loop):
            self._due = math.inf
            self._plan(loop)
        else:
            self._ring()

    def _only_looks(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Is nothing due but a look at whether the loop stood still, and did it not? A thousand groups whose
        locks are held look so all the time."""
        if self._planned is None or self._inbox or self._late is not None or self._unsaved_by <= loop.time():
            return False
        now, deadline = self._clock.now(), self._deadline(self._state)
        return deadline is not None and now < deadline and not self._stalled(now)

    def _deadline(self, state: S) -> float | None:
        if self._dated[0] is not state:
            self._dated = state, self._next_deadline(state)
        return self._dated[1]

    def _stalled(self, now: float) -> bool:
        """True after every stall longer than ``stall_limit``, never after one shorter than half of it."""
        return self._planned is not None and now - self._planned > self._stall_limit / 2

    # ── a turn ─────────────────────────────────────────────────────────────

    async def _take_turn(self) -> None:
        now = self._clock.now()
        before = state = self._state
        if self._on_stall is not None and self._stalled(now):
            log.warning("%s: the event loop stood still; deadlines are given fresh grace", self.name)
            state = self._on_stall(state, now)
        elif self._on_late is not None and self._late is not None:
            state = self._on_late(self._late[0], state, self._late[1])
        self._planned = self._late = None
        given = state
        self._turn = list(self._inbox)
        self._inbox.clear()
        self._hurry, self._patience = False, None
        steps: list[Step[S, F]] = []
        for post in self._turn:
            state = self._advance(state, post, steps)
        state = self._pass_deadline(state, now, steps)
        changed = state is not before and state != before
        moment = asyncio.get_running_loop().time()
        overdue = moment >= self._unsaved_by
        if changed and not overdue and self._can_wait(steps):
            self._unsaved_by = min(self._unsaved_by, moment + UNSAVED_S)
        elif changed or overdue:
            await self._save(state)  # durable first …
            self._unsaved_by = math.inf
            saved = self._clock.now()
            if saved - now > self._stall_limit / 2:
                log.warning("%s: a save took %.1f s", self.name, saved - now)
                self._late = given, saved
        if changed:
            self._state, self._deaf = state, False
        for step in steps:  # … then visible
            for effect in step.effects:
                self._perform(effect)
        try:
            await asyncio.sleep(0)  # what was set off goes out; whoever is ready joins the next turn
        finally:
            self._tell(now, steps, changed=self._state is not before)
        self._turn = []

    def _can_wait(self, steps: list[Step[S, F]]) -> bool:
        told_again = self._told_again
        if told_again is None or any(step.effects for step in steps):
            return False
        return bool(self._turn) and all(told_again(post.event) for post in self._turn)

    def _advance(self, state: S, post: _Post[E], steps: list[Step[S, F]]) -> S:
        try:
            step = self._step(state, post.event)
        except Rejected as refusal:
            post.rejected = refusal
            step = Step(state, (), (Reason(ReasonCode.REFUSED, str(refusal)),))
        steps.append(step)
        return step.state

    def _pass_deadline(self, state: S, now: float, steps: list[Step[S, F]]) -> S:
        """Events that are here already go before a deadline: a client that came back in time is heard
        first."""
        deadline = self._deadline(state)
        if deadline is None or deadline > now or (self._deaf and not self._turn):
            return state
        post: _Post[E] = _Post(self._deadline_passed(now), None)
        self._turn.append(post)
        after = self._advance(state, post, steps)
        if after == state and not self._deaf:
            # A defect of the machine must not become a spinning loop: wait for an event instead.
            log.error(
                "%s: nothing to do at the deadline %.3f; ignored until something happens", self.name, deadline
            )
            self._deaf = True
        return after

    def _tell(self, now: float, steps: list[Step[S, F]], *, changed: bool) -> None:
        if self._record is not None:
            for post, step in zip(self._turn, steps, strict=True):
                self._record(now, post.event, step)
        if changed and self._changed is not None:
            self._changed(self._state)
        for post in self._turn:
            post.resolve()

    def _stop(self, error: BaseException) -> None:
        stopped = Stopped(f"driver {self.name} stopped: {error!r}")
        stopped.__cause__ = error
        self._stopped = stopped
        told = error if isinstance(error, Exception) else stopped
        for post in (*self._turn, *self._inbox):
            post.fail(told)
        self._turn = []
        self._inbox.clear()
        if self._timer is not None:
            self._timer.cancel()
