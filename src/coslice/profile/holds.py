"""Turns as a lock saw them, made into cycles and a profile. Pure.

Called by the reader of journals and, live, by admission: both mean the same by what a job does. Waits for the
lock and swaps are left out: they belong to the sharing, not to the job.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from coslice.profile.model import Phase, Pool, Role, durations, make_pool


class Hold(Struct, frozen=True, array_like=True):
    """One turn on the accelerators."""

    phase: str
    off: float
    """From the yield before it to the acquire; negative: not known (the first one)."""
    on: float


Holds = tuple[Hold, ...]
WAITED = 0.02
"""Of a cycle: a shorter off-time is no wait for a batch."""


def order_of(holds: Sequence[Hold]) -> list[str]:
    """Names of the phases, in the order of their first turn."""
    return list(dict.fromkeys(hold.phase for hold in holds))


def begins_cycle(order: Sequence[str], last: str | None, phase: str) -> bool:
    """A cycle begins with a phase that is no later in ``order`` than the one before it. A name that is new
    comes last."""
    return last is None or (phase in order and order.index(phase) <= order.index(last))


def cycles_of(holds: Sequence[Hold]) -> list[Holds]:
    order = order_of(holds)
    cycles: list[list[Hold]] = []
    last: str | None = None
    for hold in holds:
        if begins_cycle(order, last, hold.phase):
            cycles.append([])
        last = hold.phase
        cycles[-1].append(hold)
    return [tuple(cycle) for cycle in cycles]


def pool_of(
    cycles: Sequence[Holds],
    *,
    name: str = "",
    staleness: float = 0.0,
    accelerators: int = 0,
    nodes: int = 1,
    state_bytes: int = 0,
) -> Pool:
    """``staleness`` above 0: the off-time before the first phase is buffered."""
    order = order_of([hold for cycle in cycles for hold in cycle])
    times = [{hold.phase: hold for hold in cycle} for cycle in cycles]
    none = Hold("", 0.0, 0.0)
    phases: list[Phase] = []
    for number, phase in enumerate(order):
        label = phase or "held"
        buffered = number == 0 and staleness > 0
        phases.append(
            Phase(
                name=f"before {label}",
                on=False,
                duration=durations([cycle.get(phase, none).off for cycle in times]),
                coupling="buffered" if buffered else "closed",
                staleness=staleness if buffered else 0.0,
            )
        )
        phases.append(
            Phase(
                name=label,
                phase=phase,
                on=True,
                duration=durations([cycle.get(phase, none).on for cycle in times]),
                occurs=sum(phase in cycle for cycle in times),
            )
        )
    return make_pool(
        _role(order), phases, name=name, accelerators=accelerators, nodes=nodes, state_bytes=state_bytes
    )


# ── buffered jobs: what they wait for a batch depends on the others, how long one is made does not ──


def batch_made_in(before: Hold, hold: Hold, gap: float, staleness: float) -> float | None:
    """Seconds that the batch of a cycle took. ``before``, ``hold``: the first turns of the cycle before and
    of this one; ``gap``: seconds between their acquires. A wait for a batch shows when it was complete, and
    who waited for the one before as well knows how long it was made (``cycle.Batches``): the gap, or less
    with a staleness below 1. None: it lay ready, and nobody knows."""
    if not min(hold.off, before.off) > WAITED * gap > 0:
        return None
    return min(hold.off / (1.0 - staleness) if staleness < 1.0 else gap, gap)


def alone(holds: Holds, make: float, before: float, staleness: float) -> Holds:
    """The turns of a cycle as the job would take them alone, with a batch that takes ``make`` seconds, some
    of them during the ``before`` seconds of the cycle before."""
    if not staleness or not holds:
        return holds
    wait = max(0.0, make - min(staleness * make, before))
    return (replace(holds[0], off=wait), *holds[1:])


def computed(holds: Holds) -> float:
    """Seconds of a cycle without the wait for its batch."""
    return holds[0].on + sum(hold.on + hold.off for hold in holds[1:])


def _role(phases: Sequence[str]) -> Role:
    generates, trains = "generate" in phases, "train" in phases
    if generates and trains:
        return "both"
    return "sampler" if generates else "trainer" if trains else "unknown"
