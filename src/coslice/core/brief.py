"""The state of a group in a few words: one line of a journal, one row of a status page."""

from typing import assert_never

from coslice.core.group_state import Empty, Group, Held, Resident, Swapping, occupant


def occupancy_name(group: Group) -> str:
    match group.occupancy:
        case Empty():
            return "empty"
        case Resident():
            return "resident"
        case Held():
            return "held"
        case Swapping():
            return "swapping"
        case _:
            assert_never(group.occupancy)


def brief(group: Group) -> dict[str, object]:
    return {
        "occupancy": occupancy_name(group),
        "job": occupant(group) or "",
        "epoch": group.epoch,
        "waiting": [waiter.job for waiter in group.waiters],
        **({"frozen": [held.job for held in group.frozen]} if group.frozen else {}),
        **({"drained": [drained.node for drained in group.drained]} if group.drained else {}),
    }
