"""What the dashboard shows, kept while somebody looks: the timeline of each group, and its status now.

Hears every step after it was saved (``Observer``) and every change (``Watchers``), but only takes them down;
once a tick they are read, what changed is encoded once and put into each viewer's mailbox. However many
groups there are, only a slice of them is told at a time: hand-overs wait for the same loop. Nobody looks:
nothing is heard and nothing is kept. Decides nothing.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, assert_never

import msgspec
from msgspec import Struct

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.brief import brief, occupancy_name
from coslice.core.group_state import Empty, Group, Held, Resident, Swapping, occupant, waiting
from coslice.core.ids import GroupId
from coslice.core.outcome import Step
from coslice.observe.mailbox import Mailbox
from coslice.observe.rows import GroupRow, SeatRow, row, seats
from coslice.observe.timeline import Decision, GroupReader, Interval
from coslice.orchestrator import explain, views
from coslice.orchestrator.admission import Admissions
from coslice.orchestrator.groups import GroupLock, Groups
from coslice.orchestrator.roster import Roster
from coslice.runtime.clock import Clock

log = logging.getLogger(__name__)

TICK_S = 0.02
"""Between two messages, at least: what changes meanwhile goes into the same one."""
SLICE = 10
"""Groups that are told between two looks at what else there is to do; one takes a third of a millisecond."""
REFRESH_S = 2.0
"""Groups in which somebody waits are told again: prose tells times. Of many groups, some at a time."""
REFRESHED = 100
"""Groups that are told again at a time, at most."""
LINGER_S = 60.0
"""After the last viewer left, so that a page that is loaded again keeps its timeline."""
BEAT_S = 10.0
MAX_VIEWERS = 50
PAST = 20_000
"""Intervals kept in all; each group has its share, from 20 to 400."""
LOG = 60
"""Decisions kept of each group."""


class Term:
    """What the present term knows of its groups."""

    def __init__(
        self,
        instance: str,
        *,
        groups: Groups,
        admission: Admissions,
        clock: Clock,
        roster: Roster | None = None,
    ) -> None:
        """``roster``: None where no other orchestrator can be."""
        self.instance, self.groups, self._roster = instance, groups, roster
        self._admission, self._clock = admission, clock
        self.now = clock.now

    def row(self, lock: GroupLock) -> GroupRow:
        admission = self._admission.status(lock)
        return row(views.status(lock.state, policy=lock.policy, now=self.now(), admission=admission))

    async def seats(self) -> list[SeatRow]:
        return seats(await self._roster.status(), self.now()) if self._roster is not None else []

    def story(self, lock: GroupLock, job: str) -> list[str] | None:
        """As ``coslice explain`` tells it; None: the group knows no such job."""
        said = self._admission.lines(lock, job) if job else []
        if job and not said and not explain.known(lock, job):
            return None
        return explain.explain(lock, self.groups, now=self.now(), job=job, last=explain.LINES, admission=said)


class Told(Struct, kw_only=True):
    """One group in a message: its status now, what goes on, and what ended since the last message."""

    row: GroupRow
    open: list[Interval]
    past: list[Interval]
    queue: list[tuple[float, int]]
    log: list[Decision]


class Message(Struct, kw_only=True):
    seq: int
    now: float
    orchestrator: str
    """Empty: it stands by, another leads."""
    seats: list[SeatRow] = []
    """The leader, and who stands by, where there can be several; of a standby the leader, if it is known."""
    groups: list[msgspec.Raw]
    """Each a ``Told``."""
    gone: list[str] = []


class _Past:
    """Of one group, since somebody began to look."""

    def __init__(self, state: Group) -> None:
        self.reader = GroupReader(state.id)
        self.intervals: deque[Interval] = deque()
        self.queue: deque[tuple[float, int]] = deque([(state.since, len(state.waiters))], maxlen=200)
        self.log: deque[Decision] = deque(maxlen=LOG)
        self.trouble: deque[Decision] = deque(maxlen=LOG)
        asked = {
            str(ask.request): (str(waiter.job), waiter.since, waiter.phase)
            for waiter in waiting(state)
            for ask in waiter.asks
        }
        self.reader.resume(_lock_of(state), asked, len(state.waiters))

    def told(self) -> list[Decision]:
        """The last decisions, and before them the last of trouble."""
        first = self.log[0].at if self.log else float("inf")
        return [*(decision for decision in self.trouble if decision.at < first), *self.log]


def _places(rows: list[SeatRow]) -> list[tuple[str, bool, int]]:
    return [(one.address, one.leads, one.term) for one in rows]


def _lock_of(state: Group) -> Interval:
    on, kind, job = state.occupancy, occupancy_name(state), str(occupant(state) or "")
    match on:
        case Held():
            text = on.reason.text
            return Interval(
                kind=kind, job=job, begin=on.since, end=0, phase=on.phase, epoch=on.epoch, text=text
            )
        case Swapping():
            return Interval(kind=kind, job=job, begin=on.since, end=0, epoch=on.epoch)
        case Empty() | Resident():
            return Interval(kind=kind, job=job, begin=state.since, end=0, epoch=state.epoch)
        case _:
            assert_never(on)


class Live:
    def __init__(
        self,
        listen: Callable[["Live | None"], None],
        *,
        leader: Callable[[], str] = lambda: "",
        linger: float = LINGER_S,
    ) -> None:
        """``listen``: called with self when somebody begins to look, with None when nobody does any more.
        ``leader``: where the leader is, as a standby knows it; empty: it knows none."""
        self._listen, self._leader, self.linger = listen, leader, linger
        self._seats: list[SeatRow] = []
        """As they were told last."""
        self._asking: asyncio.Task[None] | None = None
        self._unanswered = ""
        """Why the last asking failed, which is logged once; empty: it did not."""
        self._source: Term | None = None
        self._seq = 0
        self._viewers: dict[Mailbox, asyncio.Event] = {}
        self._groups: dict[str, _Past] = {}
        self._unheard: list[tuple[ev.GroupEvent, Step[Group, fx.GroupEffect]]] = []
        self._dirty: dict[str, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._refresher: asyncio.TimerHandle | None = None
        self._leaving: asyncio.TimerHandle | None = None
        self._looking = self._closed = self._reseated = False
        self._snapshots = 0
        """Being made now. Nothing is told meanwhile: some of their groups would have it, and others not."""
        self._refreshed = 0
        """Groups that were told again, counted through all rounds."""
        self._encoder = msgspec.json.Encoder()

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    @property
    def looking(self) -> bool:
        """Is anything heard and kept?"""
        return self._looking

    @property
    def source(self) -> Term | None:
        return self._source

    def lead(self, source: Term | None) -> None:
        """Another term begins, or (None) this one is over."""
        self._source, self._seats = source, []
        if self._looking:
            self._forget()
            self._listen(self)
            self._everybody_anew()

    def close(self) -> None:
        """Streams end. Idempotent."""
        self._closed = True
        self._everybody_anew()
        self._stop_looking()

    # ── what happens ───────────────────────────────────────────────────────

    def heard(self, event: ev.GroupEvent, step: Step[Group, fx.GroupEffect]) -> None:
        self._unheard.append((event, step))
        self._soon(step.state.id)

    def changed(self, group: GroupId) -> None:
        self._soon(group)

    def _soon(self, group: str) -> None:
        self._dirty[group] = None
        self._tick_soon()

    def _tick_soon(self) -> None:
        if self._timer is None and not self._snapshots:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        """Tells a slice; the rest with the next tick."""
        self._timer = None
        source = self._source
        if source is None or not (self._dirty or self._reseated):
            return
        self._reseated = False
        self._read()
        now, told, gone = source.now(), list[msgspec.Raw](), list[str]()
        for name in tuple(itertools.islice(self._dirty, SLICE)):
            del self._dirty[name]
            lock = source.groups.get(name)
            if lock is None:
                self._groups.pop(name, None)
                gone.append(name)
            else:
                told.append(self._raw(self._tell(source, lock)))
        if self._dirty:
            self._tick_soon()
        self._seq += 1
        change = Message(
            seq=self._seq,
            now=now,
            orchestrator=source.instance,
            seats=self._seats,
            groups=told,
            gone=gone,
        )
        message = self._message("change", change)
        for mailbox, wake in self._viewers.items():
            mailbox.put(message)
            wake.set()

    def _read(self) -> None:
        unheard, self._unheard = self._unheard, []
        for event, step in unheard:
            state = step.state
            past = self._groups.get(state.id)
            if past is None:
                self._past(state)  # it begins with what became of the event
                continue
            line: dict[str, Any] = {
                "t": event.at,
                "event": msgspec.to_builtins(event),
                "effects": msgspec.to_builtins(step.effects),
                "reasons": [(reason.code, reason.text) for reason in step.reasons],
                "state": brief(state),
            }
            past.reader.read(line)

    def _past(self, state: Group) -> _Past:
        found = self._groups.get(state.id)
        if found is None:
            found = self._groups[state.id] = _Past(state)
        return found

    def _tell(self, source: Term, lock: GroupLock) -> Told:
        past, now = self._past(lock.state), source.row(lock)
        intervals, queue, log = past.reader.take()
        past.intervals += intervals
        past.queue += queue
        past.log += log
        past.trouble += [decision for decision in log if decision.trouble]
        share = max(20, min(400, PAST // max(1, len(self._groups))))
        while len(past.intervals) > share:
            past.intervals.popleft()
        past.reader.forget_others(job.job for job in now.jobs)
        return Told(row=now, open=past.reader.going_on(), past=intervals, queue=queue, log=log[-LOG:])

    def _refresh(self) -> None:
        self._refresher = asyncio.get_running_loop().call_later(REFRESH_S, self._refresh)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._look_who_leads(), name="who leads")
            self._asking.add_done_callback(self._asked)
        if self._source is not None:
            waited = [lock for lock in self._source.groups if lock.state.waiters or lock.state.lost]
            for number in range(min(len(waited), REFRESHED)):
                self._soon(waited[(self._refreshed + number) % len(waited)].id)
            self._refreshed += REFRESHED

    async def _look_who_leads(self) -> None:
        """The place where the state is tells us of no standby that comes or goes."""
        source = self._source
        found = await self._who_leads(source)
        if source is not self._source or _places(found) == _places(self._seats):
            return
        self._seats = found
        if source is None:
            self._everybody_anew()
        else:
            self._reseated = True
            self._tick_soon()

    def _asked(self, asking: asyncio.Task[None]) -> None:
        if asking.cancelled():
            return
        error = asking.exception()
        why = f"{type(error).__name__}: {error}" if error is not None else ""
        if error is not None and why != self._unanswered:
            log.error("the dashboard cannot tell who stands by (it asks again): %s", why, exc_info=error)
        self._unanswered = why

    async def _who_leads(self, source: Term | None) -> list[SeatRow]:
        if source is not None:
            return await source.seats()
        leader = self._leader()
        return [SeatRow(address=leader, leads=True)] if leader else []

    # ── who looks ──────────────────────────────────────────────────────────

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """A snapshot, then every change, as server-sent events; until it is closed."""
        with self._viewing() as (mailbox, wake):
            while not self._closed:
                wake.clear()
                if mailbox.behind:
                    snapshot = await self._snapshot(mailbox)
                    if not mailbox.behind:
                        yield snapshot
                elif messages := mailbox.take():
                    yield messages
                else:
                    try:
                        async with asyncio.timeout(BEAT_S):
                            await wake.wait()
                    except TimeoutError:
                        yield b": still here\n\n"  # a proxy keeps the connection

    @contextmanager
    def _viewing(self) -> Iterator[tuple[Mailbox, asyncio.Event]]:
        mailbox, wake = Mailbox(), asyncio.Event()
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if not self._looking and not self._closed:
            self._looking = True
            self._refresh()
            self._listen(self)
        self._viewers[mailbox] = wake
        try:
            yield mailbox, wake
        finally:
            del self._viewers[mailbox]
            if not self._viewers and self._looking:
                later = asyncio.get_running_loop().call_later
                self._leaving = later(self.linger, self._stop_looking)

    def _stop_looking(self) -> None:
        self._listen(None)
        self._looking = False
        for timer in (self._timer, self._refresher, self._leaving, self._asking):
            if timer is not None:
                timer.cancel()
        self._timer = self._refresher = self._leaving = self._asking = None
        self._forget()

    def _forget(self) -> None:
        self._groups.clear()
        self._unheard.clear()
        self._dirty.clear()
        self._reseated = False

    def _everybody_anew(self) -> None:
        for mailbox, wake in self._viewers.items():
            mailbox.take()
            mailbox.behind = True
            wake.set()

    async def _snapshot(self, mailbox: Mailbox) -> bytes:
        """Of now, slice by slice. The mailbox has caught up then, unless another term began meanwhile."""
        source = self._source
        if source is None:
            self._seats = await self._who_leads(None)
            mailbox.caught_up()
            standby = Message(seq=self._seq, now=0.0, orchestrator="", seats=self._seats, groups=[])
            return self._message("snapshot", standby)
        self._snapshots += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            now, told = source.now(), list[msgspec.Raw]()
            for number, lock in enumerate(tuple(source.groups)):
                if number % SLICE == 0:
                    await asyncio.sleep(0)
                    if self._source is not source or self._closed:
                        return b""
                    self._read()
                told.append(self._raw(self._whole(source, lock)))
            mailbox.caught_up()  # what happens while it is on its way comes after it
        finally:
            self._snapshots -= 1
            if self._dirty:
                self._tick_soon()
        whole = Message(seq=self._seq, now=now, orchestrator=source.instance, seats=self._seats, groups=told)
        return self._message("snapshot", whole)

    def _whole(self, source: Term, lock: GroupLock) -> Told:
        past = self._past(lock.state)
        return Told(
            row=source.row(lock),
            open=past.reader.going_on(),
            past=list(past.intervals),
            queue=list(past.queue),
            log=past.told(),
        )

    def _raw(self, told: Told) -> msgspec.Raw:
        return msgspec.Raw(self._encoder.encode(told))

    def _message(self, kind: str, message: Message) -> bytes:
        data = self._encoder.encode(message)
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (message.seq, kind.encode(), data)
