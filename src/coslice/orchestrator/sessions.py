"""Who is connected, and where the answers of a group go.

``Sessions`` is called by the drivers (an effect names its session) and by the stream handler (connect, lost,
closed). It decides only two things: that one session has one stream, and that a job has one live incarnation.
Locks are the core's business.
"""

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import assert_never

import grpc

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import is_lost
from coslice.core.ids import Epoch, GroupId, JobId, RequestId, SessionId
from coslice.orchestrator import convert, views
from coslice.orchestrator.groups import GroupLock, Groups
from coslice.orchestrator.outbox import End, Outbox
from coslice.runtime.clock import Clock
from coslice.runtime.heap import Heap
from coslice.wire.v1 import coslice_pb2 as pb

ClientEffect = fx.Grant | fx.Refuse | fx.LoseLease | fx.AskYield


class GivenUp(Exception):
    """A request for several groups ends here: ``answer`` says why."""

    def __init__(self, answer: pb.ServerMessage) -> None:
        super().__init__()
        self.answer = answer


class Asked:
    """One acquire that is not confirmed yet."""

    def __init__(self, request: RequestId, locks: tuple[GroupLock, ...]) -> None:
        self.request, self.locks = request, locks
        self.taken: list[pb.Lease] = []
        """What it was granted so far, in order."""
        self.next: asyncio.Future[pb.Lease] | None = None
        """The grant that a request for several groups waits for; None for a request for one."""
        self.waits_for: GroupLock | None = None
        self.task: asyncio.Task[None] | None = None
        self.answer: pb.ServerMessage | None = None


class Allowance:
    """So many at once, and so many a second on average: the rest is left out, and counted."""

    def __init__(self) -> None:
        self._level, self._at = 0.0, -math.inf
        self._left_out = 0

    def take(self, now: float, per_s: float, at_once: int) -> tuple[bool, int]:
        """May one more pass? With the number that was left out before it."""
        drained = (now - self._at) * per_s
        self._level, self._at = max(0.0, self._level - drained), now
        if self._level + 1 > at_once:
            self._left_out += 1
            return False, 0
        self._level += 1
        left_out, self._left_out = self._left_out, 0
        return True, left_out


class Session:
    """One client process, over all its reconnects."""

    def __init__(self, who: convert.Identity) -> None:
        self.who = who
        self.outbox: Outbox[pb.ServerMessage] | None = None
        """None while no stream is there."""
        self.asked: dict[RequestId, Asked] = {}
        self.locks: dict[GroupId, GroupLock] = {}
        """Groups that have heard of this session."""
        self.forget: asyncio.TimerHandle | None = None
        self.notes = Allowance()

    def send(self, message: pb.ServerMessage) -> None:
        if self.outbox is not None:
            self.outbox.put(message)

    def perform(self, group: GroupId, effect: ClientEffect) -> None:
        match effect:
            case fx.Grant():
                self._granted(group, effect)
            case fx.Refuse():
                self._refused(group, effect)
            case fx.LoseLease():
                self._lost(group, effect)
            case fx.AskYield():
                self.send(convert.should_yield(group, effect))
            case _:
                assert_never(effect)

    def _granted(self, group: GroupId, grant: fx.Grant) -> None:
        asked = self.asked.get(grant.request)
        lease = convert.lease(group, grant)
        if asked is None and grant.more:
            return  # we have restarted, and the client has yet to repeat what it asked for
        if asked is None or asked.task is None:
            self.send(convert.granted(grant.request, [lease]))
            if asked is not None:
                asked.taken = [lease]
        elif asked.next is not None and not asked.next.done():
            asked.next.set_result(lease)

    def _refused(self, group: GroupId, effect: fx.Refuse) -> None:
        self._give_up(effect.request, convert.refusal(group, self.who.job, effect))

    def _lost(self, group: GroupId, effect: fx.LoseLease) -> None:
        """A lease can also be lost while its request still waits for another group."""
        for asked in list(self.asked.values()):
            if not any((lease.group, lease.epoch) == (group, effect.epoch) for lease in asked.taken):
                continue
            if asked.next is None:
                self.asked.pop(asked.request)  # answered, never confirmed
            else:
                text = f"{group} was lost while the request waited for another group: {effect.reason}"
                answer = convert.refused(
                    convert.unscoped(asked.request), pb.FAILED, f"{text}; acquire again", group=group
                )
                self._give_up(asked.request, answer)
        self.send(convert.lease_lost(group, effect))

    def _give_up(self, request: RequestId, answer: pb.ServerMessage) -> None:
        asked = self.asked.get(request)
        if asked is not None and asked.next is not None:
            if not asked.next.done():
                asked.next.set_exception(GivenUp(answer))
            return
        self.asked.pop(request, None)
        self.send(answer)

    def forget_lease(self, group: GroupId, epoch: Epoch) -> None:
        """Yielded: its request needs no confirmation any more. (One that waits for another group, too, has a
        share of its own.)"""
        for asked in list(self.asked.values()):
            if asked.next is None and any(
                (lease.group, lease.epoch) == (group, epoch) for lease in asked.taken
            ):
                self.asked.pop(asked.request)


