"""What the lock remembers of each job's turns, for policies that want to know. Called by ``core.group``.

Written after every event, from the state before and after it: when a lease ended and how long it was, and
when the job asked again. A group whose policy does not ask for it keeps nothing.
"""

from msgspec.structs import replace

from coslice.core import events as ev
from coslice.core.group_state import Group, Held, record_of
from coslice.core.policy.base import Memory
from coslice.core.policy.past import asked, ended
from coslice.core.turn import Turn


def remembered(group: Group) -> Memory:
    return {record.job: record.past for record in group.jobs}


def note_ask(turn: Turn, event: ev.GroupEvent) -> None:
    """Before the decision: how long the job was away."""
    if type(event) is not ev.AcquireRequested:
        return
    record = record_of(turn.group, event.job)
    if record is not None and record.past.away_since is not None:
        turn.put_record(replace(record, past=asked(record.past, turn.at)))


def note_end(turn: Turn, before: Group) -> None:
    """Before the decision: the lease that was out and is not any more."""
    was, now = before.occupancy, turn.group.occupancy
    if type(was) is not Held or (type(now) is Held and now.epoch == was.epoch):
        return
    record = record_of(turn.group, was.job)
    if record is not None and record.incarnation == was.incarnation:
        turn.put_record(
            replace(record, past=ended(record.past, was.phase, since=was.since, at=max(turn.at, was.since)))
        )
