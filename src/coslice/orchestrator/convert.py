"""Messages of the wire ↔ the core's words. Pure; says no to what is malformed, decides nothing else.

Whatever arrives is checked here, so behind this module every name is well-formed and no number is negative.
"""

from msgspec import Struct
from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.ids import (
    Epoch,
    GroupId,
    Incarnation,
    JobId,
    NodeId,
    OpId,
    RequestId,
    SessionId,
    check_name,
)
from coslice.core.outcome import Rejected
from coslice.profile.model import Profile, decode_profile
from coslice.security import fingerprint
from coslice.security.redact import redact
from coslice.wire.v1 import coslice_pb2 as pb

_STATE_OF: dict[pb.ContextState.ValueType, ev.ContextState] = {
    pb.LIVE: ev.ContextState.LIVE,
    pb.LEAVING: ev.ContextState.LEAVING,
    pb.SAVED: ev.ContextState.SAVED,
    pb.RETURNING: ev.ContextState.RETURNING,
    pb.LOST: ev.ContextState.LOST,
}
_WIRE_STATE = {state: wire for wire, state in _STATE_OF.items()}
_MAX_TOKEN = 200
_MAX_PROFILE = 64 << 10


class Identity(Struct, frozen=True, kw_only=True):
    """Who speaks on a session's stream. Its secrets end here: behind the edge there are fingerprints only."""

    job: JobId
    incarnation: Incarnation
    session: SessionId
    node: str
    pid: int
    start_time: int
    rank: int
    profile: Profile | None = None
    """What the job says that it will do."""


def token(kind: str, text: str) -> str:
    """An id that a client made up (session, request, incarnation). Raises ``ValueError``."""
    if not text or len(text) > _MAX_TOKEN or not text.isprintable():
        raise ValueError(f"{text[:50]!r} is not a {kind} id: use 1 to {_MAX_TOKEN} printable characters")
    return text


def scoped(session: SessionId, request: str) -> RequestId:
    """A request as the core knows it: no session can name another's. Raises ``ValueError``."""
    return RequestId(f"{session}/{token('request', request)}")


def unscoped(request: RequestId) -> str:
    """The request as its client named it."""
    return request.partition("/")[2]


def identity(hello: pb.Hello) -> Identity:
    """Raises ``ValueError`` naming the field that is malformed."""
    if hello.incarnation:  # callers without one join whoever runs under the same job id
        token("incarnation", hello.incarnation)
    return Identity(
        job=JobId(check_name("job", hello.job)),
        incarnation=Incarnation(fingerprint.incarnation(hello.incarnation)),
        session=SessionId(fingerprint.session(token("session", hello.session))),
        node=hello.node[:_MAX_TOKEN],
        pid=hello.pid,
        start_time=hello.start_time,
        rank=hello.rank,
        profile=_profile(hello.profile),
    )


def _profile(text: str) -> Profile | None:
    if not text:
        return None
    if len(text) > _MAX_PROFILE:
        raise ValueError(f"a profile of {len(text)} characters: at most {_MAX_PROFILE} (a few dozen cycles)")
    return decode_profile(text.encode(), path="the profile of the hello")


def acquire_event(who: Identity, message: pb.Acquire, *, at: float, more: bool) -> ev.AcquireRequested:
    """Raises ``ValueError``."""
    if message.world < 0 or message.need_bytes < 0:
        raise ValueError("world and need_bytes count processes and bytes: they cannot be negative")
    return ev.AcquireRequested(
        at=at,
        job=who.job,
        incarnation=who.incarnation,
        session=who.session,
        request=scoped(who.session, message.request),
        world=message.world,
        need=message.need_bytes,
        more=more,
        phase=redact(message.phase[:_MAX_TOKEN]),
        node=who.node,
        pid=who.pid,
        start_time=who.start_time,
    )


# ── answers to a client ────────────────────────────────────────────────────


def lease(group: GroupId, grant: fx.Grant) -> pb.Lease:
    return pb.Lease(
        group=group,
        epoch=grant.epoch,
        restored=grant.restored,
        waited_s=grant.waited,
        bytes_in=grant.bytes_in,
        bytes_out=grant.bytes_out,
        reason=grant.reason.text,
    )


def granted(request: RequestId, leases: list[pb.Lease]) -> pb.ServerMessage:
    return pb.ServerMessage(granted=pb.Granted(request=unscoped(request), leases=leases))


def refused(request: str, code: pb.Code.ValueType, message: str, **data: str) -> pb.ServerMessage:
    return pb.ServerMessage(refused=pb.Refused(request=request, code=code, message=message, data=data))


def code_named(name: str) -> pb.Code.ValueType:
    """The wire's code of the same name as the core's; ``FAILED`` for one that the wire does not have."""
    value = pb.Code.DESCRIPTOR.values_by_name.get(name.upper())
    return pb.FAILED if value is None else pb.Code.Value(value.name)


