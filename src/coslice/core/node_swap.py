"""One node's part of a swap: what leaves, when the restore may start, what happens if either does not work.

``advance`` is called after every event by ``core.context`` and takes the running operation as far as it goes
without an answer from outside. It knows figures and answers, not how state is moved or who waits for it.

Two rules are kept here and nowhere else: no restore begins without room for all that the job needs, and
whoever could not be moved out counts in full until it is known to have left.
"""

from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core.effects import ReasonCode
from coslice.core.holdings import (
    Context,
    Effort,
    Holdings,
    Leaving,
    Live,
    Lost,
    Operation,
    Place,
    Returning,
    Saved,
    find,
    fit_text,
    fits_beside,
    in_transit,
    mib,
    need_of,
    others,
    residuals,
    saved_bytes,
    taken,
)
from coslice.core.ids import JobId, OpId


class NodeTurn:
    """One step in the making. Lives within a single call of ``context.step``, which is pure from outside."""

    def __init__(self, holdings: Holdings, at: float) -> None:
        self.holdings, self.at = holdings, at
        self.effects: list[fx.NodeEffect] = []
        self.reasons: list[fx.Reason] = []

    def set(self, **changes: object) -> None:
        self.holdings = replace(self.holdings, **changes)

    def say(self, code: ReasonCode, text: str) -> None:
        self.reasons.append(fx.Reason(code, text))

    def put(self, context: Context) -> None:
        """Store a context in its place, or at the end if the job is new."""
        held = self.holdings.contexts
        if any(c.job == context.job for c in held):
            self.set(contexts=tuple(context if c.job == context.job else c for c in held))
        else:
            self.set(contexts=(*held, context))

    def move(self, context: Context, place: Place, **changes: object) -> None:
        self.put(replace(context, place=place, **changes))

    def remove(self, job: JobId) -> None:
        self.set(contexts=tuple(c for c in self.holdings.contexts if c.job != job))

    def amend(self, **changes: object) -> Operation:
        """Change the running operation."""
        assert self.holdings.running is not None
        changed = replace(self.holdings.running, **changes)
        self.set(running=changed)
        return changed


# ── the way through an operation ───────────────────────────────────────────


def advance(turn: NodeTurn) -> None:
    while in_transit(turn.holdings) is None:
        op = turn.holdings.running
        if op is None:
            if turn.holdings.queued is None:
                return
            turn.set(running=replace(turn.holdings.queued, begun=turn.at), queued=None)
        elif not _next_move(turn, op):
            return


def _next_move(turn: NodeTurn, op: Operation) -> bool:
    """Begin whatever comes next; False if only an event from outside (room, a deadline) can help."""
    held = turn.holdings
    context = find(held, op.job)
    need = need_of(held, op.job, op.need)
    if context is not None and op.need > context.need:
        turn.put(replace(context, need=op.need))
        return True
    if held.device_budget and need > held.device_budget:
        return _no_room(turn, op, need, beside=0)
    if (evictee := _to_evict(held, op, need)) is not None:
        _evict(turn, op, evictee, need)
        return True
    if context is None or not _must_return(context):
        _done(turn, op, context, need)
        return True
    if not fits_beside(held, op.job, need, others(held, op.job)):
        return _await_room(turn, op, need)
    _restore(turn, op, context)
    return True


def _must_return(context: Context) -> bool:
    return isinstance(context.place, Saved) or (isinstance(context.place, Live) and not context.place.whole)


def _to_evict(held: Holdings, op: Operation, need: int) -> Context | None:
    """The least recently used job that has to go, if any. An unknown figure means that it cannot stay."""
    beside = others(held, op.job)
    if not beside or fits_beside(held, op.job, need, beside):
        return None
    unknown = next((c for c in beside if not taken(held, c)), None)
    return unknown if unknown is not None and need and held.device_budget else beside[0]


def _evict(turn: NodeTurn, op: Operation, evictee: Context, need: int) -> None:
    held = turn.holdings
    if isinstance(evictee.place, Lost):
        return _evict_lost(turn, op, evictee, evictee.place)
    kept = saved_bytes(held)
    if held.host_budget and kept + evictee.bytes > held.host_budget:
        text = (
            f"no room in host memory for {mib(evictee.bytes)} of {evictee.job} beside {mib(kept)} saved: "
            f"the budget is {mib(held.host_budget)}; give the agent a larger one"
        )
        return fail(turn, op, ReasonCode.NO_ROOM, text, culprit=op.job)
    why = (
        f"{op.job} needs {mib(need)} of {mib(held.device_budget)}"
        if need
        else f"the need of {op.job} is not known"
    )
    if not held.device_budget:
        why = "the size of the device is not known, so one job at a time"
    turn.say(ReasonCode.EVICT, f"moving {evictee.job} out ({mib(evictee.bytes)}): {why}")
    place = evictee.place
    assert isinstance(place, Live)
    return try_snapshot(turn, op.op, evictee, 1, touched=not place.whole)


