"""The orchestrator's upstream face: llm-d's ``TimeSliceOrchestratorService`` on the same locks.

Its callers have no session, no token and no lease: a call acquires, another yields. Here each job and group
that they name gets a session of its own, which this module speaks for through the same verbs as a native
client's stream, so that both kinds wait in one queue under one set of rules. Upstream's words end in this
file.

What ends a lease: a yield; the end of the job's last process, as its agent tells; the group's ``max_hold``.
A call that is cancelled or times out takes its place in the queue, or its grant, with it.
"""

import asyncio
import functools
import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp

from coslice.core import events as ev
from coslice.core.events import ContextState
from coslice.core.group_state import Empty, Group, Held, Resident, Swapping, open_asks
from coslice.core.ids import GroupId, Incarnation, JobId, RequestId, SessionId, check_name
from coslice.core.outcome import Rejected
from coslice.errors import CosliceError
from coslice.orchestrator import convert, views
from coslice.orchestrator.groups import GroupLock, Groups
from coslice.orchestrator.outbox import End, Outbox
from coslice.orchestrator.sessions import Session, Sessions
from coslice.orchestrator.verbs import Verbs
from coslice.runtime.clock import Clock
from coslice.wire.status import grpc_status
from coslice.wire.upstream import timeslice_orchestrator_pb2 as up
from coslice.wire.upstream import timeslice_orchestrator_pb2_grpc as up_grpc
from coslice.wire.v1 import coslice_pb2 as pb

SERVICE = "timeslice_orchestrator.v1alpha1.TimeSliceOrchestratorService"
_PREFIX = "upstream:"
"""No native session is named so: theirs are fingerprints."""

Context = grpc.aio.ServicerContext[Any, Any]
_Key = tuple[JobId, GroupId]

_STATUS: dict[pb.Code.ValueType, grpc.StatusCode] = {
    pb.JOB_FAULTED: grpc.StatusCode.UNAVAILABLE,
    pb.GROUP_EMPTY: grpc.StatusCode.UNAVAILABLE,
    pb.GROUP_GONE: grpc.StatusCode.INTERNAL,
    pb.JOB_RUNNING: grpc.StatusCode.PERMISSION_DENIED,
}
"""Where upstream's codes differ from ours."""

_CONTEXT = {
    ContextState.LIVE: up.SnapshotAgentJobState.STATE_RUNNING,
    ContextState.LEAVING: up.SnapshotAgentJobState.STATE_TRANSITIONING,
    ContextState.RETURNING: up.SnapshotAgentJobState.STATE_TRANSITIONING,
    ContextState.SAVED: up.SnapshotAgentJobState.STATE_SAVED,
    ContextState.LOST: up.SnapshotAgentJobState.STATE_FAULTED,
}


class Ended(Exception):
    """The orchestrator ends its calls: it is stopping."""

    def __init__(self, end: End) -> None:
        super().__init__(end.message)
        self.end = end


