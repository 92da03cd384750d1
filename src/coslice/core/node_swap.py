"""One node's part of a swap: what leaves, and when the restore may start.

``advance`` is called by ``core.context`` after every event that leaves nobody in transit, and takes the
running operation as far as it goes without an answer from outside. It knows figures and answers, not how
state is moved or who waits for it. One rule is kept here and nowhere else: no restore begins without room for
all that the job needs.
"""

from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core.effects import ReasonCode
from coslice.core.holdings import (
    MIB,
    Context,
    Effort,
    Holdings,
    Leaving,
    Live,
    Lost,
    Operation,
    Partly,
    Saved,
    around,
    fit_text,
    fits_beside,
    lacking,
    mib,
    need_and_room,
    residuals,
    saved_bytes,
    taken,
)
from coslice.core.node_leaving import try_snapshot
from coslice.core.node_returning import try_restore
from coslice.core.node_turn import NodeTurn, fail, pid_of

SPARE_PERCENT = 6
"""More than lacks is asked of a second part: a snapshot counts when 95 % of its bytes are free."""
LEAST_AGAIN = 16
"""A second part has a sixteenth of what has left already at least, so that parts come to an end."""
_EVICT, _FITS, _NODE_READY = ReasonCode.EVICT, ReasonCode.FITS, ReasonCode.NODE_READY


def advance(turn: NodeTurn) -> None:
    """Nobody is in transit."""
    while True:
        held = turn.holdings
        if held.running is not None:
            if not _next_move(turn, held, held.running):
                return
        elif held.queued is not None:
            begun = replace(held.queued, begun=turn.at)
            turn.holdings = replace(held, running=begun, queued=None)
        else:
            return


def _next_move(turn: NodeTurn, held: Holdings, op: Operation) -> bool:
    """Begin whatever comes next; False if only an answer, room or a deadline can help."""
    context, beside = around(held, op.job)
    if context is not None and op.need > context.need:
        turn.put(replace(context, need=op.need))
        return True
    need = room = 0  # no figure counts where the size of the device is not known
    if held.device_budget:
        need, room = need_and_room(held, context, op.need)
        if room > held.device_budget:
            return _no_room(turn, op, room, beside=0)
    if beside and (evictee := _to_evict(held, op, need, beside)) is not None:
        return _evict(turn, op, evictee, need, beside)
    if context is None or not _must_return(context):
        _done(turn, op, context, need, beside)
        return True
    if not fits_beside(held, op.job, room, beside):
        return _await_room(turn, op, room)
    try_restore(turn, op, context)
    return False


def _must_return(context: Context) -> bool:
    place = context.place
    if type(place) is Live:
        return not place.whole
    return type(place) is Saved or type(place) is Partly


def _to_evict(held: Holdings, op: Operation, need: int, beside: list[Context]) -> Context | None:
    """The least recently used job that has to go, if any. An unknown figure means that it cannot stay."""
    frozen = next((c for c in beside if c.job in op.freeze), None) if op.freeze else None
    if frozen is not None:
        return frozen
    if fits_beside(held, op.job, need, beside):
        return None
    known = need and held.device_budget
    unknown = next((c for c in beside if not taken(held, c)), None) if known else None
    return unknown or beside[0]


def _evict(turn: NodeTurn, op: Operation, evictee: Context, need: int, beside: list[Context]) -> bool:
    """False: it is on its way out, and only an answer or a deadline can help."""
    held, place, size = turn.holdings, evictee.place, evictee.bytes
    if type(place) is Lost:
        return _evict_lost(turn, op, evictee, place)
    least = _part(held, op, evictee, need, beside)
    if held.host_budget:
        leaving = least or (size - place.saved if type(place) is Partly else size)
        kept, leaving = saved_bytes(held), min(leaving, evictee.kept)
        if kept + leaving > held.host_budget:
            text = (
                f"no room in host memory for {mib(leaving)} of {evictee.job} beside {mib(kept)} saved: "
                f"the budget is {mib(held.host_budget)}; give the agent a larger one"
            )
            fail(turn, op, ReasonCode.NO_ROOM, text, culprit=op.job)
            return True
    what = f"{mib(least)} of {mib(size)}" if least else mib(size)
    turn.say(_EVICT, f"moving {evictee.job} out ({what}): {_why(held, op, evictee, need)}")
    assert type(place) is Live or type(place) is Partly
    touched = type(place) is Partly or not place.whole
    try_snapshot(turn, op.op, evictee, 1, touched=touched, least=least)
    return False


