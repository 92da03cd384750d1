"""A group's status as people see it: one row for each job and node, and what is wrong, in words.

``coslice status``, ``coslice top`` and the dashboard show these rows; how they look is theirs. Pure.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from coslice.wire.v1 import coslice_pb2 as pb

PRESSURE = 0.9
"""Share of the host budget with saved state in it, from which the next one may not fit."""


class JobRow(Struct, kw_only=True):
    job: str
    lock: str = ""
    """held, swapping, resident or ``frozen in a phase``; empty: neither."""
    lost_left_s: float | None = None
    """Nobody of it is connected; it is given up in so many seconds."""
    door: str = ""
    """What admission says, if it is not seated."""
    door_reason: str = ""
    place: int = 0
    """In the queue, from 1; 0: it does not wait."""
    waited_s: float = 0.0
    reason: str = ""
    where: str = ""
    """Of its state, on each node."""
    bytes: int = 0
    fault: str = ""
    slowdown: float = 0.0
    """Measured; 0: not known."""


class NodeRow(Struct, kw_only=True):
    node: str
    attached: bool
    accelerator: str
    device_used: int
    device_budget: int
    host_used: int
    host_budget: int
    disk_used: int
    disk_budget: int
    short: bool
    """Host memory is nearly full of saved state."""
    out: str
    """``draining`` while somebody is still there, then ``drained``; empty: it serves."""
    drained: str
    """By whom, why, and who is still there; empty: it serves."""


class SeatRow(Struct, kw_only=True):
    """One of several orchestrators on one store."""

    address: str
    leads: bool
    since: float = 0.0
    """When it was elected, by the leader's clock."""
    term: int = 0
    """0: not known here."""


class GroupRow(Struct, kw_only=True):
    group: str
    state: str
    """empty, resident, held or swapping."""
    job: str
    epoch: int
    since: float
    policy: str
    swaps: int
    moved: int
    held_s: float
    """Sum over all leases that ended."""
    waiting: list[str]
    admission: str
    """off, warn or enforce."""
    verdicts: list[str]
    """The latest of admission, in prose, the oldest first."""
    jobs: list[JobRow]
    nodes: list[NodeRow]
    trouble: list[str]
    """What somebody should look at, in prose."""


def seats(known: Iterable[pb.OrchestratorStatus], now: float) -> list[SeatRow]:
    return [
        SeatRow(address=one.address, leads=one.leads, since=now - one.since_s, term=one.term) for one in known
    ]


def leadership(known: Sequence[pb.OrchestratorStatus], *, times: bool = True) -> str:
    """Who leads and who stands by; empty where there can be only one. ``times``: of a picture that is looked
    at when it is made."""
    if not known:
        return ""
    said = []
    for one in known:
        if one.leads:
            since = f" for {one.since_s:.0f} s" if times else ""
            left = f", lease {one.lease_left_s:.1f} s left" if times else ""
            said.append(f"{one.address} leads{since} (term {one.term}{left})")
    others = [one.address for one in known if not one.leads]
    said.append(f"standing by: {', '.join(others) or 'nobody'}")
    return "; ".join(said)


def row(group: pb.GroupStatus) -> GroupRow:
    jobs, nodes = _jobs(group), [_node(node) for node in group.nodes]
    return GroupRow(
        group=group.group,
        state=group.state,
        job=group.job,
        epoch=group.epoch,
        since=group.since,
        policy=group.policy,
        swaps=group.swaps,
        moved=group.bytes_moved,
        held_s=group.held_s,
        waiting=[waiter.job for waiter in group.waiters],
        admission=group.admission.mode,
        verdicts=list(group.admission.decisions),
        jobs=jobs,
        nodes=nodes,
        trouble=[*(said for job in jobs for said in _wrong(job)), *_wrong_nodes(nodes)],
    )


def _jobs(group: pb.GroupStatus) -> list[JobRow]:
    rows: dict[str, JobRow] = {}

    def of(job: str) -> JobRow:
        return rows.setdefault(job, JobRow(job=job))

    for job in group.jobs:
        one = of(job.job)
        one.fault = job.fault
        if job.HasField("lost_left_s"):
            one.lost_left_s = job.lost_left_s
    where: dict[str, list[str]] = {}
    for node in group.nodes:
        for context in node.contexts:
            of(context.job).bytes += context.bytes
            beside = f" on {node.node}" if len(group.nodes) > 1 else ""
            where.setdefault(context.job, []).append(f"{_word(context)}{beside}")
    for name, words in where.items():
        rows[name].where = ", ".join(words)
    for place, waiter in enumerate(group.waiters, 1):
        one = of(waiter.job)
        one.place, one.waited_s, one.reason = place, waiter.waited_s, waiter.reason
        one.lock = "frozen in a phase" if waiter.frozen else ""
    for member in group.admission.members:
        if member.state != "seated" or member.job in rows:
            one = of(member.job)
            one.slowdown = member.slowdown
            if member.state != "seated":
                one.door, one.door_reason = _at_door(member), member.reason
    if group.state != "empty" and group.job in rows and not rows[group.job].lock:
        rows[group.job].lock = group.state
    return list(rows.values())


def _word(context: pb.Context) -> str:
    if context.state == pb.LOST and context.reason:
        return f"lost: {context.reason}"
    return pb.ContextState.Name(context.state).lower()


def _at_door(member: pb.AdmissionMember) -> str:
    if member.state == "judged":
        return "admission warns"
    queued = f" for {member.queued_s:.0f} s" if member.queued_s else ""
    return f"admission: {member.state}{queued}"


def _node(node: pb.NodeStatus) -> NodeRow:
    return NodeRow(
        node=node.node,
        attached=node.attached,
        accelerator=node.accelerator,
        device_used=node.device_used_bytes,
        device_budget=node.device_budget_bytes,
        host_used=node.host_used_bytes,
        host_budget=node.host_budget_bytes,
        disk_used=node.disk_used_bytes,
        disk_budget=node.disk_budget_bytes,
        short=node.host_held_bytes > PRESSURE * node.host_budget_bytes > 0,
        out=_out(node),
        drained=drained(node),
    )


def _out(node: pb.NodeStatus) -> str:
    if not node.HasField("drained"):
        return ""
    return "draining" if node.drained.holder or node.drained.moving else "drained"


def drained(node: pb.NodeStatus) -> str:
    if not node.HasField("drained"):
        return ""
    out = node.drained
    why = f" ({out.reason})" if out.reason else ""
    left = f"; {out.holder} finishes its turn" if out.holder else "; state is moving" if out.moving else ""
    return f"drained by {out.by}{why}{left}"


def _wrong(job: JobRow) -> list[str]:
    said = []
    if job.fault:
        said.append(f"{job.job} is faulted: {job.fault}")
    if job.lost_left_s is not None:
        said.append(f"{job.job}: connection lost, {job.lost_left_s:.0f} s left")
    if job.lock.startswith("frozen"):
        said.append(f"{job.job} is {job.lock}")
    if job.door and not job.door.endswith("probation"):
        said.append(f"{job.job}: {job.door}" + (f": {job.door_reason}" if job.door_reason else ""))
    return said


def _wrong_nodes(nodes: list[NodeRow]) -> list[str]:
    away = [f"node {node.node}: no agent attached" for node in nodes if not (node.attached or node.drained)]
    return [*away, *(f"node {node.node}: host memory is short" for node in nodes if node.short)]
