"""The orchestrator's metrics: which there are, and how they follow from steps and states of the groups.

``Meter`` hears every step (through ``Groups``) and writes counters and histograms; gauges and totals that the
state keeps anyway are read when somebody asks. Decides nothing.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.brief import occupancy_name
from coslice.core.effects import ReasonCode
from coslice.core.group_state import (
    Group,
    Held,
    Occupancy,
    Swapping,
    active,
    drain_of,
    on_device,
    waiting,
)
from coslice.core.ids import GroupId
from coslice.core.outcome import Step
from coslice.observe.metric import FINE, MAX_GROUPS, Metric, Names, Reading, histogram
from coslice.orchestrator.job_meter import JobMeter

WAIT = Metric(
    "coslice_acquire_wait_seconds", "histogram", "From a process's request to its grant.", ("group",)
)
HOLD = Metric("coslice_hold_seconds", "histogram", "How long a lease was held, once it ended.", ("group",))
SWAP = Metric(
    "coslice_swap_seconds",
    "histogram",
    "From the choice of the next job to its grant, where nodes had to be asked. With others waiting this is "
    "the whole hand-over.",
    ("group",),
)
GRANTS = Metric(
    "coslice_grants_total", "counter", "Grants to processes, by why it could run.", ("group", "reason")
)
REFUSALS = Metric("coslice_refusals_total", "counter", "Requests that were refused.", ("group", "code"))
FAULTS = Metric("coslice_faults_total", "counter", "What went wrong, by kind.", ("group", "reason"))
DECISIONS = Metric(
    "coslice_decisions_total", "counter", "Decisions of all groups, by their reason.", ("reason",)
)
HANDOVER = Metric(
    "coslice_handover_seconds",
    "histogram",
    "From the arrival of a yield to the next job's grant, saved and handed to its stream; all groups.",
)
TURN = Metric(
    "coslice_turn_seconds",
    "histogram",
    "From the arrival of what a client or an agent says to what followed, saved and handed on; all groups.",
    ("said",),
)
HISTOGRAMS = (WAIT, HOLD, SWAP, HANDOVER, TURN)
COUNTED = (GRANTS, REFUSALS, FAULTS, DECISIONS)

LEADER = Metric("coslice_leader", "gauge", "1: this process leads and grants; 0: it stands by.")
SESSIONS = Metric(
    "coslice_sessions",
    "gauge",
    "Sessions of clients: connected, or lost and still in their grace.",
    ("state",),
)
STANDBYS = Metric(
    "coslice_standbys",
    "gauge",
    "Of the leader, where others share its store: orchestrators that would take its place.",
)
AGENTS = Metric("coslice_agents_attached", "gauge", "Nodes whose agent is connected.")
JOURNAL_LOST = Metric(
    "coslice_journal_lost_lines_total", "counter", "Lines of the journal that could not be written."
)
GROUPS = Metric("coslice_groups", "gauge", "Groups that are open.")
STATE = Metric(
    "coslice_group_state",
    "gauge",
    "1 for the state that the group is in, 0 for the others.",
    ("group", "state"),
)
QUEUE = Metric(
    "coslice_group_queue_depth", "gauge", "Jobs that wait, with the one being swapped in.", ("group",)
)
DOOR = Metric(
    "coslice_group_door_depth", "gauge", "Requests that admission does not let to the lock yet.", ("group",)
)
OLDEST = Metric(
    "coslice_group_oldest_wait_seconds",
    "gauge",
    "How long the longest wait lasts by now; 0: nobody waits.",
    ("group",),
)
LEASE_AGE = Metric(
    "coslice_group_lease_age_seconds",
    "gauge",
    "How long the present lease is held by now; 0: none.",
    ("group",),
)
UNCONFIRMED = Metric(
    "coslice_group_unconfirmed_grants",
    "gauge",
    "Grants that their clients have not confirmed yet.",
    ("group",),
)
LOST = Metric(
    "coslice_group_lost_sessions", "gauge", "Sessions that are lost and still in their grace.", ("group",)
)
NODES = Metric(
    "coslice_group_nodes",
    "gauge",
    "Nodes: attached, away, hung (left out until they answer), or drained (out for maintenance).",
    ("group", "state"),
)
RESIDENTS = Metric("coslice_group_residents", "gauge", "Jobs with state on the devices.", ("group",))
BLOCKED = Metric(
    "coslice_group_blockers",
    "gauge",
    "Jobs or stray processes that could not be evicted and block others.",
    ("group",),
)
JOBS = Metric("coslice_group_jobs", "gauge", "Jobs that are connected, or faulted.", ("group",))
HELD = Metric(
    "coslice_group_held_seconds_total",
    "counter",
    "Time the lock was held; its rate is the held duty.",
    ("group",),
)
SWAPS = Metric("coslice_group_swaps_total", "counter", "Hand-overs for which state moved.", ("group",))
MOVED = Metric(
    "coslice_group_moved_bytes_total", "counter", "Bytes moved in or out, all nodes together.", ("group",)
)
OF_PROCESS = (LEADER, STANDBYS, SESSIONS, AGENTS, JOURNAL_LOST)
OF_GROUPS = (
    *(GROUPS, STATE, QUEUE, DOOR, OLDEST, LEASE_AGE, UNCONFIRMED, LOST),
    *(NODES, RESIDENTS, BLOCKED, JOBS, HELD, SWAPS, MOVED),
)

STATES = ("empty", "resident", "held", "swapping")
FAULTY = frozenset(
    {
        ReasonCode.JOB_FAULTED,
        ReasonCode.BLOCKED,
        ReasonCode.NODE_LOST,
        ReasonCode.OVERRAN,
        ReasonCode.UNCONFIRMED,
        ReasonCode.SESSION_LOST,
        ReasonCode.SESSION_EXPIRED,
        ReasonCode.RETRY,
    }
)
"""Reasons that count as faults."""
SAID: dict[type, str] = {
    ev.AcquireRequested: "acquire",
    ev.LeaseYielded: "yield",
    ev.OpSucceeded: "report",
    ev.OpFailed: "report",
}


class _Tally:
    """Counts of the groups that share a name."""

    __slots__ = ("decided", "grants", "refusals")

    def __init__(self) -> None:
        self.decided: defaultdict[ReasonCode, int] = defaultdict(int)
        self.grants: defaultdict[ReasonCode, int] = defaultdict(int)
        self.refusals: defaultdict[fx.RefuseCode, int] = defaultdict(int)


class Pushed:
    """What all groups of one process write to. Counts are plain numbers until somebody asks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.wait, self.hold, self.swap = (histogram(m, registry) for m in (WAIT, HOLD, SWAP))
        self.handover = histogram(HANDOVER, registry, FINE)
        turn = histogram(TURN, registry, FINE)
        self.turns = {kind: turn.labels(said) for kind, said in SAID.items()}
        self.jobs = JobMeter()
        self._names = Names(MAX_GROUPS)
        self._tallies: dict[str, _Tally] = {}
        self._past: defaultdict[ReasonCode, int] = defaultdict(int)
        """Decisions of groups that are gone."""

    def opened(self, group: GroupId) -> tuple[str, _Tally]:
        """The name that its series have, and where to count."""
        name = self._names(group)
        return name, self._tallies.setdefault(name, _Tally())

    def deleted(self, name: str) -> None:
        """Its series go with it, unless it shared them."""
        if not self._names.give_up(name):
            return
        for each in (self.wait, self.hold, self.swap):
            each.remove(name)
        for code, count in self._tallies.pop(name).decided.items():
            self._past[code] += count

    def take(self) -> "Counts":
        return Counts(tuple(self._tallies.items()), dict(self._past))


