"""Why a job waits, in prose: where things stand now, then the group's last decisions with their reasons."""

from coslice.core.group_state import occupant
from coslice.orchestrator import views
from coslice.orchestrator.groups import GroupLock

LINES = 20


def explain(lock: GroupLock, *, now: float, job: str, last: int) -> list[str]:
    """Lines for people, the present first; ``job`` (empty: any) chooses whose decisions are told."""
    group = lock.state
    who = f" by {holder}" if (holder := occupant(group)) else ""
    lines = [
        f"group {group.id} is {views.occupancy_name(group)}{who} since {max(0.0, now - group.since):.1f} s, "
        f"epoch {group.epoch}, policy {lock.config.policy}"
    ]
    for waiter in views.status(group, policy=lock.config.policy, now=now).waiters:
        if job in ("", waiter.job):
            lines.append(f"{waiter.job} waits for {waiter.waited_s:.1f} s: {waiter.reason}")
    if job and len(lines) == 1:
        lines.append(f"{job} waits for nothing here")
    told = [
        f"{max(0.0, now - decision.at):.1f} s ago: {reason.text} [{reason.code}]"
        for decision in lock.decisions
        for reason in decision.reasons
        if not job or job in reason.text
    ]
    return lines + told[-last:]