class Sessions:
    """All sessions of this orchestrator. No await between looking and changing: one loop, one writer."""

    def __init__(
        self,
        *,
        groups: Groups,
        clock: Clock,
        grace: float,
        limit: int,
        forgotten: Callable[[Session], None],
        heap: Heap | None = None,
    ) -> None:
        """``forgotten`` hears of every session that is given up, or over."""
        self._groups, self._clock, self._grace, self._limit = groups, clock, grace, limit
        self._forgotten, self._heap = forgotten, heap
        self._sessions: dict[SessionId, Session] = {}
        self._of_job: dict[JobId, dict[SessionId, Session]] = {}
        self._stopping = False

    def __len__(self) -> int:
        return len(self._sessions)

    def connected(self) -> Iterable[Session]:
        return (session for session in self._sessions.values() if session.outbox is not None)

    @property
    def lost_count(self) -> int:
        """Sessions without a stream, in their grace."""
        return len(self._sessions) - sum(1 for _ in self.connected())

    def perform(self, group: GroupId, effect: ClientEffect) -> None:
        session = self._sessions.get(effect.session)
        if session is not None:  # without a stream it asks again when it is back
            session.perform(group, effect)

    def refusal(self, who: convert.Identity) -> pb.ServerMessage | None:
        """Why this hello cannot be accepted, or None."""
        known = self._sessions.get(who.session)
        if known is not None and (known.who.job, known.who.incarnation) != (who.job, who.incarnation):
            text = f"session {who.session} belongs to job {known.who.job}: choose a fresh session id"
            return convert.refused("", pb.INVALID, text, job=known.who.job)
        if known is None and len(self._sessions) >= self._limit:
            text = f"{self._limit} sessions are open, the limit of this orchestrator: raise max_sessions"
            return convert.refused("", pb.LIMIT, text, limit=str(self._limit))
        of_job = self._of_job.get(who.job, {}).values()
        connected = (session.who for session in of_job if session.outbox is not None)
        other = next((one for one in connected if one.incarnation != who.incarnation), None)
        if other is None:
            return None
        text = (
            f"job {who.job} is running already: pid {other.pid} on {other.node or 'an unnamed node'}. "
            "Use another --job name, or stop it"
        )
        facts = {"job": who.job, "pid": str(other.pid), "node": other.node}
        return convert.refused("", pb.JOB_RUNNING, text, **facts)

    def admit(self, who: convert.Identity, outbox: Outbox[pb.ServerMessage]) -> Session:
        """The session of an accepted hello. A stream that it had before ends: it may be half-open."""
        session = self._sessions.get(who.session)
        if session is None:
            session = Session(who)
            self.begin(session, outbox)
            return session
        if session.outbox is not None:
            session.outbox.close(End(grpc.StatusCode.ABORTED, "another stream of this session took over"))
        if session.forget is not None:
            session.forget.cancel()
        session.who, session.outbox, session.forget = who, outbox, None
        return session

    def begin(self, session: Session, outbox: Outbox[pb.ServerMessage]) -> None:
        """One that is not here yet."""
        who = session.who
        session.outbox = outbox
        self._sessions[who.session] = session
        self._of_job.setdefault(who.job, {})[who.session] = session
        if self._heap is not None:
            self._heap.began()

    async def resume(self, session: Session) -> dict[GroupId, Epoch]:
        """Tell the groups that know this session that it is back; returns the leases that it still holds."""
        name = session.who.session
        for lock in self._groups.losing():  # they knew it before a restart
            if is_lost(lock.state, name):
                session.locks[lock.id] = lock
        for lock in list(session.locks.values()):
            await lock.post(ev.SessionResumed(at=self._clock.now(), session=name))
        found = {lock.id: views.lease_of(lock.state, name) for lock in session.locks.values()}
        return {group: epoch for group, epoch in found.items() if epoch is not None}

    def lost(self, session: Session, outbox: Outbox[pb.ServerMessage]) -> None:
        """The stream is gone without a goodbye. A stream that was replaced says nothing."""
        if session.outbox is not outbox:
            return
        session.outbox = None
        if self._stopping:
            return
        for lock in session.locks.values():
            lock.tell(ev.SessionLost(at=self._clock.now(), session=session.who.session))
        loop = asyncio.get_running_loop()
        session.forget = loop.call_later(self._grace if session.locks else 0.0, self._forget, session)

    def closed(self, session: Session, outbox: Outbox[pb.ServerMessage]) -> None:
        if session.outbox is not outbox:
            return
        session.outbox = None
        self._forget(session)
        for lock in session.locks.values():
            lock.tell(ev.SessionClosed(at=self._clock.now(), session=session.who.session))

    def _forget(self, session: Session) -> None:
        who = session.who
        session.forget = None  # it holds the session
        self._sessions.pop(who.session, None)
        if of_job := self._of_job.get(who.job):
            of_job.pop(who.session, None)
            if not of_job:
                del self._of_job[who.job]
        self._forgotten(session)
        if self._heap is not None:
            self._heap.ended(left=len(self._sessions))
        for asked in list(session.asked.values()):
            if asked.task is not None:
                asked.task.cancel()

    def stop(self, end: End) -> None:
        """End every stream. Leases stay: the clients come back to our successor within their grace."""
        self._stopping = True
        for session in self._sessions.values():
            if session.forget is not None:
                session.forget.cancel()
            if session.outbox is not None:
                session.outbox.close(end)
