"""Questions about a group's state that only the edge asks: what a reply or a status page shows. Pure."""

from collections.abc import Iterable, Iterator

from coslice.core import draining, story
from coslice.core.brief import occupancy_name
from coslice.core.group_state import (
    Group,
    Held,
    NodeView,
    Resident,
    Swapping,
    active,
    drain_of,
    frozen_lease,
    given_up_at,
    held_by,
    is_lost,
    occupant,
    share_of,
)
from coslice.core.ids import Epoch, JobId, RequestId, SessionId
from coslice.core.policy import Waiter
from coslice.orchestrator import convert
from coslice.wire.v1 import coslice_pb2 as pb


def lease_of(group: Group, session: SessionId) -> Epoch | None:
    """The epoch of the lease that this session shares, if it does."""
    share = share_of(group, session)
    return None if share is None else share.epoch


def holds(group: Group, request: RequestId) -> bool:
    """Was the lease granted to this request, and is it still its own?"""
    held = group.occupancy
    leases = (held, *group.frozen) if isinstance(held, Held) else group.frozen
    return any(holder.request == request for lease in leases for holder in active(lease))


def knows(group: Group, session: SessionId) -> bool:
    return is_lost(group, session) or any(session in record.sessions for record in group.jobs)


def waiting(group: Group) -> int:
    return len(group.waiters)


def stays(group: Group, job: JobId) -> bool:
    """The lock is free and the job's state was left where it is."""
    return not group.waiters and isinstance(group.occupancy, Resident) and group.occupancy.job == job


def status(
    group: Group, *, policy: str, now: float, admission: pb.AdmissionStatus | None = None
) -> pb.GroupStatus:
    held = group.occupancy
    holders = [h.session for h in active(held)] if isinstance(held, Held) else []
    return pb.GroupStatus(
        group=group.id,
        state=occupancy_name(group),
        job=occupant(group) or "",
        epoch=group.epoch,
        since=group.since,
        waiters=list(_waiters(group, now)),
        nodes=[node(group, view) for view in group.views],
        jobs=[
            pb.JobStatus(
                job=record.job,
                incarnation=record.incarnation,
                sessions=len(record.sessions),
                fault=record.fault.reason if record.fault is not None else "",
                lost_left_s=_lost_left(group, record.sessions, now),
            )
            for record in group.jobs
        ],
        policy=policy,
        swaps=group.swaps,
        bytes_moved=group.bytes_moved,
        held_s=group.held_s,
        lost_left_s=_lost_left(group, holders, now),
        admission=admission,
    )


def _lost_left(group: Group, sessions: Iterable[SessionId], now: float) -> float | None:
    """Seconds until the last of them is given up; None as long as one is connected."""
    until = given_up_at(group, sessions)
    return None if until is None else max(0.0, until - now)


def _waiters(group: Group, now: float) -> Iterator[pb.WaiterStatus]:
    swap = group.occupancy
    if isinstance(swap, Swapping) and swap.waiter is not None:
        yield _waiter(group, swap.waiter, story.describe(group, now), now)
    for waiter in group.waiters:
        yield _waiter(
            group, waiter, story.why_waiting(group, waiter.job, now)[1:], now
        )  # the first is its place


def _waiter(group: Group, waiter: Waiter, why: list[str], now: float) -> pb.WaiterStatus:
    return pb.WaiterStatus(
        job=waiter.job,
        waited_s=max(0.0, now - waiter.since),
        reason=" ".join(why),
        request=waiter.asks[0].request if waiter.asks else "",
        frozen=frozen_lease(group, waiter.job) is not None,
        lost_left_s=_lost_left(group, (a.session for a in waiter.asks), now),
    )


def node(group: Group, view: NodeView) -> pb.NodeStatus:
    status = convert.node_status(view.node, view.attached, view.facts)
    if (drained := drain_of(group, view.node)) is not None:
        status.drained.by, status.drained.reason = drained.by, drained.reason
        status.drained.holder = held_by(group, view.node) or ""
        status.drained.moving = draining.moving(group, view.node)
    return status
