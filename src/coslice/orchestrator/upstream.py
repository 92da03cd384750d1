"""The orchestrator's upstream face: llm-d's ``TimeSliceOrchestratorService`` on the same locks.

Its callers have no session, no token and no lease: a call acquires, another yields. Here each job and group
that they name gets a session of its own, which this module speaks for through the same verbs as a native
client's stream, so that both kinds wait in one queue under one set of rules. Upstream's words end in this
file and ``upstream_status``.

What ends a lease: a yield; the end of the job's last process, as its agent tells; the group's ``max_hold``.
A call that is cancelled or times out takes its place in the queue, or its grant, with it.
"""

import asyncio
import functools
import itertools
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NoReturn, cast

import grpc
import grpc.aio

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import Group, Held, Swapping, open_asks
from coslice.core.ids import GroupId, Incarnation, JobId, RequestId, SessionId, check_name
from coslice.core.outcome import Rejected
from coslice.errors import CosliceError
from coslice.orchestrator import convert, views
from coslice.orchestrator.groups import GroupLock, Groups
from coslice.orchestrator.outbox import End, Outbox
from coslice.orchestrator.sessions import ClientEffect, Session, Sessions
from coslice.orchestrator.upstream_status import status
from coslice.orchestrator.verbs import Verbs
from coslice.runtime.clock import Clock
from coslice.wire.status import grpc_status
from coslice.wire.upstream import timeslice_orchestrator_pb2 as up
from coslice.wire.upstream import timeslice_orchestrator_pb2_grpc as up_grpc
from coslice.wire.v1 import coslice_pb2 as pb

SERVICE = "timeslice_orchestrator.v1alpha1.TimeSliceOrchestratorService"
_PREFIX = "upstream:"
"""No native session is named so: theirs are fingerprints."""
NEAR, SHARE, ROUNDED = 0.05, 0.1, 0.01
"""A grant so near to its call's deadline is taken back: its answer would come too late, and the caller hold a
lock of which it does not know. Seconds; the most of what the call allowed; by how much gRPC rounds that up on
its way."""

Context = grpc.aio.ServicerContext[Any, Any]
_Key = tuple[JobId, GroupId]

_STATUS: dict[pb.Code.ValueType, grpc.StatusCode] = {
    pb.JOB_FAULTED: grpc.StatusCode.UNAVAILABLE,
    pb.GROUP_EMPTY: grpc.StatusCode.UNAVAILABLE,
    pb.GROUP_GONE: grpc.StatusCode.INTERNAL,
    pb.JOB_RUNNING: grpc.StatusCode.PERMISSION_DENIED,
}
"""Where upstream's codes differ from ours."""