def _evict_lost(turn: NodeTurn, op: Operation, evictee: Context, place: Lost) -> None:
    """What is left on the device of a job whose state is gone; only the end of its processes frees it."""
    text = f"{evictee.job} is lost ({place.reason}), and its processes keep {mib(evictee.use)} on the device"
    rules = turn.holdings.rules
    if rules.on_stuck == "wait":
        return fail(turn, op, ReasonCode.BLOCKED, text, culprit=evictee.job, stuck=True, pid=_pid(evictee))
    turn.say(ReasonCode.BLOCKED, f"{text}; they are killed in {rules.stuck_grace:g} s")
    until = turn.at + rules.stuck_grace
    leaving = Leaving(of=(), attempt=0, effort=Effort.PAUSING, until=until, stuck_since=turn.at, reason=text)
    return turn.move(evictee, leaving)


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


def asked(holdings: Holdings) -> tuple[fx.NodeEffect, ...]:
    """What the backend is (or should be) doing, if all processes it takes are there."""
    moving, op = in_transit(holdings), holdings.running
    if moving is None or op is None or not moving.ready:
        return ()
    match moving.place:
        case Leaving(effort=Effort.TRYING, attempt=attempt):
            return (fx.RunSnapshot(op=op.op, job=moving.job, attempt=attempt),)
        case Returning(effort=Effort.TRYING, attempt=attempt):
            return (fx.RunRestore(op=op.op, job=moving.job, attempt=attempt),)
        case _:
            return ()


# ── moving out ─────────────────────────────────────────────────────────────


def try_snapshot(
    turn: NodeTurn,
    op: OpId,
    context: Context,
    attempt: int,
    *,
    touched: bool,
    stuck_since: float | None = None,
) -> None:
    before, rules = context.place, turn.holdings.rules
    place = Leaving(
        of=tuple(m.id for m in context.members),
        attempt=attempt,
        effort=Effort.TRYING,
        until=turn.at + rules.snapshot_timeout if stuck_since is None else stuck_since + rules.stuck_grace,
        stuck_since=stuck_since,
        touched=touched,
        reason=before.reason if isinstance(before, Leaving) else "",
    )
    turn.move(context, place)
    if context.ready:
        turn.effects.append(fx.RunSnapshot(op=op, job=context.job, attempt=attempt))


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
        turn.move(context, _stays(place))
        return fail(turn, op, ReasonCode.NO_ROOM, f"{context.job} cannot be saved: {reason}", culprit=op.job)
    if place.attempt <= rules.retries:
        turn.say(
            ReasonCode.RETRY, f"{context.job} did not leave ({reason}); attempt {place.attempt + 1} follows"
        )
        return _pause(turn, context, place, (place.attempt - 1) * rules.retry_pause)
    if rules.on_stuck == "wait":
        turn.move(context, _stays(place))
        text = f"{context.job} does not leave the device after {place.attempt} attempts: {reason}"
        return fail(turn, op, ReasonCode.BLOCKED, text, culprit=context.job, stuck=True, pid=_pid(context))
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
    turn.move(context, replace(place, effort=Effort.PAUSING, until=turn.at + pause))
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
            next_attempt = place.attempt + 1
            return try_snapshot(
                turn, op.op, again, next_attempt, touched=place.touched, stuck_since=place.stuck_since
            )
        case Effort.KILLING:
            turn.move(context, _stays(replace(place, touched=True)) if place.of else Lost(place.reason))
            text = (
                f"{context.job} was killed but is still there after {rules.kill_timeout:g} s ({place.reason})"
            )
            return fail(
                turn, op, ReasonCode.BLOCKED, text, culprit=context.job, stuck=True, pid=_pid(context)
            )


def kill(turn: NodeTurn, context: Context, place: Leaving) -> None:
    reason = f"{context.job} could not be moved out: {place.reason}"
    turn.say(ReasonCode.KILLED, f"killing {reason}")
    until = turn.at + turn.holdings.rules.kill_timeout
    turn.move(context, replace(place, effort=Effort.KILLING, until=until, reason=reason))
    turn.effects.append(fx.KillJob(job=context.job, reason=reason))


