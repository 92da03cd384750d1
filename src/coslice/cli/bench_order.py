"""Were the grants in the order of the requests?

From the orchestrator's journal, which has both in the order in which the lock took them: no clock of a client
and nothing on its way takes part.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct


class Order(Struct, kw_only=True):
    """Of one group. ``jobs``: who was granted, in that order."""

    jobs: list[str]
    requests: int = 0
    out_of_order: int = 0
    """Grants to somebody while somebody else had waited longer."""
    double_grants: int = 0
    """Grants while the lock was held."""
    lost: int = 0
    """Requests that came to nothing although nobody gave them up."""


def order_of(records: Iterable[Mapping[str, Any]], group: str) -> Order:
    """Of a group under the policy ``fifo`` whose jobs have one process each."""
    found = Order(jobs=[])
    waiting: list[str] = []
    asked: set[str] = set()
    held: dict[str, Any] | None = None
    for record in records:
        if record.get("group") != group:
            continue
        event = record["event"]
        if (
            event["type"] == "AcquireRequested" and event["request"] not in asked
        ):  # said again: keeps its place
            asked.add(event["request"])
            waiting.append(event["request"])
        elif event["type"] == "AcquireAbandoned":
            waiting = [request for request in waiting if request != event["request"]]
        elif event["type"] == "LeaseYielded" and held is not None and event["epoch"] == held["epoch"]:
            held = None
        for effect in record["effects"]:
            if effect["type"] == "LoseLease" and held is not None and effect["epoch"] == held["epoch"]:
                held = None
            elif effect["type"] == "Refuse" and effect["request"] in waiting:
                waiting.remove(effect["request"])
            elif effect["type"] == "Grant" and effect != held:
                found.double_grants += held is not None or effect["request"] not in waiting
                found.out_of_order += waiting[:1] != [effect["request"]]
                waiting = [request for request in waiting if request != effect["request"]]
                found.jobs.append(effect["job"])
                held = effect
    found.requests, found.lost = len(asked), len(waiting)
    return found
