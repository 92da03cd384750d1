"""The core's words ↔ the wire's, for the agent. Nothing is decided here."""

from coslice.agent.discovery.survey import Survey
from coslice.agent.occupancy import Occupancy
from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.ids import GroupId
from coslice.wire.v1 import coslice_pb2 as pb

_STATES: dict[ev.ContextState, pb.ContextState.ValueType] = {
    ev.ContextState.LIVE: pb.LIVE,
    ev.ContextState.LEAVING: pb.LEAVING,
    ev.ContextState.SAVED: pb.SAVED,
    ev.ContextState.RETURNING: pb.RETURNING,
    ev.ContextState.LOST: pb.LOST,
}


def context_to_pb(fact: ev.ContextFact) -> pb.Context:
    return pb.Context(
        job=fact.job,
        state=_STATES[fact.state],
        bytes=fact.bytes,
        pids=fact.pids,
        reason=fact.reason,
        incarnation=fact.incarnation,
        whole=fact.whole,
        crowded=fact.crowded,
    )


def residency_to_pb(group: GroupId, facts: ev.NodeFacts, reason: str = "") -> pb.Residency:
    return pb.Residency(
        group=group,
        version=facts.version,
        contexts=[context_to_pb(fact) for fact in facts.contexts],
        device_budget_bytes=facts.device_budget,
        device_used_bytes=facts.device_used,
        host_budget_bytes=facts.host_budget,
        host_used_bytes=facts.host_used,
        host_held_bytes=facts.host_held,
        disk_budget_bytes=facts.disk_budget,
        disk_used_bytes=facts.disk_used,
        reason=reason,
        ended=[
            pb.EndedProcess(job=e.job, incarnation=e.incarnation, pid=e.pid, start_time=e.start_time)
            for e in facts.ended
        ],
    )


def accelerators_to_pb(survey: Survey, occupancy: Occupancy) -> list[pb.Accelerator]:
    return [
        pb.Accelerator(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            total_bytes=gpu.total,
            used_bytes=gpu.used,
            occupants=[
                pb.Occupant(pid=each.pid, bytes=each.bytes or 0, job=occupancy.job_of(each.pid) or "")
                for each in gpu.holders
            ],
            ecc_uncorrected=gpu.ecc_uncorrected or 0,
            last_xid=occupancy.last_xid(gpu.uuid),
            mig=gpu.mig,
            persistence=bool(gpu.persistence),
        )
        for gpu in survey.gpus
    ]


def done_to_pb(group: GroupId, effect: fx.ReportDone, residency: pb.Residency) -> pb.AgentMessage:
    return pb.AgentMessage(
        done=pb.OpDone(
            op=effect.op,
            group=group,
            epoch=effect.epoch,
            restored=effect.restored,
            bytes_in=effect.bytes_in,
            bytes_out=effect.bytes_out,
            seconds=effect.seconds,
            reason=effect.reason,
            residency=residency,
        )
    )


def failed_to_pb(group: GroupId, effect: fx.ReportFailed, residency: pb.Residency) -> pb.AgentMessage:
    return pb.AgentMessage(
        failed=pb.OpFailed(
            op=effect.op,
            group=group,
            epoch=effect.epoch,
            culprit=effect.culprit,
            stuck=effect.stuck,
            pid=effect.pid,
            reason=effect.reason,
            residency=residency,
        )
    )


def refusal_code(name: str) -> pb.Code.ValueType:
    """A core's refusal on the wire: same names, in capitals."""
    return pb.Code.Value(name.upper()) if name.upper() in pb.Code.keys() else pb.FAILED  # noqa: SIM118
