"""What one client says on its session: acquire, confirm, yield, abandon, note.

Each verb becomes events of the groups it names; the answers come back as effects (sessions.py). Messages of
one session are handled one after another, so an abandon cannot overtake its acquire. A request for several
groups is the only thing that waits here: it takes them in the global order, one after another, in a task of
its own.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from coslice.core import events as ev
from coslice.core.ids import Epoch, RequestId
from coslice.core.outcome import Rejected
from coslice.orchestrator import convert, views
from coslice.orchestrator.admission import Admissions
from coslice.orchestrator.groups import GroupLock, Groups
from coslice.orchestrator.sessions import Asked, GivenUp, Session
from coslice.orchestrator.traces import Traces
from coslice.runtime.clock import Clock
from coslice.security.redact import redact
from coslice.wire.v1 import coslice_pb2 as pb

NoteSink = Callable[[Session, pb.Note], None]


class Verbs:
    def __init__(
        self,
        *,
        groups: Groups,
        clock: Clock,
        note: NoteSink,
        admission: Admissions,
        max_requests: int = 256,
        traces: Traces | None = None,
    ) -> None:
        self._groups, self._clock, self._note = groups, clock, note
        self._admission = admission
        self._max_requests, self._traces = max_requests, traces
        self.traces = traces is not None
        """Does anybody look at what a request says of its parent?"""

    async def handle(self, session: Session, message: pb.ClientMessage) -> None:
        """Apply one message. Malformed content is refused by its request id; nothing is raised for it."""
        kind = message.WhichOneof("kind")
        request = ""
        try:
            if kind == "acquire":
                request = message.acquire.request
                if (posted := self.acquire(session, message.acquire)) is not None:
                    with contextlib.suppress(Rejected):  # the session was told
                        await posted
            elif kind == "confirm":
                self._confirm(session, convert.scoped(session.who.session, message.confirm.request))
            elif kind == "yield":
                request = getattr(message, "yield").request
                await self._yield(session, getattr(message, "yield"))
            elif kind == "abandon":
                said = message.abandon
                reason = redact(said.reason[:200])
                self._abandon(session, convert.scoped(session.who.session, said.request), reason)
            elif kind == "note":
                self._note(session, message.note)
            else:
                session.send(convert.refused("", pb.INVALID, f"a session that runs cannot take {kind!r}"))
        except ValueError as error:
            session.send(convert.refused(request, pb.INVALID, str(error)))

    # ── acquire ────────────────────────────────────────────────────────────

    def acquire(self, session: Session, message: pb.Acquire) -> "asyncio.Future[None] | None":
        """Ask for it; grant and refusal go to the session. Returns what the session's next message waits for:
        the answer of the group's driver when it has taken the request. None if it was not asked, or takes it
        in its own time. Raises ``ValueError`` for what is malformed."""
        request = convert.scoped(session.who.session, message.request)
        locks = self._known(session, message.request, message.groups)
        if not locks or self._out_of_order(session, request, locks):
            return None
        asked = self._asked(session, request, locks)
        if asked is None:
            return None
        if asked.locks != locks:
            raise ValueError(f"request {message.request} was made for other groups: use a fresh request id")
        session.locks.update((lock.id, lock) for lock in locks)
        if len(locks) > 1:
            self._acquire_several(session, asked, message)
            return None
        event = convert.acquire_event(session.who, message, at=self._clock.now(), more=False)
        patient = locks[0].patient(event)
        posted = self._ask(session, locks[0], event, message.traceparent)
        return None if patient else posted

    def acquire_one(
        self, session: Session, lock: GroupLock, event: ev.AcquireRequested, parent: str
    ) -> "asyncio.Future[None] | None":
        """As ``acquire``, of one group by a session that asks for no other: there is no order to keep, and
        whoever speaks for it hears of the driver's end by what is returned."""
        if self._asked(session, event.request, (lock,)) is None:
            return None
        session.locks[lock.id] = lock
        return self._ask(session, lock, event, parent)

    def _asked(self, session: Session, request: RequestId, locks: tuple[GroupLock, ...]) -> Asked | None:
        """None once it is refused: too many."""
        asked = session.asked.get(request)
        if asked is None:
            if len(session.asked) >= self._max_requests:
                text = (
                    f"this session has {self._max_requests} requests under way, the limit (max_requests): "
                    "confirm or abandon some first"
                )
                limit = str(self._max_requests)
                session.send(convert.refused(convert.unscoped(request), pb.LIMIT, text, limit=limit))
                return None
            asked = session.asked[request] = Asked(request, locks)
        return asked

    def _ask(
        self, session: Session, lock: GroupLock, event: ev.AcquireRequested, parent: str
    ) -> "asyncio.Future[None] | None":
        traced = functools.partial(self._traced, lock, event, parent)
        if not self._admission.passes(session, lock, event, entering=traced):
            return None
        traced()
        posted = lock.put(event)
        posted.add_done_callback(functools.partial(self._rejected, session, event.request))
        return posted

    def _rejected(self, session: Session, request: RequestId, posted: "asyncio.Future[None]") -> None:
        error = None if posted.cancelled() else posted.exception()
        if isinstance(error, Rejected):
            session.asked.pop(request, None)
            session.send(convert.rejection(convert.unscoped(request), error))

    def _traced(self, lock: GroupLock, event: ev.AcquireRequested, parent: str) -> str:
        """The parent for whatever else belongs to the request."""
        if self._traces is None:
            return parent
        return self._traces.asked(lock.id, event.job, event.request, parent)

    def _known(self, session: Session, request: str, names: Sequence[str]) -> tuple[GroupLock, ...]:
        """The groups named, in the global order; () once the request is refused."""
        if not names:
            raise ValueError("the request names no group: name at least one")
        found = {lock.id: lock for name in names if (lock := self._groups.get(name)) is not None}
        for name in names:
            if name not in found:
                session.send(self._groups.unknown(request, name))
                return ()
        return tuple(sorted(found.values(), key=lambda lock: lock.order))

    def _out_of_order(self, session: Session, request: RequestId, locks: Sequence[GroupLock]) -> bool:
        """Refuse what could deadlock: a group before one that this session holds already.

        Not a repeated request: it may hold its group, and groups after it may have been granted since.
        """
        if request in session.asked or any(views.holds(lock.state, request) for lock in locks):
            return False
        wanted = {lock.id for lock in locks}
        for held in session.locks.values():
            if held.id in wanted or views.lease_of(held.state, session.who.session) is None:
                continue
            early = next((lock for lock in locks if lock.order < held.order), None)
            if early is not None:
                text = (
                    f"{early.id} comes before {held.id}, which this session holds: yield {held.id} first, "
                    f"or ask for both in one request"
                )
                facts = {"group": early.id, "held": held.id}
                session.send(convert.refused(convert.unscoped(request), pb.LOCK_ORDER, text, **facts))
                return True
        return False

    def _acquire_several(self, session: Session, asked: Asked, message: pb.Acquire) -> None:
        event = convert.acquire_event(session.who, message, at=self._clock.now(), more=True)
        if asked.answer is not None:  # the answer was lost with the stream: say it again
            session.send(asked.answer)
        elif asked.task is None:
            take = self._take_in_order(session, asked, event, message.traceparent)
            asked.task = asyncio.create_task(take, name=asked.request)
        elif asked.waits_for is not None:  # a grant was not given while the stream was away
            asked.waits_for.tell(event)

    async def _take_in_order(
        self, session: Session, asked: Asked, event: ev.AcquireRequested, parent: str
    ) -> None:
        done = False
        try:
            for lock in asked.locks:  # nobody waits at a door with a lease in hand
                await self._admission.passed(session, lock, event)
            for lock in asked.locks:
                asked.next, asked.waits_for = asyncio.get_running_loop().create_future(), lock
                parent = self._traced(lock, event, parent)
                await lock.post(replace(event, at=self._clock.now()))
                asked.taken.append(await asked.next)
            asked.next = asked.waits_for = None
            now = self._clock.now()
            completed = ev.AcquireCompleted(at=now, request=asked.request)
            await asyncio.gather(*(lock.post(completed) for lock in asked.locks))
            asked.answer = convert.granted(asked.request, asked.taken)
            session.send(asked.answer)
            done = True
        except Rejected as error:
            session.send(convert.rejection(convert.unscoped(asked.request), error))
        except GivenUp as end:
            session.send(end.answer)
        finally:
            if not done:
                if session.asked.get(asked.request) is asked:
                    session.asked.pop(asked.request)
                self._give_back(asked.request, asked.locks, "the request for several groups ended early")

    def _give_back(self, request: RequestId, locks: Sequence[GroupLock], reason: str) -> None:
        for lock in reversed(locks):
            lock.tell(ev.AcquireAbandoned(at=self._clock.now(), request=request, reason=reason))

    # ── confirm, abandon ───────────────────────────────────────────────────

    def _confirm(self, session: Session, request: RequestId) -> None:
        asked = session.asked.get(request)
        if asked is not None and asked.task is not None and asked.answer is None:
            return  # asked again since that grant was lost: this one is not answered yet
        session.asked.pop(request, None)
        for lock in asked.locks if asked is not None else tuple(session.locks.values()):
            lock.tell(ev.GrantConfirmed(at=self._clock.now(), request=request))

    def _abandon(self, session: Session, request: RequestId, reason: str) -> None:
        asked = session.asked.pop(request, None)
        self._admission.abandoned(request)
        if asked is not None and asked.task is not None and asked.task.cancel():
            return  # it gives back what it took
        locks = asked.locks if asked is not None else tuple(session.locks.values())
        self._give_back(request, locks, reason or "abandoned by the client")

    # ── yield ──────────────────────────────────────────────────────────────

    async def _yield(self, session: Session, message: pb.Yield) -> None:
        """Give up every lease named, the last in the global order first; one that fails stops no other."""
        if not message.leases:
            raise ValueError("the yield names no lease: name the group and epoch of each")
        leases: list[tuple[GroupLock, Epoch]] = []
        for ref in message.leases:
            lock = self._groups.get(ref.group)
            if lock is None:
                session.send(self._groups.unknown(message.request, ref.group))
                return
            leases.append((lock, convert.epoch(ref.epoch)))
        leases.sort(key=lambda lease: lease[0].order, reverse=True)
        problem: Rejected | None = None
        for lock, epoch in leases:
            problem = await self._yield_one(session, lock, epoch) or problem
        if problem is not None:
            session.send(convert.rejection(message.request, problem))
            return
        session.send(
            pb.ServerMessage(
                yielded=pb.Yielded(
                    request=message.request,
                    snapshot_deferred=all(views.stays(lock.state, session.who.job) for lock, _ in leases),
                    waiting=sum(views.waiting(lock.state) for lock, _ in leases),
                )
            )
        )

    async def _yield_one(self, session: Session, lock: GroupLock, epoch: Epoch) -> Rejected | None:
        who = session.who
        try:
            await lock.post(
                ev.LeaseYielded(at=self._clock.now(), job=who.job, session=who.session, epoch=epoch)
            )
        except Rejected as error:
            return error
        session.forget_lease(lock.id, epoch)
        return None
