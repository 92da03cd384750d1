"""Which processes of a job hold device memory. A job registers one process (``coslice run`` its first); the
ones that use a device may be its children, or theirs.

A process belongs to a job if it is a member, a descendant of one, in the same pod or container as one (not
the agent's own), or carries the job's incarnation in its environment.
"""

import os
from collections.abc import Iterable, Sequence

from coslice.agent.backends.cuda_ledger import Target
from coslice.agent.backends.cuda_moves import Moves
from coslice.agent.discovery import cgroups, procfs
from coslice.agent.discovery.survey import Survey
from coslice.agent.members import Member


async def find_targets(
    members: Sequence[Member], survey: Survey, moves: Moves, *, ours: Iterable[int] = ()
) -> list[Target]:
    """By pid. ``ours``: the agent's helpers, which are nobody's job."""
    excluded = {*ours, os.getpid()}
    found = []
    for pid, devices in sorted(survey.usage().items()):
        seen = procfs.process(pid)
        if seen is None or pid in excluded or not _belongs(pid, members):
            continue
        if not any(devices.values()) and not await moves.uses_cuda(pid):
            continue  # it looked at the devices and made no context: there is nothing to move
        sizes = {uuid: size or 0 for uuid, size in devices.items()}
        found.append(Target(pid=pid, started=seen.started, devices=sizes))
    return found


def _belongs(pid: int, members: Sequence[Member]) -> bool:
    if procfs.descends_from(pid, (member.pid for member in members)):
        return True
    tokens = {member.incarnation for member in members}
    environment = procfs.environment(pid)
    if environment.get("COSLICE_INCARNATION") in tokens:
        return True
    here, agent = cgroups.placement(pid), cgroups.placement(os.getpid())
    for member in members:
        there = cgroups.placement(member.pid)
        if here.pod and here.pod == there.pod != agent.pod:
            return True
        if here.container and here.container == there.container != agent.container:
            return True
    return False
