"""What must hold of one node's holdings, whatever happened: invariants 3, 4, 6 of the design, and its shape.

``violations`` looks at a state, ``violations_of_step`` at one step with its effects. Called by tests, the
simulator and the agent's debug mode after every step. Both return findings in prose; empty means all is well.
"""

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.effects import NodeEffect
from coslice.core.events import ContextState, NodeEvent
from coslice.core.holdings import (
    Context,
    Holdings,
    Leaving,
    Live,
    Lost,
    Partly,
    Returning,
    Saved,
    find,
    fits_beside,
    need_of,
    others,
    restores_into,
)
from coslice.core.ids import JobId
from coslice.core.node_facts import facts
from coslice.core.outcome import Step


def violations(holdings: Holdings) -> list[str]:
    found = [text for context in holdings.contexts for text in _of_context(holdings, context)]
    names = [c.job for c in holdings.contexts]
    if len(set(names)) != len(names):
        found.append(f"a job has two contexts: {names}")
    moving = [c.job for c in holdings.contexts if isinstance(c.place, Leaving | Returning)]
    if len(moving) > 1:
        found.append(f"more than one move at a time: {moving}")
    if moving and holdings.running is None:
        found.append(f"{moving[0]} moves although no operation runs")
    if holdings.queued is not None and holdings.running is None:
        found.append("an operation is queued behind nothing")
    return [*found, *_of_epochs(holdings), *_of_grants(holdings)]


def _of_epochs(holdings: Holdings) -> list[str]:
    running, queued, finished = holdings.running, holdings.queued, holdings.finished
    epochs = [o.epoch for o in (finished, running, queued) if o is not None]
    if epochs != sorted(set(epochs)):
        return [f"epochs do not grow from the finished to the queued operation: {epochs}"]
    if epochs and epochs[-1] > holdings.epoch:
        return [f"epoch {epochs[-1]} is above the highest seen, {holdings.epoch}"]
    return []


def _of_context(holdings: Holdings, context: Context) -> list[str]:
    op, job, place = holdings.running, context.job, context.place
    found = []
    match place:
        case Lost(reason=reason):
            if not reason:
                found.append(f"{job} is lost without a reason")
            return found
        case Saved():
            if not all(m.parked for m in context.members):
                found.append(f"{job} counts as saved but a process of it does not")
        case Partly(left=left):
            if left < 1 or not all(m.parked or m.part for m in context.members):
                found.append(f"{job} counts as partly saved but a process of it is whole on the device")
        case Live(whole=whole):
            if whole and any(m.parked or m.part for m in context.members):
                found.append(f"{job} counts as whole on the device but a process of it is parked")
        case Leaving():
            if op is not None and op.job == job:
                found.append(f"{job} is moved out to make room for itself")
        case Returning():
            if op is None or op.job != job:
                found.append(f"{job} comes back although nobody asked for it")
    if not context.members:
        found.append(f"{job} has no process that its state could be restored to")
    return found


def _of_grants(holdings: Holdings) -> list[str]:
    """A job called live may be granted without a command, so all that are so called must fit together (3)."""
    live = [c.job for c in facts(holdings).contexts if c.state is ContextState.LIVE]
    for job in live:
        beside = others(holdings, job)
        if beside and not fits_beside(holdings, job, need_of(holdings, job, 0), beside):
            return [f"{job} is called live beside {[c.job for c in beside]}, which do not fit"]
    return []


def violations_of_step(before: Holdings, event: NodeEvent, taken: Step[Holdings, NodeEffect]) -> list[str]:
    after = taken.state
    found = violations(after)
    for effect in taken.effects:
        match effect:
            case fx.RunRestore(job=job):
                found += _of_restore(after, job=job)
            case fx.RunSnapshot(job=job):
                context = find(after, job)
                if context is None or not isinstance(context.place, Leaving) or not context.ready:
                    found.append(f"a snapshot of {job} starts that the state does not know of")
                elif effect.least and not context.divisible:
                    found.append(f"a part of {job} is moved, which it did not offer")
            case fx.ReportDone() | fx.ReportFailed():
                if isinstance(effect, fx.ReportDone) and effect != before.finished:
                    found += _of_report(after, effect)
            case fx.FreeBuffers(job=job):
                context = find(after, job)
                replaced = isinstance(event, ev.MemberRegistered) and event.job == job
                if context is not None and isinstance(context.place, Saved | Partly) and not replaced:
                    found.append(f"the saved state of {job} is thrown away")
            case fx.KillJob() | fx.PushFacts():
                pass
    if after.epoch < before.epoch:
        found.append("the highest epoch fell")
    pushed = any(isinstance(e, fx.PushFacts) for e in taken.effects)
    if pushed != (after.version > before.version) or pushed != (facts(after) != facts(before)):
        found.append("facts are pushed exactly when they changed, under a higher version")
    return found


def _of_restore(after: Holdings, *, job: JobId) -> list[str]:
    """Invariants 3 and 4: room for all the job needs, beside everybody who is not known to have left."""
    context, op = find(after, job), after.running
    if context is None or op is None or not isinstance(context.place, Returning) or not context.ready:
        return [f"a restore of {job} starts that the state does not know of"]
    beside = others(after, job)
    if not fits_beside(after, job, restores_into(after, job, op.need), beside):
        return [f"a restore of {job} starts without room beside {[c.job for c in beside]}"]
    return []


def _of_report(after: Holdings, report: fx.ReportDone) -> list[str]:
    """A job is reported only if its state, where it has any, is whole on the device."""
    job = after.recent[0]
    context = find(after, job)
    if after.running is not None:
        return []  # the next operation has begun in the same step, and may move it out again
    if context is not None and not isinstance(context.place, Lost) and context.place != Live():
        return [f"{report.op} is reported done, but {job} is not live"]
    return []
