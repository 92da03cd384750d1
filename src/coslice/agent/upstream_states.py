"""What the agent knows of jobs that it moves for the upstream protocol, in upstream's words.

Upstream has one state for a job, we have one in each group, and processes that are still to come back from
the last agent. Called by the service; changes nothing but ``Occupancy``'s last survey.
"""

from collections.abc import Mapping
from typing import TypeAlias

import grpc

from coslice.agent.direct import NO_GROUP, DirectApi, DirectRefused
from coslice.agent.group import ServedGroup
from coslice.agent.members import Members
from coslice.agent.occupancy import Occupancy
from coslice.agent.upstream_ledger import Ledger, Place
from coslice.agent.upstream_moves import Moves
from coslice.core.events import ContextState
from coslice.core.ids import GroupId, JobId
from coslice.wire.upstream import snapshot_agent_pb2 as up

State: TypeAlias = up.JobState.ValueType

_GROUP_STATES: dict[ContextState, State] = {
    ContextState.LIVE: up.JOB_STATE_RUNNING,
    ContextState.LEAVING: up.JOB_STATE_TRANSITIONING,
    ContextState.RETURNING: up.JOB_STATE_TRANSITIONING,
    ContextState.SAVED: up.JOB_STATE_SAVED,
    ContextState.LOST: up.JOB_STATE_FAULTED,
}
_NOTABLE = (
    up.JOB_STATE_IDLE,
    up.JOB_STATE_RUNNING,
    up.JOB_STATE_SAVED,
    up.JOB_STATE_FAULTED,
    up.JOB_STATE_TRANSITIONING,
)
"""Of a job's states, one in each group, the last of these is told."""


class States:
    def __init__(
        self,
        *,
        direct: DirectApi,
        members: Members,
        groups: Mapping[GroupId, ServedGroup],
        occupancy: Occupancy,
        ledger: Ledger,
        moves: Moves,
    ) -> None:
        self._direct, self._members, self._groups = direct, members, groups
        self._occupancy, self._ledger, self._moves = occupancy, ledger, moves

    async def of_all(self) -> dict[JobId, State]:
        await self._survey(max_age=0.1)
        known = {JobId(e.job) for e in self._ledger.living(NO_GROUP)}
        states = {j: self._now(j) for j in known | {m.job for m in self._members.of_group(NO_GROUP)}}
        states |= {JobId(job): up.JOB_STATE_TRANSITIONING for job in self._moves.jobs()}
        for group in self._groups.values():
            for fact in group.facts().contexts:
                so_far = states.get(fact.job, up.JOB_STATE_IDLE)
                state = up.JOB_STATE_RUNNING if fact.crowded else _GROUP_STATES[fact.state]
                states[fact.job] = max(so_far, state, key=_NOTABLE.index)
        return states

    async def of(self, job: str) -> State:
        """Raises ``DirectRefused`` for a job of an orchestrated group, and for a name that is none."""
        if self._moves.under_way(job):
            return up.JOB_STATE_TRANSITIONING
        try:
            members = self._direct.find(job)
        except DirectRefused as refusal:
            if refusal.status is grpc.StatusCode.NOT_FOUND:
                return self._now(JobId(job))
            raise
        if any(member.device == "cuda" for member in members):
            await self._survey(max_age=0.0)
        return self._now(JobId(job))

    def _now(self, job: JobId) -> State:
        if self._moves.under_way(job):
            return up.JOB_STATE_TRANSITIONING
        members, absent = self._members.of_job(NO_GROUP, job), self._moves.absent(job)
        if any(not entry.settled for entry in (*map(self._ledger.of, members), *absent)):
            return up.JOB_STATE_FAULTED
        if absent:
            here = any(e.place is Place.HERE for e in absent) or not all(m.sleeps for m in members)
            return up.JOB_STATE_RUNNING if here else up.JOB_STATE_SAVED
        if members and all(member.sleeps for member in members):
            return up.JOB_STATE_SAVED
        if not members or all(m.device == "cuda" and m.usage() == 0 for m in members):
            return up.JOB_STATE_IDLE
        return up.JOB_STATE_RUNNING

    async def _survey(self, *, max_age: float) -> None:
        if any(member.device == "cuda" for member in self._members):
            await self._occupancy.refresh(max_age=max_age)

    def accelerators(self) -> list[up.AcceleratorStatus]:
        gpus = [
            up.AcceleratorStatus(id=gpu.uuid, memory_used_bytes=gpu.used, memory_total_bytes=gpu.total)
            for gpu in self._occupancy.last.gpus
        ]
        return gpus + [
            up.AcceleratorStatus(
                id=f"host/{group.id}",
                memory_used_bytes=group.sampler.used,
                memory_total_bytes=group.devices.device_budget,
            )
            for group in self._groups.values()
            if group.devices.accelerator == "host"
        ]