class Counts(NamedTuple):
    tallies: tuple[tuple[str, _Tally], ...]
    """By the name of its groups."""
    past: dict[ReasonCode, int]


def of_counts(taken: Counts) -> Iterator[Reading]:
    """Each tally is read at a moment of its own: others may count meanwhile."""
    decided = defaultdict(int, taken.past)
    for name, tally in taken.tallies:
        for code, count in tuple(tally.decided.items()):
            decided[code] += count
            if code in FAULTY:
                yield FAULTS, (name, code.value), count
        for code, count in tuple(tally.grants.items()):
            yield GRANTS, (name, code.value), count
        for refused, count in tuple(tally.refusals.items()):
            yield REFUSALS, (name, refused.value), count
    for code, count in decided.items():
        yield DECISIONS, (code.value,), count


class Meter:
    """Of one group. ``state``: as it is before the first step."""

    def __init__(self, group: GroupId, state: Group, pushed: Pushed) -> None:
        self._group, self._pushed = group, pushed
        self._name, self._tally = pushed.opened(group)
        self._wait, self._hold, self._swap = (
            each.labels(self._name) for each in (pushed.wait, pushed.hold, pushed.swap)
        )
        self._before: Occupancy = state.occupancy
        self._yielded: float | None = None
        """When the yield arrived that somebody is granted after."""

    def heard(self, event: ev.GroupEvent, step: Step[Group, fx.GroupEffect], done: float) -> None:
        """``done``: when what followed was saved and handed on, on the clock of the events."""
        turn = self._pushed.turns.get(type(event))
        if turn is not None:
            turn.observe(done - event.at)
        if isinstance(event, ev.LeaseYielded) and step.state.occupancy is not self._before:
            self._yielded = event.at
        for reason in step.reasons:
            self._tally.decided[reason.code] += 1
        for effect in step.effects:
            if isinstance(effect, fx.Grant):
                self._granted(effect, step.reasons)
                if self._yielded is not None:
                    self._pushed.handover.observe(done - self._yielded)
                    self._yielded = None
            elif isinstance(effect, fx.Refuse):
                self._tally.refusals[effect.code] += 1
        if step.state.occupancy is not self._before:
            self._changed(event.at, step.state.occupancy)
        if not isinstance(step.state.occupancy, Swapping):
            self._yielded = None

    def _granted(self, effect: fx.Grant, reasons: tuple[fx.Reason, ...]) -> None:
        if not any(reason.code is ReasonCode.REPEATED for reason in reasons):
            self._wait.observe(effect.waited)
            self._tally.grants[effect.reason.code] += 1

    def _changed(self, at: float, now: Occupancy) -> None:
        before, self._before = self._before, now
        if isinstance(before, Held) and not (isinstance(now, Held) and now.epoch == before.epoch):
            self._hold.observe(max(0.0, at - before.since))
            self._pushed.jobs.ended(self._group, before, at)
        elif isinstance(before, Swapping) and not (
            isinstance(now, Swapping) and (now.since, now.incoming) == (before.since, before.incoming)
        ):
            self._swap.observe(max(0.0, at - before.since))
        if isinstance(now, Held) and not (isinstance(before, Held) and now.epoch == before.epoch):
            self._pushed.jobs.began(self._group, now, at)

    def close(self) -> None:
        self._pushed.deleted(self._name)


