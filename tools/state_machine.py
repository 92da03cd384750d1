"""Print docs/state-machine.md, made by driving the real lock through every situation of a small world.

Nothing here is drawn by hand: two jobs, two processes, one node and every event that can happen to them are
fed to ``core.group.step``, breadth first, one representative for each situation (times and epochs left out).
The invariants are checked on the way, so that the walk is also a test. Called by ``make docs``.
"""

from collections import defaultdict
from collections.abc import Iterator

from msgspec import to_builtins

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.events import ContextFact, ContextState, NodeFacts
from coslice.core.group import Group, Held, Rejected, Swapping, new_group, next_deadline, step
from coslice.core.group_state import GroupRules, context_of, drain_of, open_asks, view_of
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, NodeId, RequestId, SessionId, op_id
from coslice.core.invariants import check_group_step
from coslice.core.outcome import Step
from coslice.core.policy import Fifo

NODE = NodeId("n0")
JOBS = (JobId("a"), JobId("b"))
KINDS = ("Empty", "Resident", "Held", "Swapping")
LIMIT = 2500
"""Situations looked at, the simplest first."""
TIMES = frozenset(
    {"since", "at", "deadline", "confirm_by", "detached_at", "retry_at", "contended_since", "waited"}
)
COUNTS = frozenset(
    {"epoch", "held_s", "contended_s", "swaps", "bytes_moved", "bytes_in", "bytes_out", "version"}
)
LEFT_OUT = TIMES | COUNTS | {"outstanding", "yields", "reason", "notes", "attempts", "text", "rules"}


def situation(thing: object) -> object:
    """What is left of a state without times, counts and prose, as something hashable."""
    if isinstance(thing, dict):
        return tuple((k, situation(v)) for k, v in thing.items() if k not in LEFT_OUT)
    return tuple(situation(v) for v in thing) if isinstance(thing, list | tuple) else thing


def facts(group: Group, **states: ContextState | None) -> NodeFacts:
    view = view_of(group, NODE)
    known = {c.job: c.state for c in view.facts.contexts} if view is not None else {}
    now = {**known, **{JobId(j): s for j, s in states.items()}}
    contexts = tuple(
        ContextFact(job=j, state=s, incarnation=Incarnation(f"{j}-1")) for j, s in now.items() if s
    )
    return NodeFacts(version=view.facts.version + 1 if view is not None else 1, contexts=contexts)


def client_events(group: Group, at: float) -> Iterator[ev.GroupEvent]:
    asks = {a.session: a.request for a in open_asks(group)}
    held = group.occupancy
    holders = {h.session: h for h in held.holders if h.state == "active"} if isinstance(held, Held) else {}
    for job in JOBS:
        session = SessionId(f"{job}1")
        request = asks.get(session) or RequestId(f"{session}/{group.epoch}")
        asked = ev.AcquireRequested(
            at=at, job=job, incarnation=Incarnation(f"{job}-1"), session=session, request=request
        )
        if session not in holders:
            yield asked
        else:
            yield ev.GrantConfirmed(at=at, request=holders[session].request)
            yield ev.AcquireAbandoned(at=at, request=holders[session].request)
            yield ev.LeaseYielded(at=at, job=job, session=session, epoch=group.epoch)
        if session in asks:
            yield ev.AcquireAbandoned(at=at, request=request)
        if job == JOBS[0] and any(session in r.sessions for r in group.jobs):  # the jobs are alike
            yield ev.SessionLost(at=at, session=session)
            yield ev.SessionClosed(at=at, session=session)
            yield ev.JobForgotten(at=at, job=job)
            yield ev.JobEvicted(at=at, job=job)
        if any(s.session == session for s in group.lost):
            yield ev.SessionResumed(at=at, session=session)


