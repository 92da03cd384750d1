"""What one group of this node tells of its swaps: metrics and spans of each operation and its stages.

Called by ``ServedGroup`` where something begins and ends; costs nothing where nobody watches. A trace goes on
from the orchestrator's swap: an operation that was commanded without one has no spans.
"""

from coslice.agent.backends.base import Restored, Snapshotted
from coslice.agent.metrics import Meter
from coslice.core import effects as fx
from coslice.core.ids import GroupId, JobId, NodeId
from coslice.observe.tracing import Span, Tracing
from coslice.wire.v1 import coslice_pb2 as pb

KEPT = 4
"""Operations that may be under way: one runs, one is queued, one may just be dropped."""


class Watch:
    def __init__(self, group: GroupId, node: NodeId, meter: Meter | None, tracing: Tracing | None) -> None:
        self._group, self._node, self._meter, self._tracing = group, node, meter, tracing
        self._spans: dict[str, Span] = {}

    def commanded(self, command: pb.MakeResident) -> None:
        if self._tracing is None or not command.traceparent or command.op in self._spans:
            return
        names = {"coslice.node": self._node, "coslice.group": self._group, "coslice.job": command.job}
        self._spans[command.op] = self._tracing.begin("coslice.node", command.traceparent, names)
        while len(self._spans) > KEPT:
            oldest = next(iter(self._spans))
            self._spans.pop(oldest).end(error="a newer command took its place")

    def refused(self, op: str, why: str) -> None:
        if (span := self._spans.pop(op, None)) is not None:
            span.end(error=why)

    def reported(self, report: fx.ReportDone | fx.ReportFailed) -> None:
        if self._meter is not None:
            self._meter.reported(self._group, report)
        span = self._spans.pop(report.op, None)
        if span is not None:
            error = report.reason if isinstance(report, fx.ReportFailed) else ""
            span.end({"coslice.reason": report.reason}, error=error)

    def killed(self) -> None:
        if self._meter is not None:
            self._meter.killed(self._group)

    def stage(self, name: str, op: str, job: JobId, backend: str) -> "Stage":
        parent = self._spans.get(op)
        names = {"coslice.node": self._node, "coslice.job": job, "coslice.backend": backend}
        span = parent.child(f"coslice.{name}", names) if parent is not None else None
        return Stage(self._group, name, backend, self._meter, span)


class Stage:
    """A snapshot or a restore, from its start."""

    def __init__(
        self, group: GroupId, name: str, backend: str, meter: Meter | None, span: Span | None
    ) -> None:
        self._group, self._name, self._backend, self._meter, self._span = group, name, backend, meter, span

    def snapshotted(self, done: Snapshotted) -> None:
        if self._meter is not None:
            self._meter.snapshotted(self._group, self._backend, done)
        if self._span is not None:
            self._span.end({"coslice.bytes": done.bytes, "coslice.copied_bytes": done.copied})

    def restored(self, done: Restored) -> None:
        if self._meter is not None:
            self._meter.restored(self._group, self._backend, done)
        if self._span is not None:
            self._span.end({"coslice.bytes": done.bytes})

    def failed(self, error: Exception) -> None:
        if self._meter is not None:
            self._meter.failed(self._group, self._backend, self._name, error)
        if self._span is not None:
            self._span.end(error=str(error))