class _Answers(Outbox[pb.ServerMessage]):
    """What would go out on a session's stream, handed to the calls that wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[str, asyncio.Future[pb.ServerMessage]] = {}

    def expect(self, request: str) -> "asyncio.Future[pb.ServerMessage]":
        answer: asyncio.Future[pb.ServerMessage] = asyncio.get_running_loop().create_future()
        self._waiting[request] = answer
        answer.add_done_callback(lambda _: self._waiting.pop(request, None))
        return answer

    def put(self, message: pb.ServerMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind not in ("granted", "refused", "yielded"):
            return  # a lost lease, a wish to yield: upstream has no way to say so
        waiting = self._waiting.get(getattr(message, kind).request)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def close(self, end: End) -> None:
        super().close(end)
        for waiting in tuple(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(Ended(end))


class _Caller:
    """Everybody who calls for one job in one group."""

    def __init__(self, session: Session, answers: _Answers) -> None:
        self.session, self.answers = session, answers
        self.calls = 0
        """Those that have not returned yet."""
        self.had_processes = False
        """An agent has seen the job alive since it was granted: from then on their end ends the lease."""


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
                self._holders[lock.id] = await self._caller(held.job, lock, peer="before a restart")

    # ── the calls ──────────────────────────────────────────────────────────

    async def Acquire(self, request: up.AcquireRequest, context: Context) -> up.AcquireResponse:
        job, lock = await self._checked(request.job_id, request.group_id, context)
        caller = await self._caller(job, lock, peer=context.peer(), abort=context)
        with self._in_call(caller, lock):
            lease = await self._acquire(caller, lock, context)
        return up.AcquireResponse(
            success=True, waited_ms=round(1000 * lease.waited_s), context_restored=lease.restored
        )

    async def Yield(self, request: up.YieldRequest, context: Context) -> up.YieldResponse:
        job, lock = await self._checked(request.job_id, request.group_id, context)
        state = lock.state
        depth, now = views.waiting(state), state.occupancy
        owner = now.job if isinstance(now, Held) else now.incoming if isinstance(now, Swapping) else None
        caller = self._callers.get((job, lock.id))
        mine = caller is not None and views.lease_of(state, caller.session.who.session) is not None
        if owner is not None and (owner != job or (isinstance(now, Held) and not mine)):
            whose = f"job {owner}" if owner != job else f"another client of job {owner}, with a session"
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"group {lock.id} is held by {whose}, not by this caller"
            )
        if caller is not None and mine and isinstance(now, Held):
            with self._in_call(caller, lock):
                await self._yield(caller, lock, now, context)
        return up.YieldResponse(success=True, pending_waiters=depth, snapshot_deferred=depth == 0)

    async def ListGroups(self, request: up.ListGroupsRequest, context: Context) -> up.ListGroupsResponse:
        return up.ListGroupsResponse(group_ids=[lock.id for lock in self._groups])

    async def GetGroupStatus(
        self, request: up.GetGroupStatusRequest, context: Context
    ) -> up.GetGroupStatusResponse:
        lock = self._groups.get(request.group_id)
        if lock is None:
            await self._abort(context, self._groups.unknown("", request.group_id).refused)
        since = time.time() - max(0.0, self._clock.now() - lock.state.since)
        return _status(lock.state, since=since)

    # ── acquire, yield ─────────────────────────────────────────────────────

    async def _acquire(self, caller: _Caller, lock: GroupLock, context: Context) -> pb.Lease:
        request = next(self._requests)
        answer = caller.answers.expect(request)
        parent = str(dict(context.invocation_metadata() or ()).get("traceparent", ""))
        older = _older(caller.session, lock)
        try:
            posted = self._verbs.acquire(
                caller.session, pb.Acquire(request=request, groups=[lock.id], traceparent=parent)
            )
            if posted is not None:
                posted.add_done_callback(functools.partial(_broken, answer))
            if older:
                await self._forget(caller.session, older, posted)
            said = await answer
        except asyncio.CancelledError:
            # The call is gone, wherever it stood: in the queue, in a swap, or granted a moment ago.
            gone = pb.Abandon(request=request, reason="its caller cancelled, timed out or vanished")
            await asyncio.shield(self._verbs.handle(caller.session, pb.ClientMessage(abandon=gone)))
            raise
        except Ended as stopping:
            await context.abort(stopping.end.status, stopping.end.message)
        except CosliceError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        if said.HasField("refused"):
            await self._abort(context, said.refused)
        caller.session.asked.pop(convert.scoped(caller.session.who.session, request), None)
        self._holders[GroupId(lock.id)] = caller
        return said.granted.leases[0]

    async def _forget(
        self, session: Session, older: Iterable[RequestId], posted: "asyncio.Future[None] | None"
    ) -> None:
        """Once the new request has the place that they kept."""
        if posted is not None:
            with suppress(Rejected):
                await posted
        for request in older:
            gone = pb.Abandon(request=convert.unscoped(request), reason="its caller called again")
            await self._verbs.handle(session, pb.ClientMessage(abandon=gone))

    async def _yield(self, caller: _Caller, lock: GroupLock, held: Held, context: Context) -> None:
        who = caller.session.who
        event = ev.LeaseYielded(at=self._clock.now(), job=who.job, session=who.session, epoch=held.epoch)
        yielded = lock.put(event)
        if caller.calls == 1:  # nobody else of the job is here: its session ends in the same turn
            self._close(caller, lock)
        try:
            await yielded
        except Rejected as refusal:
            await self._abort(context, convert.rejection("", refusal).refused)
        caller.session.forget_lease(lock.id, held.epoch)

    # ── who calls ──────────────────────────────────────────────────────────

    async def _checked(self, job: str, group: str, context: Context) -> tuple[JobId, GroupLock]:
        try:
            name = JobId(check_name("job", job))
            check_name("group", group)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        lock = self._groups.get(group)
        if lock is None:
            await self._abort(context, self._groups.unknown("", group).refused)
        return name, lock

    async def _caller(
        self, job: JobId, lock: GroupLock, *, peer: str, abort: Context | None = None
    ) -> _Caller:
        known = self._callers.get((job, lock.id))
        if known is not None:
            return known
        who = convert.Identity(
            job=job,
            incarnation=Incarnation(""),
            session=_name(job, lock.id),
            node=f"a caller of the upstream protocol ({peer})",
            pid=0,
            start_time=0,
            rank=0,
        )
        refusal = self._sessions.refusal(who)
        if refusal is not None and abort is not None:
            await self._abort(abort, refusal.refused)
        answers = _Answers()
        caller = _Caller(self._sessions.admit(who, answers), answers)
        caller.session.confirms = False
        self._callers[job, lock.id] = caller
        if views.knows(lock.state, who.session):  # told, not waited for: what it asks is queued at once
            caller.session.locks[lock.id] = lock
            lock.tell(ev.SessionResumed(at=self._clock.now(), session=who.session))
        return caller

    @contextmanager
    def _in_call(self, caller: _Caller, lock: GroupLock) -> Iterator[None]:
        caller.calls += 1
        try:
            yield
        finally:
            caller.calls -= 1
            self._drop_if_idle(caller, lock)

    def _drop_if_idle(self, caller: _Caller, lock: GroupLock) -> None:
        """Neither waiting nor holding: a session that stays would keep the job's name from its next start."""
        who = caller.session.who
        if caller.calls == 0 and views.lease_of(lock.state, who.session) is None:
            self._close(caller, lock)

    def _close(self, caller: _Caller, lock: GroupLock) -> None:
        if self._callers.get((caller.session.who.job, lock.id)) is caller:
            del self._callers[caller.session.who.job, lock.id]
            self._sessions.closed(caller.session, caller.answers)

    def changed(self, group: GroupId) -> None:
        """The group's state changed: has a holder's last process ended, or its lease?"""
        lock, caller = self._groups.get(group), self._holders.get(group)
        if lock is None or caller is None:
            return
        who = caller.session.who
        if views.lease_of(lock.state, who.session) is None:
            del self._holders[group]
            self._drop_if_idle(caller, lock)
            return
        alive = _has_processes(lock.state, who.job)
        if caller.had_processes and not alive and all(view.attached for view in lock.state.views):
            self._close(caller, lock)
        caller.had_processes = alive

    async def _abort(self, context: Context, refused: pb.Refused) -> NoReturn:
        status = _STATUS.get(refused.code) or grpc_status(refused.code)
        await context.abort(status, refused.message)
        raise AssertionError("abort raises")