def node_events(group: Group, at: float) -> Iterator[ev.GroupEvent]:
    view = view_of(group, NODE)
    if view is None or not view.attached:
        yield ev.NodeAttached(at=at, node=NODE, epoch=Epoch(0), facts=facts(group))
        return
    yield ev.NodeDetached(at=at, node=NODE)
    yield ev.NodesChanged(at=at, nodes=())
    yield (ev.NodeUndrained(at=at, node=NODE) if drain_of(group, NODE) else ev.NodeDrained(at=at, node=NODE))
    swap = group.occupancy
    if isinstance(swap, Held) and context_of(view, swap.job) is None:
        yield ev.NodeReported(at=at, node=NODE, facts=facts(group, **{swap.job: ContextState.LIVE}))
    for context in view.facts.contexts:
        yield ev.NodeReported(at=at, node=NODE, facts=facts(group, **{context.job: None}))
    if not isinstance(swap, Swapping):
        return
    other = next(j for j in JOBS if j != swap.incoming)
    here = {c.job: c.state for c in view.facts.contexts}
    was_saved = here.get(swap.incoming) is ContextState.SAVED
    out = {other: ContextState.SAVED} if here.get(other) is ContextState.LIVE else {}
    into = {swap.incoming: ContextState.LIVE} if was_saved else {}
    op = op_id(group.id, swap.epoch, NODE)
    yield ev.OpSucceeded(
        at=at, op=op, node=NODE, restored=was_saved, bytes_in=was_saved, facts=facts(group, **out, **into)
    )
    yield ev.OpFailed(
        at=at, op=op, node=NODE, culprit=swap.incoming, reason="it broke", facts=facts(group, **out)
    )
    if out:
        gone = facts(group, **{other: ContextState.LOST})
        yield ev.OpFailed(at=at, op=op, node=NODE, culprit=other, reason="it broke", facts=gone)
        yield ev.OpFailed(
            at=at, op=op, node=NODE, culprit=other, reason="busy", stuck=True, facts=facts(group)
        )


def events(group: Group, at: float) -> Iterator[ev.GroupEvent]:
    yield from client_events(group, at)
    yield from node_events(group, at)
    due = next_deadline(group)
    if due is not None:
        yield ev.DeadlinePassed(at=max(at, due))


def walk() -> Iterator[tuple[Group, ev.GroupEvent, Step[Group, fx.GroupEffect]]]:
    """Every step from every situation, breadth first."""
    start = new_group(GroupId("g"), nodes=(NODE,), rules=GroupRules())
    queue, seen = [(start, 0.0)], {situation(to_builtins(start))}
    for group, at in queue:  # grows while we walk
        for event in events(group, at):
            try:
                taken = step(group, event, Fifo())
            except Rejected:
                continue
            check_group_step(group, event, taken)
            yield group, event, taken
            key = situation(to_builtins(taken.state))
            if key not in seen and len(seen) < LIMIT:
                seen.add(key)
                queue.append((taken.state, event.at))


def label(event: ev.GroupEvent) -> str:
    name = type(event).__name__
    return f"{name} (stuck)" if isinstance(event, ev.OpFailed) and event.stuck else name


def document() -> str:
    edges: dict[tuple[str, str], set[str]] = defaultdict(set)
    rows: dict[tuple[str, str, str], tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
    steps = 0
    for group, event, taken in walk():
        steps += 1
        source, target = type(group.occupancy).__name__, type(taken.state.occupancy).__name__
        if source != target:
            edges[source, target].add(label(event))
        does, why = rows[source, label(event), target]
        does.update(type(e).__name__ for e in taken.effects)
        why.update(r.code.value for r in taken.reasons)
    lines = [
        "# The state machine of a group's lock",
        "",
        "Generated by `tools/state_machine.py` (`make docs`): do not edit. The real `core.group.step` was",
        f"driven through the {LIMIT} simplest situations of two jobs and one node: {steps} steps. Every",
        "invariant held after each. What the states mean is said in `src/coslice/core/group_state.py`; whose",
        "fault a failure is, in `src/coslice/core/swap_failed.py`.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> Empty",
    ]
    for source in KINDS:
        for target in KINDS:
            if edges[source, target]:
                lines.append(f"    {source} --> {target}: {'<br/>'.join(sorted(edges[source, target]))}")
    lines += ["```", "", "| from | event | to | effects | reasons |", "|---|---|---|---|---|"]
    order = {kind: i for i, kind in enumerate(KINDS)}
    for source, event_name, target in sorted(rows, key=lambda r: (order[r[0]], r[1], order[r[2]])):
        does, why = rows[source, event_name, target]
        lines.append(
            f"| {source} | {event_name} | {target} | {', '.join(sorted(does)) or '–'} | "
            f"{', '.join(f'`{w}`' for w in sorted(why)) or '–'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
