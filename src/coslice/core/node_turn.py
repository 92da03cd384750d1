"""One step of a node's holdings in the making, and the few edits that several parts of it share.

Used only inside ``core``, within a single call of ``context.step``; from outside, that is a pure function.
"""

from msgspec import Struct
from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core.effects import Reason, ReasonCode
from coslice.core.holdings import (
    Context,
    Effort,
    Holdings,
    Leaving,
    Lost,
    Operation,
    Returning,
    in_transit,
    placed,
)
from coslice.core.ids import JobId


class NodeTurn(Struct, gc=False):
    """One step in the making. Lives within a single call of ``context.step``, which is pure from outside."""

    holdings: Holdings
    at: float
    effects: list[fx.NodeEffect] = []
    reasons: list[Reason] = []

    def set(self, **changes: object) -> None:
        self.holdings = replace(self.holdings, **changes)

    def say(self, code: ReasonCode, text: str) -> None:
        self.reasons.append(Reason(code, text))

    def put(self, context: Context) -> None:
        held = self.holdings
        self.holdings = replace(held, contexts=placed(held, context))

    def remove(self, job: JobId) -> None:
        self.set(contexts=tuple(c for c in self.holdings.contexts if c.job != job))

    def amend(self, **changes: object) -> None:
        """Change the running operation."""
        assert self.holdings.running is not None
        self.set(running=replace(self.holdings.running, **changes))


def asked(holdings: Holdings) -> tuple[fx.NodeEffect, ...]:
    """What the backend is (or should be) doing, if all processes it takes are there."""
    moving, op = in_transit(holdings), holdings.running
    if moving is None or op is None or not moving.ready:
        return ()
    match moving.place:
        case Leaving(effort=Effort.TRYING, attempt=attempt, least=least):
            return (fx.RunSnapshot(op=op.op, job=moving.job, attempt=attempt, least=least),)
        case Returning(effort=Effort.TRYING, attempt=attempt):
            return (fx.RunRestore(op=op.op, job=moving.job, attempt=attempt),)
        case _:
            return ()


def lose(turn: NodeTurn, context: Context, reason: str, *, members: bool = True) -> None:
    """Nothing of the job can be restored any more. Its processes may still be there, and on the device."""
    turn.say(ReasonCode.LOST, f"the state of {context.job} is lost: {reason}")
    kept = context.members if members else ()
    use = max(context.use, context.bytes) if type(context.place) is Returning else context.use
    turn.put(replace(context, place=Lost(reason), members=kept, use=use if kept else 0))
    turn.effects.append(fx.FreeBuffers(job=context.job, members=tuple(m.id for m in context.members)))


def fail(
    turn: NodeTurn,
    op: Operation,
    code: ReasonCode,
    text: str,
    *,
    culprit: JobId,
    stuck: bool = False,
    pid: int = 0,
) -> None:
    turn.say(code, text)
    report = fx.ReportFailed(op=op.op, epoch=op.epoch, culprit=culprit, stuck=stuck, pid=pid, reason=text)
    turn.set(running=None, finished=report)
    turn.effects.append(report)


def evicted(op: Operation, job: JobId, moved: int) -> Operation:
    """``job`` has left the device, by ``moved`` bytes into host memory or for good."""
    jobs = op.evicted if job in op.evicted else (*op.evicted, job)
    return replace(op, evicted=jobs, bytes_out=op.bytes_out + moved)


def pid_of(context: Context) -> int:
    return context.members[0].pid if context.members else 0