def _why(held: Holdings, op: Operation, evictee: Context, need: int) -> str:
    if evictee.job in op.freeze:
        return "it is frozen in the middle of a phase"
    if not held.device_budget:
        return "the size of the device is not known, so one job at a time"
    if need:
        return f"{op.job} needs {mib(need)} of {mib(held.device_budget)}"
    return f"the need of {op.job} is not known"


def _part(held: Holdings, op: Operation, evictee: Context, need: int, beside: list[Context]) -> int:
    """How many bytes of it are enough; 0: all must go.

    First exactly what lacks. What allocators kept of that is known afterwards, by measure: if there is still
    no room, another part follows, with some to spare.
    """
    lack = lacking(held, op.job, need, beside) if need and evictee.divisible else 0
    if not lack or evictee.job in op.freeze:
        return 0
    place = evictee.place
    if type(place) is not Partly and place != Live():
        return 0
    saved = place.saved if type(place) is Partly else 0
    if evictee.job in op.evicted:
        lack = max(lack + lack * SPARE_PERCENT // 100 + MIB, saved // LEAST_AGAIN)
    return lack if lack < evictee.bytes - saved else 0


def _evict_lost(turn: NodeTurn, op: Operation, evictee: Context, place: Lost) -> bool:
    """What is left on the device of a job whose state is gone; only the end of its processes frees it."""
    text = f"{evictee.job} is lost ({place.reason}), and its processes keep {mib(evictee.use)} on the device"
    rules = turn.holdings.rules
    if rules.on_stuck == "wait":
        fail(turn, op, ReasonCode.BLOCKED, text, culprit=evictee.job, stuck=True, pid=pid_of(evictee))
        return True
    turn.say(ReasonCode.BLOCKED, f"{text}; they are killed in {rules.stuck_grace:g} s")
    until = turn.at + rules.stuck_grace
    leaving = Leaving(of=(), attempt=0, effort=Effort.PAUSING, until=until, stuck_since=turn.at, reason=text)
    turn.put(replace(evictee, place=leaving))
    return False


def _no_room(turn: NodeTurn, op: Operation, need: int, *, beside: int) -> bool:
    rest = f" beside {mib(beside)} that parked processes leave there" if beside else ""
    text = (
        f"{op.job} needs {mib(need)}, the device has {mib(turn.holdings.device_budget)}{rest}: "
        "make the job smaller, or give the group a larger device budget"
    )
    fail(turn, op, ReasonCode.NO_ROOM, text, culprit=op.job)
    return True


def _await_room(turn: NodeTurn, op: Operation, need: int) -> bool:
    """Everybody has left and it still does not fit: parked processes may give back more, for a while."""
    left = residuals(turn.holdings, but=op.job)
    if op.room_by is None:
        wait = turn.holdings.rules.room_wait
        turn.say(ReasonCode.NO_ROOM, f"{op.job} waits up to {wait:g} s for {mib(left)} that parked jobs left")
        turn.amend(room_by=turn.at + wait)
        return False
    return turn.at >= op.room_by and _no_room(turn, op, need, beside=left)


def _done(turn: NodeTurn, op: Operation, context: Context | None, need: int, beside: list[Context]) -> None:
    held = turn.holdings
    text, code = _outcome(held, op, context, need, beside)
    turn.say(code, text)
    report = fx.ReportDone(
        op=op.op,
        epoch=op.epoch,
        restored=op.restored,
        bytes_in=op.bytes_in,
        bytes_out=op.bytes_out,
        seconds=turn.at - op.begun if turn.at > op.begun else 0.0,
        reason=text,
    )
    recent, here = [op.job], {c.job for c in held.contexts}
    for job in held.recent:
        if job != op.job and job in here:
            recent.append(job)
    turn.holdings = replace(held, running=None, finished=report, recent=tuple(recent))
    turn.effects.append(report)


def _outcome(
    held: Holdings, op: Operation, context: Context | None, need: int, beside: list[Context]
) -> tuple[str, ReasonCode]:
    parts = []
    if op.evicted:
        parts.append(f"moved {', '.join(op.evicted)} out ({mib(op.bytes_out)})")
    if op.restored:
        parts.append(f"moved {op.job} in ({mib(op.bytes_in)})")
    elif context is None:
        parts.append(f"nothing of {op.job} is here to move in")
    elif type(context.place) is Lost:
        parts.append(f"{op.job} starts afresh: its state was lost ({context.place.reason})")
    else:
        parts.append(f"{op.job} is already resident")
    if beside:
        parts.append(fit_text(held, op.job, need, beside))
    return "; ".join(parts), _FITS if beside else _NODE_READY
