"""A group's state in upstream's words: what ``GetGroupStatus`` answers. Reads the state, decides nothing."""

from google.protobuf.timestamp_pb2 import Timestamp

from coslice.core.events import ContextState
from coslice.core.group_state import Empty, Group, Held, Resident, Swapping
from coslice.orchestrator import views
from coslice.wire.upstream import timeslice_orchestrator_pb2 as up

_RUNNING = up.SnapshotAgentJobState.STATE_RUNNING
_CONTEXT = {
    ContextState.LIVE: _RUNNING,
    ContextState.LEAVING: up.SnapshotAgentJobState.STATE_TRANSITIONING,
    ContextState.RETURNING: up.SnapshotAgentJobState.STATE_TRANSITIONING,
    ContextState.SAVED: up.SnapshotAgentJobState.STATE_SAVED,
    ContextState.LOST: up.SnapshotAgentJobState.STATE_FAULTED,
}


def status(group: Group, *, since: float) -> up.GetGroupStatusResponse:
    """``since``: Unix time from which on it is as it is."""
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
            up.SnapshotAgentJobState(
                agent=view.node,
                job_state=_RUNNING if context.crowded else _CONTEXT[context.state],
                job_id=context.job,
            )
            for view in group.views
            for context in view.facts.contexts
        ],
    )