def rejection(request: str, error: Rejected) -> pb.ServerMessage:
    return refused(request, code_named(error.code), str(error), **error.data)


def refusal(group: GroupId, job: JobId, effect: fx.Refuse) -> pb.ServerMessage:
    return refused(unscoped(effect.request), code_named(effect.code), effect.reason, group=group, job=job)


def lease_lost(group: GroupId, effect: fx.LoseLease) -> pb.ServerMessage:
    return pb.ServerMessage(lease_lost=pb.LeaseLost(group=group, epoch=effect.epoch, reason=effect.reason))


def should_yield(group: GroupId, effect: fx.AskYield) -> pb.ServerMessage:
    return pb.ServerMessage(
        should_yield=pb.ShouldYield(
            group=group, epoch=effect.epoch, waiting=effect.waiting, longest_wait_s=effect.longest_wait
        )
    )


# ── what agents say ────────────────────────────────────────────────────────


def facts(residency: pb.Residency, accelerator: str) -> ev.NodeFacts:
    contexts = tuple(
        ev.ContextFact(
            job=JobId(context.job),
            state=_STATE_OF[context.state],
            bytes=context.bytes,
            pids=tuple(context.pids),
            incarnation=Incarnation(context.incarnation),
            reason=context.reason,
            whole=context.whole,
            crowded=context.state == pb.LEAVING and (context.crowded or _crowded_in_prose(context.reason)),
        )
        for context in residency.contexts
        if context.state in _STATE_OF
    )
    return ev.NodeFacts(
        version=residency.version,
        contexts=contexts,
        ended=tuple(
            ev.EndedProcess(
                job=JobId(e.job), incarnation=Incarnation(e.incarnation), pid=e.pid, start_time=e.start_time
            )
            for e in residency.ended
        ),
        device_budget=residency.device_budget_bytes,
        device_used=residency.device_used_bytes,
        host_budget=residency.host_budget_bytes,
        host_used=residency.host_used_bytes,
        host_held=residency.host_held_bytes,
        disk_budget=residency.disk_budget_bytes,
        disk_used=residency.disk_used_bytes,
        accelerator=accelerator,
    )


def recalled(known: ev.NodeFacts) -> ev.NodeFacts:
    """Facts out of a store, as an agent of today says them."""
    contexts = tuple(
        replace(c, crowded=True) if c.state is ev.ContextState.LEAVING and _crowded_in_prose(c.reason) else c
        for c in known.contexts
    )
    return replace(known, contexts=contexts)


def _crowded_in_prose(reason: str) -> bool:
    """Coslice of before ``crowded`` says it here only."""
    return reason.startswith("on the device beside ")


def op_succeeded(message: pb.OpDone, node: NodeId, accelerator: str, *, at: float) -> ev.OpSucceeded:
    return ev.OpSucceeded(
        at=at,
        op=OpId(message.op),
        node=node,
        restored=message.restored,
        bytes_in=message.bytes_in,
        bytes_out=message.bytes_out,
        seconds=message.seconds,
        reason=message.reason,
        facts=facts(message.residency, accelerator) if message.HasField("residency") else None,
    )


def op_failed(message: pb.OpFailed, node: NodeId, accelerator: str, *, at: float) -> ev.OpFailed:
    return ev.OpFailed(
        at=at,
        op=OpId(message.op),
        node=node,
        culprit=JobId(message.culprit),
        reason=message.reason,
        stuck=message.stuck,
        pid=message.pid,
        facts=facts(message.residency, accelerator) if message.HasField("residency") else None,
    )


def make_resident(group: GroupId, effect: fx.MakeResident, traceparent: str = "") -> pb.AgentCommand:
    return pb.AgentCommand(
        make_resident=pb.MakeResident(
            op=effect.op,
            group=group,
            epoch=effect.epoch,
            job=effect.job,
            need_bytes=effect.need,
            traceparent=traceparent,
            freeze=effect.freeze,
        )
    )


def node_status(node: NodeId, attached: bool, known: ev.NodeFacts) -> pb.NodeStatus:
    contexts = [
        pb.Context(
            job=context.job,
            state=_WIRE_STATE[context.state],
            bytes=context.bytes,
            pids=context.pids,
            reason=context.reason,
            incarnation=context.incarnation,
            whole=context.whole,
            crowded=context.crowded,
        )
        for context in known.contexts
    ]
    return pb.NodeStatus(
        node=node,
        attached=attached,
        contexts=contexts,
        device_budget_bytes=known.device_budget,
        device_used_bytes=known.device_used,
        host_budget_bytes=known.host_budget,
        host_used_bytes=known.host_used,
        host_held_bytes=known.host_held,
        disk_budget_bytes=known.disk_budget,
        disk_used_bytes=known.disk_used,
        accelerator=known.accelerator,
    )


def epoch(number: int) -> Epoch:
    """Raises ``ValueError``: epochs count from 1."""
    if number < 0:
        raise ValueError(f"{number} is not an epoch")
    return Epoch(number)
