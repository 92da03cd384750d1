"""Why a job waits, in prose: how things stand now (core.story), then the group's last decisions."""

import re
from collections.abc import Sequence

from coslice.core import story
from coslice.core.ids import JobId
from coslice.orchestrator import cycles
from coslice.orchestrator.groups import Decision, GroupLock, Groups

LINES = 20
_FINGERPRINT = re.compile(r"\b([is][0-9a-f]{6})[0-9a-f]{14}\b")


def known(lock: GroupLock, job: str) -> bool:
    """Has the group anything to tell about this job?"""
    return job in jobs(lock) or any(getattr(one.event, "job", "") == job for one in lock.decisions)


def jobs(lock: GroupLock) -> list[str]:
    """The jobs that the group knows now."""
    group = lock.state
    named = {record.job for record in group.jobs} | {waiter.job for waiter in group.waiters}
    return sorted(named | {context.job for view in group.views for context in view.facts.contexts})


def explain(
    lock: GroupLock, groups: Groups, *, now: float, job: str, last: int, admission: Sequence[str] = ()
) -> list[str]:
    """Lines for people. The present comes first; then what admission says; then at most ``last`` decisions,
    the oldest first.

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
    # A fingerprint in full says no more to people.
    return [_FINGERPRINT.sub(r"\1", line) for line in [*lines, *admission, *told[-last:]]]


def _tell(decision: Decision, job: str, now: float) -> list[str]:
    """A decision is a job's own if a text of its event's reasons names it; all of them are then told."""
    texts = [reason.text for reason in decision.reasons]
    named = re.compile(rf"(?<![\w.-]){re.escape(job)}(?![\w-])")  # job a is not in every word with an a
    if job and not any(named.search(text) for text in texts):
        return []
    return [f"{max(0.0, now - decision.at):.1f} s ago: {text}" for text in texts]
