"""The agent's metrics: moves by stage and backend, and what is where in device, host and disk memory.

``Meter`` is written once per move, by the group that asked for it; the rest is read when somebody asks.
"""

import os
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from coslice.agent.backends.base import MoveError, Restored, Snapshotted
from coslice.agent.buffers import HostBuffers
from coslice.core import effects as fx
from coslice.core.events import ContextState
from coslice.core.ids import GroupId
from coslice.core.node_facts import facts
from coslice.observe.metric import MAX_JOBS, OTHER, Metric, Reading, counter, histogram

if TYPE_CHECKING:
    from coslice.agent.group import ServedGroup

OPERATION = Metric(
    "coslice_agent_operation_seconds",
    "histogram",
    "From the start of a command to make a job resident to its success.",
    ("group",),
)
OPERATIONS = Metric(
    "coslice_agent_operations_total",
    "counter",
    "Commands to make a job resident, by how they ended: done or failed.",
    ("group", "outcome"),
)
STAGE = Metric(
    "coslice_agent_stage_seconds",
    "histogram",
    "One stage of a swap: snapshot or restore as a whole, and snapshot_copy or restore_copy within it.",
    ("group", "backend", "stage"),
)
MOVED = Metric(
    "coslice_agent_moved_bytes_total",
    "counter",
    "Bytes of state that a stage moved; snapshot_copy: of them, those that had to be copied.",
    ("group", "backend", "stage"),
)
FAILED = Metric(
    "coslice_agent_stage_failures_total",
    "counter",
    "Attempts of a stage that failed: busy, no_room (host memory), lost, or failed.",
    ("group", "backend", "stage", "reason"),
)
KILLED = Metric("coslice_agent_killed_jobs_total", "counter", "Jobs that were killed here.", ("group",))
PUSHED = (OPERATION, OPERATIONS, STAGE, MOVED, FAILED, KILLED)

ATTACHED = Metric("coslice_agent_attached", "gauge", "1: its stream to the orchestrator is up.")
DEVICE = Metric(
    "coslice_agent_device_bytes",
    "gauge",
    "Device memory: budget, used, and the peak so far.",
    ("group", "kind"),
)
HOST = Metric(
    "coslice_agent_host_bytes",
    "gauge",
    "Host memory for state: budget, used, and held (with content).",
    ("kind",),
)
DISK = Metric("coslice_agent_disk_bytes", "gauge", "The disk tier: budget and used.", ("kind",))
CONTEXTS = Metric("coslice_agent_contexts", "gauge", "Jobs, by where their state is.", ("group", "state"))
MEMBERS = Metric("coslice_agent_members", "gauge", "Registered processes.", ("group",))
JOB = Metric(
    "coslice_agent_job_bytes", "gauge", "State of a job, by where it is.", ("group", "job_id", "state")
)
BUSY = Metric(
    "coslice_agent_device_busy_seconds_total",
    "counter",
    "Time the device computed, by the kernel's account; mean of its cores. Host accelerators only.",
    ("group",),
)
OF_NODE = (ATTACHED, DEVICE, HOST, DISK, CONTEXTS, MEMBERS, JOB, BUSY)
UNKNOWN = "unknown"
_TICKS = os.sysconf("SC_CLK_TCK")


class Meter:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._operation, self._stage = histogram(OPERATION, registry), histogram(STAGE, registry)
        self._moved, self._failed, self._killed, self._operations = (
            counter(m, registry) for m in (MOVED, FAILED, KILLED, OPERATIONS)
        )

    def snapshotted(self, group: GroupId, backend: str, done: Snapshotted) -> None:
        self._moves(group, backend, "snapshot", done.seconds, done.bytes)
        self._moves(group, backend, "snapshot_copy", done.copy_seconds, done.copied)

    def restored(self, group: GroupId, backend: str, done: Restored) -> None:
        self._moves(group, backend, "restore", done.seconds, done.bytes)
        self._moves(group, backend, "restore_copy", done.copy_seconds, 0)

    def failed(self, group: GroupId, backend: str, stage: str, error: Exception) -> None:
        self._failed.labels(group, backend, stage, _why(error)).inc()

    def reported(self, group: GroupId, report: fx.ReportDone | fx.ReportFailed) -> None:
        if isinstance(report, fx.ReportDone):
            self._operation.labels(group).observe(report.seconds)
        self._operations.labels(group, "done" if isinstance(report, fx.ReportDone) else "failed").inc()

    def killed(self, group: GroupId) -> None:
        self._killed.labels(group).inc()

    def _moves(self, group: GroupId, backend: str, stage: str, seconds: float, size: int) -> None:
        if not seconds and not size:
            return
        self._stage.labels(group, backend, stage).observe(seconds)
        if size:
            self._moved.labels(group, backend, stage).inc(size)


def _why(error: Exception) -> str:
    if not isinstance(error, MoveError):
        return "failed"
    return "busy" if error.busy else "no_room" if error.no_room else "lost" if error.lost else "failed"


# ── read when somebody asks ────────────────────────────────────────────────


def of_node(
    groups: Iterable["ServedGroup"],
    buffers: HostBuffers,
    *,
    attached: bool,
    stat: Callable[[], str] = Path("/proc/stat").read_text,
) -> Iterator[Reading]:
    yield ATTACHED, (), attached
    for kind, size in (("budget", buffers.budget), ("used", buffers.used), ("held", buffers.held)):
        yield HOST, (kind,), size
    disk = buffers.disk
    yield DISK, ("budget",), disk.budget if disk is not None else 0
    yield DISK, ("used",), disk.used if disk is not None else 0
    room = MAX_JOBS
    for group in groups:
        yield from _of_group(group)
        for reading in _of_jobs(group, room):
            room -= reading[1][1] != OTHER
            yield reading
        if group.devices.accelerator == "host" and group.devices.cpus:
            yield BUSY, (group.id,), busy_seconds(group.devices.cpus, stat())


def _of_group(group: "ServedGroup") -> Iterator[Reading]:
    device = group.device_status()
    for kind, size in (
        ("budget", device.budget_bytes), ("used", device.used_bytes), ("peak", device.peak_bytes)
    ):  # fmt: skip
        yield DEVICE, (group.id, kind), size
    here = facts(group.driver.state).contexts
    tally = Tally(context.state for context in here)
    for state in ContextState:
        yield CONTEXTS, (group.id, state.value), tally[state]
    yield MEMBERS, (group.id,), sum(len(context.members) for context in group.driver.state.contexts)


def _of_jobs(group: "ServedGroup", room: int) -> Iterator[Reading]:
    rest: Tally[str] = Tally()
    for number, context in enumerate(facts(group.driver.state).contexts):
        if number < room:
            yield JOB, (group.id, context.job, context.state.value), context.bytes
        else:
            rest[context.state.value] += context.bytes
    for state, size in rest.items():
        yield JOB, (group.id, OTHER, state), size


def busy_seconds(cpus: Iterable[int], stat: str) -> float:
    """Time in user, nice and system mode since boot (proc(5), /proc/stat), the mean of these cores."""
    wanted = {f"cpu{cpu}" for cpu in cpus}
    found = []
    for line in stat.splitlines():
        name, *fields = line.split()
        if name in wanted:
            found.append(sum(int(field) for field in fields[:3]) / _TICKS)
    return sum(found) / len(found) if found else 0.0
