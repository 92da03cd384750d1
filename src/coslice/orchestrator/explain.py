"""Why a job waits, in prose: how things stand now (core.story), then the group's last decisions."""

from coslice.core import story
from coslice.core.ids import JobId
from coslice.orchestrator import cycles
from coslice.orchestrator.groups import Decision, GroupLock, Groups

LINES = 20


def explain(lock: GroupLock, groups: Groups, *, now: float, job: str, last: int) -> list[str]:
    """Lines for people. The present comes first; then at most ``last`` decisions, the oldest first.

    ``job`` (empty: any) chooses whose waiting is explained and whose decisions are told.
    """
    group = lock.state
    if job:
        lines = [*story.why_waiting(group, JobId(job), now), *story.where(group, JobId(job))]
    else:
        lines = story.describe(group, now)
        for waiter in group.waiters:
            lines.append(story.why_waiting(group, waiter.job, now)[0])
    for name in [JobId(job)] if job else [waiter.job for waiter in group.waiters]:
        if steps := cycles.circle((one.state for one in groups), name):
            lines.append(cycles.warning(steps, name))
            break
    told = [line for decision in lock.decisions for line in _tell(decision, job, now)]
    return lines + told[-last:]


def _tell(decision: Decision, job: str, now: float) -> list[str]:
    """A decision is a job's own if a text of its event's reasons names it; all of them are then told."""
    texts = [reason.text for reason in decision.reasons]
    if job and not any(job in text for text in texts):
        return []
    return [f"{max(0.0, now - decision.at):.1f} s ago: {text}" for text in texts]
