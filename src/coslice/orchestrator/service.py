"""The gRPC face: one handler per rpc, each turning a stream into calls of sessions, verbs, agents and groups.

Every stream has one writer (its handler, draining an outbox) and one reader (a task). Whichever ends first
ends the other. Decides nothing beyond how long a hello may take.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

from coslice.core import events as ev
from coslice.core.ids import Epoch, GroupId, check_name
from coslice.core.outcome import Rejected
from coslice.orchestrator import convert, views
from coslice.orchestrator import sessions as people
from coslice.orchestrator.admin import Admin, Refused
from coslice.orchestrator.admission import Admissions
from coslice.orchestrator.agents import Agents, Link
from coslice.orchestrator.explain import LINES, explain, jobs, known
from coslice.orchestrator.groups import GroupLock, Groups
from coslice.orchestrator.outbox import End, Outbox
from coslice.orchestrator.roster import Roster
from coslice.orchestrator.verbs import Verbs
from coslice.orchestrator.watch import Watchers
from coslice.runtime.clock import Clock
from coslice.security import access
from coslice.wire import protocol
from coslice.wire.status import grpc_status
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc

PART = 1 << 20
"""Bytes of a saved value in one message, well below what a receiver takes."""
BEAT_S = 5.0
"""A status of several orchestrators is told again after so long without a change."""
SLICE = 10
"""Groups whose status is made between two looks at what else there is to do; one takes a third of a
millisecond."""
log = logging.getLogger(__name__)
In = TypeVar("In")
Out = TypeVar("Out")
Context = grpc.aio.ServicerContext[Any, Any]


class OrchestratorService(pb_grpc.OrchestratorServicer):
    def __init__(
        self,
        *,
        instance: str,
        groups: Groups,
        sessions: people.Sessions,
        verbs: Verbs,
        agents: Agents,
        admin: Admin,
        watchers: Watchers,
        admission: Admissions,
        clock: Clock,
        hello_timeout: float,
        session_grace: float,
        tls: bool = False,
        roster: Roster | None = None,
    ) -> None:
        """``roster``: None where no other orchestrator can be."""
        self._instance, self._groups, self._sessions, self._verbs = instance, groups, sessions, verbs
        self._agents, self._watchers, self._clock = agents, watchers, clock
        self._admin, self._admission = admin, admission
        self._hello_timeout, self._session_grace = hello_timeout, session_grace
        self._tls, self._roster = tls, roster
        self._end: End | None = None

    def stop(self, end: End) -> None:
        """End every stream with ``end`` and refuse new ones the same way."""
        self._end = end
        self._sessions.stop(end)
        self._agents.stop(end)
        self._watchers.stop()

    # ── sessions ───────────────────────────────────────────────────────────

    # Streams are written with context.write (as fast as a generator, measured): a generator would not hear of
    # a cancellation that meets it at a yield, and the loss of the stream is what we must hear of.
    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.ClientMessage], context: Context
    ) -> None:
        await self._refuse_while_stopping(context)
        outbox: Outbox[pb.ServerMessage] = Outbox()
        who = await self._hello(request_iterator, outbox)
        if who is None:
            await _drain(outbox, context)
            return
        session = self._sessions.admit(who, outbox)
        try:
            held = await self._sessions.resume(session)
            outbox.put_first(self._welcome(held))
            await _serve(outbox, context, self._hear_client(session, outbox, request_iterator))
        finally:
            self._sessions.lost(session, outbox)

    async def _hello(
        self, messages: AsyncIterator[pb.ClientMessage], outbox: Outbox[pb.ServerMessage]
    ) -> convert.Identity | None:
        """Who speaks; None once the reason of a refusal is in the outbox."""
        first = await _first(messages, self._hello_timeout)
        if first is None:  # perhaps only late, when hundreds return at once: it may try again
            text = f"a session begins with a hello, within {self._hello_timeout:g} s"
            outbox.close(End(grpc.StatusCode.UNAVAILABLE, text))
            return None
        try:
            if not first.HasField("hello"):
                raise ValueError("a session begins with a hello")
            if other := protocol.problem("this client", first.hello.protocol):
                raise ValueError(other)
            who = convert.identity(first.hello)
        except ValueError as error:
            refusal = convert.refused("", pb.INVALID, str(error))
        else:
            if denied := access.caller().problem(access.JOB, who.job):
                refusal = convert.refused("", pb.DENIED, denied)
            elif (problem := self._sessions.refusal(who)) is None:
                return who
            else:
                refusal = problem
        outbox.put(refusal)
        outbox.close(End())
        return None

    def _welcome(self, held: dict[GroupId, Epoch]) -> pb.ServerMessage:
        leases = [pb.LeaseRef(group=group, epoch=epoch) for group, epoch in held.items()]
        return pb.ServerMessage(
            welcome=pb.Welcome(
                orchestrator=self._instance,
                session_grace_s=self._session_grace,
                held=leases,
                protocol=protocol.PROTOCOL,
            )
        )

    async def _hear_client(
        self,
        session: people.Session,
        outbox: Outbox[pb.ServerMessage],
        messages: AsyncIterator[pb.ClientMessage],
    ) -> None:
        async for message in messages:
            if message.HasField("goodbye"):
                self._sessions.closed(session, outbox)
                return
            await self._verbs.handle(session, message)

    # ── agents ─────────────────────────────────────────────────────────────

    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.AgentMessage], context: Context
    ) -> None:
        await self._refuse_while_stopping(context)
        first = await _first(request_iterator, self._hello_timeout)
        if first is None:
            text = f"an agent begins with a hello, within {self._hello_timeout:g} s"
            await context.abort(grpc.StatusCode.UNAVAILABLE, text)
        try:
            if not first.HasField("hello"):
                raise ValueError("an agent begins with a hello")
            if other := protocol.problem("this agent", first.hello.protocol):
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, other)
            denied = access.agent_problem(context, first.hello.node, tls=self._tls)
            refusal = self._agents.refusal(first.hello)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if denied:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, denied)
        if refusal is not None:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, refusal)
        link = self._agents.admit(first.hello, context.peer())
        try:
            await self._agents.join(link, first.hello)
            await _serve(link.outbox, context, self._hear_agent(link, request_iterator))
        finally:
            self._agents.detached(link)

    async def _hear_agent(self, link: Link, messages: AsyncIterator[pb.AgentMessage]) -> None:
        async for message in messages:
            self._agents.report(link, message)

    # ── questions ──────────────────────────────────────────────────────────

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        await self._check_group(request.group, context)
        return await self._status(request.group)

    async def WatchStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> AsyncIterator[pb.GetStatusResponse]:
        await self._check_group(request.group, context)
        beat = BEAT_S if self._roster is not None else None  # no standby says here that it comes or goes
        async for _ in self._watchers.follow(request.group, groups=len(self._groups), beat=beat):
            yield await self._status(request.group)
        await self._refuse_while_stopping(context)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        await self._check_group(request.group, context)
        lock = self._groups.get(request.group)
        if lock is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "explain one group: name it")
        await self._check_question(lock, request, context)
        lines = explain(
            lock,
            self._groups,
            now=self._clock.now(),
            job=request.job,
            last=request.last or LINES,
            admission=self._admission.lines(lock, request.job),
        )
        return pb.ExplainResponse(lines=lines)

    # ── for administrators ─────────────────────────────────────────────────

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Context) -> pb.SetPolicyResponse:
        await self._refuse_while_stopping(context)
        await self._check_group(request.group, context)
        lock = self._groups.get(request.group)
        if lock is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the policy of one group: name it")
        try:
            await lock.post(ev.PolicySet(at=self._clock.now(), policy=request.policy))
        except Rejected as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.SetPolicyResponse(policy=lock.policy)

    async def Forget(self, request: pb.ForgetRequest, context: Context) -> pb.ForgetResponse:
        await self._refuse_while_stopping(context)
        await self._check_group(request.group, context)
        return await self._administer(self._admin.forget(request), context)

    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:
        await self._refuse_while_stopping(context)
        await self._check_group(request.group, context)
        return await self._administer(self._admin.evict(request), context)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        await self._refuse_while_stopping(context)
        return await self._administer(self._admin.drain(request), context)

    async def DeleteGroup(self, request: pb.DeleteGroupRequest, context: Context) -> pb.DeleteGroupResponse:
        await self._refuse_while_stopping(context)
        await self._check_group(request.group, context)
        return await self._administer(self._admin.delete_group(request), context)

    async def ReadStore(self, request: pb.ReadStoreRequest, context: Context) -> AsyncIterator[pb.StorePart]:
        await self._refuse_while_stopping(context)
        for key, value in (await self._administer(self._admin.saved(), context)).items():
            for start in range(0, len(value) or 1, PART):
                more = start + PART < len(value)
                yield pb.StorePart(key=key, value=value[start : start + PART], more=more)

    async def _administer(self, verb: Coroutine[None, None, Out], context: Context) -> Out:
        try:
            return await verb
        except Refused as refusal:
            await context.abort(refusal.status, str(refusal))
        raise AssertionError("an aborted call goes on")

    # ── details ────────────────────────────────────────────────────────────

    async def _check_question(self, lock: GroupLock, request: pb.ExplainRequest, context: Context) -> None:
        try:
            if request.last < 0:
                raise ValueError(f"the last {request.last} decisions? Give a number above 0, or none")
            if request.job:
                check_name("job", request.job)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        here = known(lock, request.job) or self._admission.knows(lock, request.job)
        if request.job and not here:
            there = ", ".join(jobs(lock)) or "none"
            text = f"group {lock.id} knows no job {request.job}: it never asked, or is over; known: {there}"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)

    async def _status(self, group: str) -> pb.GetStatusResponse:
        """Each group as it is at one moment; of many, not all at the same."""
        orchestrators = await self._roster.status() if self._roster is not None else []
        now = self._clock.now()
        answer = pb.GetStatusResponse(orchestrator=self._instance, now=now, orchestrators=orchestrators)
        for number, lock in enumerate([lock for lock in self._groups if group in ("", lock.id)]):
            if number and number % SLICE == 0:
                await asyncio.sleep(0)  # hand-overs wait for the same loop
            admission = self._admission.status(lock)
            answer.groups.append(views.status(lock.state, policy=lock.policy, now=now, admission=admission))
        return answer

    async def _check_group(self, group: str, context: Context) -> None:
        if group and self._groups.get(group) is None:
            refusal = self._groups.unknown("", group).refused
            known = (
                ("coslice-known-groups", refusal.data["known_groups"].encode("ascii", "replace").decode()),
            )
            await context.abort(grpc_status(refusal.code), refusal.message, trailing_metadata=known)

    async def _refuse_while_stopping(self, context: Context) -> None:
        if self._end is not None:
            await context.abort(self._end.status, self._end.message)


async def _first(messages: AsyncIterator[In], timeout: float) -> In | None:
    """The first message of a stream; None if it does not come."""
    try:
        async with asyncio.timeout(timeout):
            return await anext(messages, None)
    except TimeoutError:
        return None


async def _serve(outbox: Outbox[Out], context: Context, hearing: Coroutine[None, None, None]) -> None:
    """Write what is in the outbox and hear what comes, until either side ends."""
    reader = asyncio.create_task(hearing)
    reader.add_done_callback(lambda reader: outbox.close(_end_of(reader)))
    try:
        async for message in outbox:
            await context.write(message)
    finally:
        reader.cancel()
    await asyncio.wait([reader])  # it must not read from an rpc that is over
    await _finish(outbox, context)


async def _drain(outbox: Outbox[Out], context: Context) -> None:
    """Write the rest of a closed outbox, and end the rpc as it says."""
    async for message in outbox:
        await context.write(message)
    await _finish(outbox, context)


async def _finish(outbox: Outbox[Out], context: Context) -> None:
    if outbox.end.status is not grpc.StatusCode.OK:
        await context.abort(outbox.end.status, outbox.end.message)


def _end_of(reader: "asyncio.Task[None]") -> End:
    """How a stream ends whose reader ended. An error of ours must not vanish with its stream."""
    error = None if reader.cancelled() else reader.exception()
    if error is None:
        return End()
    log.error("a stream ended by an error of the orchestrator: %s", error, exc_info=error)
    return End(grpc.StatusCode.UNAVAILABLE, f"the orchestrator cannot go on: {error}")
