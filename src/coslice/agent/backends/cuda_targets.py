"""Which processes of a job hold device memory, by a survey, with what they hold."""

import os
from collections.abc import Iterable, Sequence

from coslice.agent.backends.cuda_moves import Moves
from coslice.agent.backends.process_ledger import Target
from coslice.agent.discovery.survey import Survey
from coslice.agent.members import Member
from coslice.agent.occupancy import belongs
from coslice.agent.processes import start_time


async def find_targets(
    members: Sequence[Member], survey: Survey, moves: Moves, *, ours: Iterable[int] = ()
) -> list[Target]:
    """By pid. ``ours``: the agent's helpers, which are nobody's job."""
    excluded = {*ours, os.getpid()}
    found = []
    for pid, devices in sorted(survey.usage().items()):
        started = start_time(pid)
        if started is None or pid in excluded or belongs(pid, list(members)) is None:
            continue
        if not any(devices.values()) and not await moves.uses_cuda(pid):
            continue  # it looked at the devices and made no context: there is nothing to move
        sizes = {uuid: size or 0 for uuid, size in devices.items()}
        found.append(Target(pid=pid, started=started, devices=sizes))
    return found
