"""Jobs that wait for each other in a circle.

Within one session the global order of groups makes a circle impossible. Processes of two jobs can still make
one, each holding what a sibling of the other waits for. It need not be a deadlock (a holder that does not
wait for its sibling yields by itself), so nothing is refused: the circle is named, and ``max_hold`` breaks
it.
"""

from collections.abc import Iterable, Sequence

from coslice.core.group_state import Group, Held
from coslice.core.ids import JobId
from coslice.core.prose import names


def circle(groups: Iterable[Group], job: JobId) -> list[str]:
    """One text for each step of the shortest circle through ``job``; empty if there is none."""
    edges = [
        (waiter.job, group.id, group.occupancy.job)
        for group in groups
        if isinstance(group.occupancy, Held)
        for waiter in group.waiters
        if waiter.job != group.occupancy.job
    ]
    paths: list[list[str]] = [[]]
    ends = [job]
    seen: set[JobId] = set()
    while ends:
        end, path = ends.pop(0), paths.pop(0)
        for waiter, group, holder in edges:
            if waiter != end:
                continue
            longer = [*path, f"{waiter} waits for {group}, which {holder} holds"]
            if holder == job:
                return longer
            if holder not in seen:
                seen.add(holder)
                ends.append(holder)
                paths.append(longer)
    return []


def warning(steps: Sequence[str], job: JobId) -> str:
    return (
        f"{job} is part of a circle: {names(steps)}. Ask for several groups in one request, or yield one "
        "first; otherwise the longest hold is ended by max_hold."
    )