def _stays(place: Leaving) -> Live:
    return Live(whole=False, reason=f"may be half moved: {place.reason}") if place.touched else Live()


# ── moving in ──────────────────────────────────────────────────────────────


def _restore(turn: NodeTurn, op: Operation, context: Context) -> None:
    attempt = op.restores + 1
    turn.amend(restores=attempt, room_by=None)
    place = Returning(
        of=tuple(m.id for m in context.members),
        attempt=attempt,
        effort=Effort.TRYING,
        until=turn.at + turn.holdings.rules.restore_timeout,
    )
    turn.move(context, place)
    turn.say(ReasonCode.RESTORE, f"moving {context.job} in ({mib(context.bytes)})")
    if context.ready:
        turn.effects.append(fx.RunRestore(op=op.op, job=context.job, attempt=attempt))


def take_back(turn: NodeTurn, context: Context) -> None:
    """Decide once more about a restore that nobody has been asked for since the last restart."""
    op = turn.holdings.running
    assert op is not None
    turn.amend(restores=op.restores - 1)
    turn.move(context, Live(whole=False, reason="it is not known to be back"))


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
        turn.move(context, replace(place, effort=Effort.PAUSING, until=turn.at + pause, reason=reason))
        return (
            returning_overdue(turn, context, place=replace(place, effort=Effort.PAUSING))
            if pause <= 0
            else None
        )
    turn.move(context, Live(whole=False, reason=f"may be half restored: {reason}"))
    text = f"{context.job} did not come back after {place.attempt} attempts: {reason}"
    return fail(turn, op, ReasonCode.JOB_FAULTED, text, culprit=context.job, pid=_pid(context))


def returning_overdue(turn: NodeTurn, context: Context, place: Returning) -> None:
    if place.effort is Effort.TRYING:
        timeout = turn.holdings.rules.restore_timeout
        return restore_failed(turn, context, place, f"no answer within {timeout:g} s")
    # Room is judged again before the next attempt: a part may have come in.
    return turn.move(context, Live(whole=False, reason=place.reason))


# ── the end of an operation, or of a context ───────────────────────────────


def lose(turn: NodeTurn, context: Context, reason: str, *, members: bool = True) -> None:
    """Nothing of the job can be restored any more. Its processes may still be there, and on the device."""
    turn.say(ReasonCode.LOST, f"the state of {context.job} is lost: {reason}")
    kept = context.members if members else ()
    use = max(context.use, context.bytes) if isinstance(context.place, Returning) else context.use
    turn.move(context, Lost(reason), members=kept, use=use if kept else 0)
    turn.effects.append(fx.FreeBuffers(job=context.job))


def _done(turn: NodeTurn, op: Operation, context: Context | None, need: int) -> None:
    text, code = _outcome(turn.holdings, op, context, need)
    turn.say(code, text)
    report = fx.ReportDone(
        op=op.op,
        epoch=op.epoch,
        restored=op.restored,
        bytes_in=op.bytes_in,
        bytes_out=op.bytes_out,
        seconds=max(0.0, turn.at - op.begun),
        reason=text,
    )
    recent = (
        op.job,
        *(j for j in turn.holdings.recent if j != op.job and find(turn.holdings, j) is not None),
    )
    turn.set(running=None, finished=report, recent=recent)
    turn.effects.append(report)


def _outcome(held: Holdings, op: Operation, context: Context | None, need: int) -> tuple[str, ReasonCode]:
    parts = []
    if op.evicted:
        parts.append(f"moved {', '.join(op.evicted)} out ({mib(op.bytes_out)})")
    if op.restored:
        parts.append(f"moved {op.job} in ({mib(op.bytes_in)})")
    elif context is None:
        parts.append(f"nothing of {op.job} is here to move in")
    elif isinstance(context.place, Lost):
        parts.append(f"{op.job} starts afresh: its state was lost ({context.place.reason})")
    else:
        parts.append(f"{op.job} is already resident")
    code = ReasonCode.NODE_READY
    if beside := others(held, op.job):
        parts.append(fit_text(held, need, beside))
        code = ReasonCode.FITS
    return "; ".join(parts), code


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


def _pid(context: Context) -> int:
    return context.members[0].pid if context.members else 0


def count_eviction(turn: NodeTurn, job: JobId, moved: int) -> None:
    """``job`` has left the device, by ``moved`` bytes into host memory or for good."""
    if (op := turn.holdings.running) is not None:
        evicted = op.evicted if job in op.evicted else (*op.evicted, job)
        turn.amend(evicted=evicted, bytes_out=op.bytes_out + moved)