# ── read when somebody asks ────────────────────────────────────────────────


class Taken(NamedTuple):
    groups: tuple[Group, ...]
    now: float
    at_door: Mapping[GroupId, int] = {}


def of_groups(taken: Taken) -> Iterator[Reading]:
    yield GROUPS, (), len(taken.groups)
    for group in taken.groups:
        yield DOOR, (group.id,), taken.at_door.get(group.id, 0)
        yield from _of_group(group, taken.now)


def _of_group(group: Group, now: float) -> Iterator[Reading]:
    name, waits, held = (group.id,), waiting(group), group.occupancy
    state, age = occupancy_name(group), now - held.since if isinstance(held, Held) else 0.0
    for each in STATES:
        yield STATE, (group.id, each), state == each
    yield QUEUE, name, len(waits)
    yield OLDEST, name, max((now - waiter.since for waiter in waits), default=0.0)
    yield LEASE_AGE, name, age
    unconfirmed = [h for h in active(held) if not h.confirmed] if isinstance(held, Held) else []
    yield UNCONFIRMED, name, len(unconfirmed)
    yield LOST, name, len(group.lost)
    drained = sum(drain_of(group, view.node) is not None for view in group.views)
    attached = sum(view.attached and drain_of(group, view.node) is None for view in group.views)
    yield NODES, (group.id, "attached"), attached
    yield NODES, (group.id, "away"), len(group.views) - attached - drained
    yield NODES, (group.id, "drained"), drained
    yield NODES, (group.id, "hung"), len(group.hung)
    yield RESIDENTS, name, len({context.job for _, context in on_device(group)})
    yield BLOCKED, name, len(group.stuck)
    yield JOBS, name, len(group.jobs)
    yield HELD, name, group.held_s + max(0.0, age)
    yield SWAPS, name, group.swaps
    yield MOVED, name, group.bytes_moved


class Process(NamedTuple):
    leader: bool
    connected: int
    lost: int
    agents: int
    journal_lost: int
    standbys: int | None = None
    """None: there can be none, or nobody could say yet."""


def of_process(taken: Process) -> Iterator[Reading]:
    yield LEADER, (), taken.leader
    if taken.standbys is not None:
        yield STANDBYS, (), taken.standbys
    yield SESSIONS, ("connected",), taken.connected
    yield SESSIONS, ("lost",), taken.lost
    yield AGENTS, (), taken.agents
    yield JOURNAL_LOST, (), taken.journal_lost
