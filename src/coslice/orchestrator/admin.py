"""What an administrator asks of the orchestrator: forget a job, evict it, drain a node, delete a group.

Turns one request into events of the groups it is about; what may be done is the core's business. Who may ask
is decided before, at the edge.
"""

import grpc

from coslice.core import events as ev
from coslice.core.group_state import Group, Held, drain_of, view_of, waiting
from coslice.core.ids import JobId, NodeId, check_name
from coslice.core.outcome import Rejected
from coslice.orchestrator import views
from coslice.orchestrator.groups import GroupLock, Groups
from coslice.runtime.clock import Clock
from coslice.store import Store
from coslice.wire.v1 import coslice_pb2 as pb

MAX_REASON = 300


class Refused(Exception):
    """Nothing was done. The message names the next step."""

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status


class Admin:
    def __init__(self, *, groups: Groups, clock: Clock, store: Store | None = None) -> None:
        """``store``: the one that this process alone opens; None where others can read it, too."""
        self._groups, self._clock, self._store = groups, clock, store

    async def saved(self) -> dict[str, bytes]:
        """Everything in the store, as of one moment between two commits."""
        if self._store is None:
            text = "the state is in a shared store: name that with --store, the orchestrator is not needed"
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, text)
        return {key: value for key, (value, _) in (await self._store.load()).items()}

    async def forget(self, request: pb.ForgetRequest) -> pb.ForgetResponse:
        """All groups or none: a job that runs in one of them is refused before anything is cleared."""
        job, locks = _job(request.job), self._named(request.group)
        locks = [lock for lock in locks if _knows(lock, job)]
        if not locks:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"nothing is remembered of a job {job}")
        for lock in sorted(locks, key=lambda lock: not _runs(lock, job)):  # who refuses is asked first
            await self._post(lock, ev.JobForgotten(at=self._clock.now(), job=job))
        away = {v.node for lock in locks for v in lock.state.views if not v.attached}
        return pb.ForgetResponse(groups=[lock.id for lock in locks], nodes_away=sorted(away))

    async def evict(self, request: pb.EvictRequest) -> pb.EvictResponse:
        job, answer = _job(request.job), pb.EvictResponse()
        for lock in self._named(request.group):
            held = lock.state.occupancy
            holds = isinstance(held, Held) and held.job == job
            waits = any(waiter.job == job for waiter in waiting(lock.state))
            if not (holds or waits):
                continue
            await self._post(
                lock, ev.JobEvicted(at=self._clock.now(), job=job, reason=_reason(request.reason))
            )
            answer.held.extend([lock.id] if holds else [])
            answer.waited.extend([lock.id] if waits else [])
        if not (answer.held or answer.waited):
            where = f"group {request.group}" if request.group else "any group"
            text = f"{job} neither holds nor waits for {where}: there is nothing to take away"
            raise Refused(grpc.StatusCode.NOT_FOUND, text)
        return answer

    async def drain(self, request: pb.DrainRequest) -> pb.DrainResponse:
        """In all its groups. Said again it changes nothing."""
        name = _node(request.node)
        here = [lock for lock in self._groups if name in _nodes(lock.state)]
        if not here:
            known = sorted({node for lock in self._groups for node in _nodes(lock.state)})
            text = f"there is no node {name} here; known: {', '.join(known) or 'none, no agent has attached'}"
            raise Refused(grpc.StatusCode.NOT_FOUND, text)
        by, changed = _reason(request.by) or ev.OPERATOR, False
        for lock in here:
            if (drain_of(lock.state, name) is not None) is request.undo:
                changed, at = True, self._clock.now()
                event: ev.GroupEvent = ev.NodeDrained(at=at, node=name, reason=_reason(request.reason), by=by)
                if request.undo:
                    event = ev.NodeUndrained(at=at, node=name, by=by)
                await self._post(lock, event)
        groups = [
            pb.DrainedGroup(group=lock.id, node=views.node(lock.state, view))
            for lock in here
            if (view := view_of(lock.state, name)) is not None
        ]
        return pb.DrainResponse(changed=changed, groups=groups)

    async def delete_group(self, request: pb.DeleteGroupRequest) -> pb.DeleteGroupResponse:
        lock = self._groups.get(request.group)
        if lock is None:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "delete which group? Name it")
        held = lock.state.occupancy
        answer = pb.DeleteGroupResponse(
            holder=held.job if isinstance(held, Held) else "",
            waiters=[waiter.job for waiter in waiting(lock.state)],
        )
        await self._groups.delete(lock, _reason(request.reason))
        return answer

    def _named(self, group: str) -> list[GroupLock]:
        """One group, or all."""
        return [lock for lock in self._groups if group in ("", lock.id)]

    @staticmethod
    async def _post(lock: GroupLock, event: ev.GroupEvent) -> None:
        try:
            await lock.post(event)
        except Rejected as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from None


def _job(name: str) -> JobId:
    try:
        return JobId(check_name("job", name))
    except ValueError as error:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None


def _node(name: str) -> NodeId:
    try:
        return NodeId(check_name("node", name))
    except ValueError as error:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None


def _nodes(group: Group) -> set[NodeId]:
    """Also those that are not of the group for now."""
    return {*group.nodes, *(h.node for h in group.hung), *(d.node for d in group.drained)}


def _reason(text: str) -> str:
    return "".join(c for c in text if c.isprintable())[:MAX_REASON]


def _knows(lock: GroupLock, job: JobId) -> bool:
    group = lock.state
    named = {record.job for record in group.jobs} | {waiter.job for waiter in waiting(group)}
    return job in named | {context.job for view in group.views for context in view.facts.contexts}


def _runs(lock: GroupLock, job: JobId) -> bool:
    held = lock.state.occupancy
    lost = {s.session for s in lock.state.lost}
    records = (record for record in lock.state.jobs if record.job == job)
    return (isinstance(held, Held) and held.job == job) or any(set(r.sessions) - lost for r in records)
