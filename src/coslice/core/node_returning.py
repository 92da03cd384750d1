"""One job on its way back onto a node: begun by ``core.node_swap``, continued by ``core.context``.

A restore that failed may have brought in a part, so the job then counts as on the device, and room is judged
again before the next attempt.
"""

from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core.effects import ReasonCode
from coslice.core.holdings import TRYING, Context, Effort, Live, Operation, Returning, mib, placed
from coslice.core.node_turn import NodeTurn, fail, lose, pid_of

_RESTORE = ReasonCode.RESTORE


def try_restore(turn: NodeTurn, op: Operation, context: Context) -> None:
    held, attempt = turn.holdings, op.restores + 1
    place = Returning(
        of=context.ids, attempt=attempt, effort=TRYING, until=turn.at + held.rules.restore_timeout
    )
    turn.holdings = replace(
        held,
        running=replace(op, restores=attempt, room_by=None),
        contexts=placed(held, replace(context, place=place)),
    )
    turn.say(_RESTORE, f"moving {context.job} in ({mib(context.bytes)})")
    if context.ready:
        turn.effects.append(fx.RunRestore(op=op.op, job=context.job, attempt=attempt))


def take_back(turn: NodeTurn, context: Context) -> None:
    """Decide once more about a restore that nobody has been asked for since the last restart."""
    op = turn.holdings.running
    assert op is not None
    turn.amend(restores=op.restores - 1)
    turn.put(replace(context, place=Live(whole=False, reason="it is not known to be back", sure=False)))


def restore_failed(
    turn: NodeTurn, context: Context, place: Returning, reason: str, *, lost: bool = False
) -> None:
    op, rules = turn.holdings.running, turn.holdings.rules
    assert op is not None
    if lost:
        text = f"the state of {context.job} is lost: {reason}"
        lose(turn, context, reason)
        return fail(turn, op, ReasonCode.LOST, text, culprit=context.job)
    if place.attempt <= rules.retries:
        turn.say(
            ReasonCode.RETRY,
            f"{context.job} did not come back ({reason}); attempt {place.attempt + 1} follows",
        )
        pause = (place.attempt - 1) * rules.retry_pause
        pausing = replace(place, effort=Effort.PAUSING, until=turn.at + pause, reason=reason)
        turn.put(replace(context, place=pausing))
        return (
            returning_overdue(turn, context, place=replace(place, effort=Effort.PAUSING))
            if pause <= 0
            else None
        )
    half = Live(whole=False, reason=f"may be half restored: {reason}", sure=False)
    turn.put(replace(context, place=half))
    text = f"{context.job} did not come back after {place.attempt} attempts: {reason}"
    return fail(turn, op, ReasonCode.JOB_FAULTED, text, culprit=context.job, pid=pid_of(context))


def returning_overdue(turn: NodeTurn, context: Context, place: Returning) -> None:
    if place.effort is TRYING:
        timeout = turn.holdings.rules.restore_timeout
        return restore_failed(turn, context, place, f"no answer within {timeout:g} s")
    # Room is judged again before the next attempt: a part may have come in.
    return turn.put(replace(context, place=Live(whole=False, reason=place.reason, sure=False)))
