"""One job on its way out of a node: attempts, pauses between them, and what follows if it does not leave.

Called by ``core.node_swap`` to begin, and by ``core.context`` with answers and deadlines. Whoever could not
be moved out counts in full until it is known to have left; who waits meanwhile is not seen from here.
"""

from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core.effects import ReasonCode
from coslice.core.holdings import TRYING, Context, Effort, Leaving, Live, Lost, Partly
from coslice.core.ids import OpId
from coslice.core.node_turn import NodeTurn, fail, pid_of


def try_snapshot(
    turn: NodeTurn,
    op: OpId,
    context: Context,
    attempt: int,
    *,
    touched: bool,
    least: int = 0,
    stuck_since: float | None = None,
) -> None:
    before, rules = context.place, turn.holdings.rules
    place = Leaving(
        of=context.ids,
        attempt=attempt,
        effort=TRYING,
        until=turn.at + rules.snapshot_timeout if stuck_since is None else stuck_since + rules.stuck_grace,
        stuck_since=stuck_since,
        touched=touched,
        least=least,
        saved=before.saved if type(before) is Partly or type(before) is Leaving else 0,
        reason=before.reason if type(before) is Leaving else "",
    )
    turn.put(replace(context, place=place))
    if context.ready:
        turn.effects.append(fx.RunSnapshot(op=op, job=context.job, attempt=attempt, least=least))


def snapshot_failed(
    turn: NodeTurn,
    context: Context,
    place: Leaving,
    reason: str,
    *,
    busy: bool = False,
    no_room: bool = False,
) -> None:
    """Try again; then, as the rules say, ask a while longer and kill, or give up in favour of the evictee."""
    op, rules = turn.holdings.running, turn.holdings.rules
    assert op is not None
    place = replace(place, reason=reason, touched=place.touched or not (busy or no_room))
    if no_room:
        turn.put(replace(context, place=_stays(place)))
        return fail(turn, op, ReasonCode.NO_ROOM, f"{context.job} cannot be saved: {reason}", culprit=op.job)
    if place.attempt <= rules.retries:
        turn.say(
            ReasonCode.RETRY, f"{context.job} did not leave ({reason}); attempt {place.attempt + 1} follows"
        )
        return _pause(turn, context, place, (place.attempt - 1) * rules.retry_pause)
    if rules.on_stuck == "wait":
        turn.put(replace(context, place=_stays(place)))
        text = f"{context.job} does not leave the device after {place.attempt} attempts: {reason}"
        return fail(turn, op, ReasonCode.BLOCKED, text, culprit=context.job, stuck=True, pid=pid_of(context))
    since = turn.at if place.stuck_since is None else place.stuck_since
    left = since + rules.stuck_grace - turn.at
    place = replace(place, stuck_since=since)
    if left <= 0:
        return kill(turn, context, place)
    turn.say(
        ReasonCode.BLOCKED, f"{context.job} does not leave the device: {reason}; it is killed in {left:.0f} s"
    )
    return _pause(turn, context, place, min(rules.stuck_pause, left))


def _pause(turn: NodeTurn, context: Context, place: Leaving, pause: float) -> None:
    turn.put(replace(context, place=replace(place, effort=Effort.PAUSING, until=turn.at + pause)))
    if pause <= 0:
        leaving_overdue(turn, context, replace(place, effort=Effort.PAUSING, until=turn.at))


def leaving_overdue(turn: NodeTurn, context: Context, place: Leaving) -> None:
    """The time of the present effort is up."""
    op, rules = turn.holdings.running, turn.holdings.rules
    assert op is not None
    grace_over = place.stuck_since is not None and turn.at >= place.stuck_since + rules.stuck_grace
    match place.effort:
        case Effort.TRYING | Effort.PAUSING if grace_over:
            return kill(turn, context, place)
        case Effort.TRYING:
            return snapshot_failed(turn, context, place, f"no answer within {rules.snapshot_timeout:g} s")
        case Effort.PAUSING:
            again = replace(context, place=place)
            return try_snapshot(
                turn,
                op.op,
                again,
                place.attempt + 1,
                touched=place.touched,
                least=place.least,
                stuck_since=place.stuck_since,
            )
        case Effort.KILLING:
            stays: Live | Lost = _stays(replace(place, touched=True)) if place.of else Lost(place.reason)
            turn.put(replace(context, place=stays))
            text = (
                f"{context.job} was killed but is still there after {rules.kill_timeout:g} s ({place.reason})"
            )
            return fail(
                turn, op, ReasonCode.BLOCKED, text, culprit=context.job, stuck=True, pid=pid_of(context)
            )


def kill(turn: NodeTurn, context: Context, place: Leaving) -> None:
    reason = f"{context.job} could not be moved out: {place.reason}"
    turn.say(ReasonCode.KILLED, f"killing {reason}")
    until = turn.at + turn.holdings.rules.kill_timeout
    killing = replace(place, effort=Effort.KILLING, until=until, reason=reason)
    turn.put(replace(context, place=killing))
    turn.effects.append(fx.KillJob(job=context.job, reason=reason))


def _stays(place: Leaving) -> Live:
    if not place.touched:
        return Live()
    return Live(whole=False, reason=f"may be half moved: {place.reason}", sure=False)