def _older(session: Session, lock: GroupLock) -> list[RequestId]:
    """Requests whose calls died with the last orchestrator."""
    mine = (RequestId(ask.request) for ask in open_asks(lock.state) if ask.session == session.who.session)
    return [request for request in mine if request not in session.asked]


def _broken(answer: "asyncio.Future[pb.ServerMessage]", posted: "asyncio.Future[None]") -> None:
    """A driver that stopped answers nobody else; a refusal the session was told."""
    error = None if posted.cancelled() else posted.exception()
    if error is not None and not isinstance(error, Rejected) and not answer.done():
        answer.set_exception(error)


def _name(job: JobId, group: str) -> SessionId:
    """One session for each job and group: upstream has no order of groups that a session could break."""
    return SessionId(f"{_PREFIX}{job}:{group}")


def _has_processes(group: Group, job: JobId) -> bool:
    return any(c.job == job and c.pids for view in group.views for c in view.facts.contexts)


def _status(group: Group, *, since: float) -> up.GetGroupStatusResponse:
    now = group.occupancy
    state, locking, active, loaded = up.GroupStatus.STATE_IDLE, "", "", ""
    match now:
        case Empty():
            pass
        case Resident(job=job):
            state, active, loaded = up.GroupStatus.STATE_IDLE_YIELDED, job, job
        case Swapping(incoming=job):
            state, locking, active = up.GroupStatus.STATE_SWITCHING, job, job
        case Held(job=job):
            state, locking, active, loaded = up.GroupStatus.STATE_LOCKED, job, job, job
    stamp = Timestamp()
    stamp.FromNanoseconds(round(since * 1e9))
    return up.GetGroupStatusResponse(
        group=up.GroupStatus(
            group_id=group.id,
            group_state=state,
            state_timestamp=stamp,
            locking_job=locking,
            active_job=active,
            waiter_queue_depth=views.waiting(group),
            loaded_job=loaded,
        ),
        agent_job_states=[
            up.SnapshotAgentJobState(agent=view.node, job_state=_CONTEXT[context.state], job_id=context.job)
            for view in group.views
            for context in view.facts.contexts
        ],
    )