class Refused(Exception):
    """The call ends with this status."""

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class _Answers(Outbox[pb.ServerMessage]):
    """What would go out on a session's stream, handed to the calls that wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.stopping = False
        self._waiting: dict[str, asyncio.Future[fx.Grant]] = {}

    def expect(self, request: str) -> "asyncio.Future[fx.Grant]":
        """The grant, or ``Refused``; until it is forgotten."""
        answer = self._waiting[request] = asyncio.get_running_loop().create_future()
        return answer

    def forget(self, request: str) -> None:
        self._waiting.pop(request, None)

    def granted(self, grant: fx.Grant) -> None:
        waiting = self._waiting.get(convert.unscoped(grant.request))
        if waiting is not None and not waiting.done():
            waiting.set_result(grant)

    def put(self, message: pb.ServerMessage) -> None:
        if not message.HasField("refused"):
            return  # a lost lease, a wish to yield: upstream has no way to say so
        waiting = self._waiting.get(message.refused.request)
        if waiting is not None and not waiting.done():
            waiting.set_exception(_refused(message.refused))

    def close(self, end: End) -> None:
        """The orchestrator is stopping."""
        self.stopping = True
        super().close(end)
        for waiting in tuple(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(Refused(end.status, end.message))


class _Caller(Session):
    """Everybody who calls for one job in one group."""

    def __init__(self, who: convert.Identity) -> None:
        super().__init__(who)
        self.answers = _Answers()
        self.calls = 0
        """Those that have not returned yet."""
        self.resumed = False
        """The lock knew it before it called: it may have asked the last orchestrator."""
        self.had_processes = False
        """An agent has seen the job alive since it was granted: from then on their end ends the lease."""

    def perform(self, group: GroupId, effect: ClientEffect) -> None:
        if isinstance(effect, fx.Grant):
            self.answers.granted(effect)
        else:
            super().perform(group, effect)


class UpstreamService(up_grpc.TimeSliceOrchestratorServiceServicer):
    def __init__(
        self, *, groups: Groups, sessions: Sessions, verbs: Verbs, clock: Clock, instance: str
    ) -> None:
        self._groups, self._sessions, self._verbs, self._clock = groups, sessions, verbs, clock
        self._callers: dict[_Key, _Caller] = {}
        self._holders: dict[GroupId, _Caller] = {}
        self._requests = (f"{instance}-{number}" for number in itertools.count(1))
        """Never those of the last orchestrator: a store may know them."""

    async def start(self) -> None:
        """Take up the leases that upstream callers held when the last orchestrator ended: their holders have
        no stream whose return would tell that they live."""
        for lock in tuple(self._groups):
            held = lock.state.occupancy
            if isinstance(held, Held) and any(h.session == _name(held.job, lock.id) for h in held.holders):
                self._holders[lock.id] = self._admitted(held.job, lock, "before a restart", resuming=True)

    # ── the calls ──────────────────────────────────────────────────────────

    async def Acquire(self, request: up.AcquireRequest, context: Context) -> up.AcquireResponse:
        try:
            job, lock = self._named(request.job_id, request.group_id)
            caller = self._callers.get((job, lock.id)) or self._admitted(job, lock, context.peer())
            caller.calls += 1
            try:
                grant = await self._acquire(caller, lock, context)
            finally:
                caller.calls -= 1
                self._drop_if_idle(caller, lock)
        except Refused as refused:
            await _abort(context, refused)
        return up.AcquireResponse(
            success=True, waited_ms=round(1000 * grant.waited), context_restored=grant.restored
        )

    async def Yield(self, request: up.YieldRequest, context: Context) -> up.YieldResponse:
        try:
            job, lock = self._named(request.job_id, request.group_id)
            depth, now = views.waiting(lock.state), lock.state.occupancy
            caller = self._entitled(job, lock)
            if caller is not None and isinstance(now, Held):
                caller.calls += 1
                try:
                    await self._yield(caller, lock, now)
                finally:
                    caller.calls -= 1
                    self._drop_if_idle(caller, lock)
        except Refused as refused:
            await _abort(context, refused)
        return up.YieldResponse(success=True, pending_waiters=depth, snapshot_deferred=depth == 0)

    async def ListGroups(self, request: up.ListGroupsRequest, context: Context) -> up.ListGroupsResponse:
        return up.ListGroupsResponse(group_ids=[lock.id for lock in self._groups])

    async def GetGroupStatus(
        self, request: up.GetGroupStatusRequest, context: Context
    ) -> up.GetGroupStatusResponse:
        lock = self._groups.get(request.group_id)
        if lock is None:
            await _abort(context, _refused(self._groups.unknown("", request.group_id).refused))
        since = time.time() - max(0.0, self._clock.now() - lock.state.since)
        return status(lock.state, since=since)

    # ── acquire, yield ─────────────────────────────────────────────────────

    async def _acquire(self, caller: _Caller, lock: GroupLock, context: Context) -> fx.Grant:
        request, who = next(self._requests), caller.who
        event = ev.AcquireRequested(
            at=self._clock.now(),
            job=who.job,
            incarnation=who.incarnation,
            session=who.session,
            request=convert.scoped(who.session, request),
            final=True,
            node=who.node,
        )
        allowed = _time_left(context)
        answer = caller.answers.expect(request)
        older = _older(caller, lock) if caller.resumed else []
        parent = _traceparent(context) if self._verbs.traces else ""
        try:
            posted = self._verbs.acquire_one(caller, lock, event, parent)
            if posted is not None:
                posted.add_done_callback(functools.partial(_broken, answer))
            if older:
                await self._forget(caller, older, posted)
            grant = await answer
            if _time_left(context) < min(SHARE * allowed, NEAR + ROUNDED * allowed):
                text = "it was granted too near to its deadline for the answer to arrive"
                await self._abandon(caller, request, text)
                raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, text)
        except asyncio.CancelledError:
            # The call is gone, wherever it stood: in the queue, in a swap, or granted a moment ago.
            await self._abandon(caller, request, "its caller cancelled, timed out or vanished")
            raise
        except CosliceError as error:
            raise Refused(grpc.StatusCode.INTERNAL, str(error)) from error
        finally:
            caller.answers.forget(request)
        caller.asked.pop(event.request, None)
        self._holders[lock.id] = caller
        return grant

    async def _forget(
        self, session: Session, older: Iterable[RequestId], posted: "asyncio.Future[None] | None"
    ) -> None:
        """Once the new request has the place that they kept."""
        if posted is not None:
            with suppress(Rejected):
                await posted
        for request in older:
            await self._abandon(session, convert.unscoped(request), "its caller called again")

    async def _abandon(self, session: Session, request: str, reason: str) -> None:
        gone = pb.Abandon(request=request, reason=reason)
        await asyncio.shield(self._verbs.handle(session, pb.ClientMessage(abandon=gone)))

    async def _yield(self, caller: _Caller, lock: GroupLock, held: Held) -> None:
        who = caller.who
        event = ev.LeaseYielded(at=self._clock.now(), job=who.job, session=who.session, epoch=held.epoch)
        yielded = lock.put(event)
        if caller.calls == 1:  # nobody else of the job is here: its session ends in the same turn
            self._close(caller, lock)
        try:
            await yielded
        except Rejected as refusal:
            raise _refused(convert.rejection("", refusal).refused) from None
        caller.forget_lease(lock.id, held.epoch)

    # ── who calls ──────────────────────────────────────────────────────────

    def _named(self, job: str, group: str) -> tuple[JobId, GroupLock]:
        lock = self._groups.get(group)
        try:
            name = JobId(check_name("job", job))
            if lock is None:
                check_name("group", group)
        except ValueError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        if lock is None:
            raise _refused(self._groups.unknown("", group).refused)
        return name, lock

    def _entitled(self, job: JobId, lock: GroupLock) -> _Caller | None:
        """Whose lease a yield ends; None: nobody's, the lock is free or about to be this job's."""
        now = lock.state.occupancy
        owner = now.job if isinstance(now, Held) else now.incoming if isinstance(now, Swapping) else None
        caller = self._callers.get((job, lock.id))
        if caller is not None and views.lease_of(lock.state, caller.who.session) is None:
            caller = None
        if owner is not None and (owner != job or (isinstance(now, Held) and caller is None)):
            whose = f"job {owner}" if owner != job else f"another client of job {owner}, with a session"
            text = f"group {lock.id} is held by {whose}, not by this caller"
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, text)
        return caller

    def _admitted(self, job: JobId, lock: GroupLock, peer: str, *, resuming: bool = False) -> _Caller:
        """``resuming``: it held the lock already when the last orchestrator ended."""
        who = convert.Identity(
            job=job,
            incarnation=Incarnation(""),
            session=_name(job, lock.id),
            node=f"a caller of the upstream protocol ({peer})",
            pid=0,
            start_time=0,
            rank=0,
        )
        if not resuming and (refusal := self._sessions.refusal(who)) is not None:
            raise _refused(refusal.refused)
        caller = self._callers[job, lock.id] = _Caller(who)
        self._sessions.begin(caller, caller.answers)
        if views.knows(lock.state, who.session):  # told, not waited for: what it asks is queued at once
            caller.resumed = True
            caller.locks[lock.id] = lock
            lock.tell(ev.SessionResumed(at=self._clock.now(), session=who.session))
        return caller

    def _drop_if_idle(self, caller: _Caller, lock: GroupLock) -> None:
        """Neither waiting nor holding: a session that stays would keep the job's name from its next start. As
        this orchestrator stops it waits on: its place is kept for its next call, to the successor."""
        if caller.answers.stopping or caller.calls:
            return
        if views.lease_of(lock.state, caller.who.session) is None:
            self._close(caller, lock)
        else:
            self._holders.setdefault(lock.id, caller)  # a lease that is on its way back ends in ``changed``

    def _close(self, caller: _Caller, lock: GroupLock) -> None:
        if self._callers.get((caller.who.job, lock.id)) is caller:
            del self._callers[caller.who.job, lock.id]
            self._sessions.closed(caller, caller.answers)

    def changed(self, group: GroupId) -> None:
        """The group's state changed: has a holder's last process ended, or its lease?"""
        lock, caller = self._groups.get(group), self._holders.get(group)
        if lock is None or caller is None:
            return
        who = caller.who
        if views.lease_of(lock.state, who.session) is None:
            del self._holders[group]
            self._drop_if_idle(caller, lock)
            return
        alive = _has_processes(lock.state, who.job)
        if caller.had_processes and not alive and all(view.attached for view in lock.state.views):
            self._close(caller, lock)
        caller.had_processes = alive


def _refused(why: pb.Refused) -> Refused:
    return Refused(_STATUS.get(why.code) or grpc_status(why.code), why.message)


async def _abort(context: Context, refused: Refused) -> NoReturn:
    await context.abort(refused.status, refused.message)
    raise AssertionError("abort raises")


def _time_left(context: Context) -> float:
    """Seconds until the call's deadline."""
    left = cast(float | None, context.time_remaining())  # None without a deadline, which its stubs deny
    return math.inf if left is None else left


def _traceparent(context: Context) -> str:
    return str(dict(context.invocation_metadata() or ()).get("traceparent", ""))


def _older(session: Session, lock: GroupLock) -> list[RequestId]:
    """Requests whose calls died with the last orchestrator."""
    mine = (RequestId(ask.request) for ask in open_asks(lock.state) if ask.session == session.who.session)
    return [request for request in mine if request not in session.asked]


def _broken(answer: "asyncio.Future[fx.Grant]", posted: "asyncio.Future[None]") -> None:
    """A driver that stopped answers nobody else; a refusal the session was told."""
    error = None if posted.cancelled() else posted.exception()
    if error is not None and not isinstance(error, Rejected) and not answer.done():
        answer.set_exception(error)


def _name(job: JobId, group: str) -> SessionId:
    """One session for each job and group: upstream has no order of groups that a session could break."""
    return SessionId(f"{_PREFIX}{job}:{group}")


def _has_processes(group: Group, job: JobId) -> bool:
    return any(c.job == job and c.pids for view in group.views for c in view.facts.contexts)
