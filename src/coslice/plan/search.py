"""Grouping of many units: promising edges only, maximum-weight matching, merging of groups, local search.

Round by round, as Muri does (SIGCOMM '22): match units to pairs, then pairs to fours, and so on. An edge's
weight is what the merger is worth: computing lost to waiting (≤ 0) plus the accelerators it saves, at their
price.
"""

import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import rustworkx
from msgspec import Struct

from coslice.plan.batch import Floats, Ints, Table
from coslice.plan.judge import judge, judge_finally, judge_fully
from coslice.plan.settle import Members, settle

BLOCK = 400
"""Groups matched at once: the time grows with more than the square, and partners have similar periods."""
SPAN = 128
"""Neighbours, by period, among which a unit's candidates are sought."""
_ROUNDS, _STARTS, _MOST = 10.0, 1, 64
_LOAD = 1.02
"""As in ``exact``: a little above the work bound the prediction decides."""
_BEST = 2
_TRIES, _LOOKS, _PATIENCE = 300, 24, 12
"""Moves that are tried at once; groups looked at for one unit; rounds without success before it ends."""

Allowed = Callable[[Members], bool]


class Searched(Struct):
    """``held`` is weighted useful duty; ``refused``: pairs of units that were predicted and failed.
    ``plans``: the best ones, and the one that the local search began with."""

    groups: list[Members]
    held: dict[Members, float]
    refused: dict[Members, tuple[float, ...]]
    edges: int = 0
    moves: int = 0
    plans: Sequence[list[Members]] = ()


def search(
    table: Table,
    units: Sequence[int],
    *,
    may: Allowed,
    max_jobs: int,
    price: float,
    deadline: float,
    seed: int,
    beside: tuple[float, float] = (0.0, 0.0),
) -> Searched:
    """``price``: of an accelerator, in useful duty. ``deadline``: of the local search, on ``time.monotonic``;
    the groups are sound whenever it ends, and no worse than those of an earlier end. ``beside``: weighted
    useful duty and accelerators of those who are alone anyway."""
    held: dict[Members, float] = {(unit,): float(table.weight[unit] * table.duty[unit]) for unit in units}
    found = Searched([(unit,) for unit in units], held, {})
    size = 1
    while size < max_jobs and _merge(table, found, may, max_jobs, price):
        size *= 2
    _verify(table, found)
    if _merge(table, found, may, max_jobs, price):  # what verification set free may find others
        _verify(table, found)
    seen = _local(table, found, may, max_jobs, price, deadline, random.Random(seed))
    found.plans = _best(table, found, seen, beside)
    return found


# ── one round of matching ──────────────────────────────────────────────────


def _merge(table: Table, found: Searched, may: Allowed, max_jobs: int, price: float) -> int:
    """Returns how many mergers there were."""
    groups = found.groups
    pairs = [
        (i, j)
        for i, j in _candidates(table, groups)
        if len(groups[i]) + len(groups[j]) <= max_jobs
        and (union := _join(groups[i], groups[j])) not in found.refused
        and may(union)
    ]
    if not pairs:
        return 0
    unions = [_join(groups[i], groups[j]) for i, j in pairs]
    verdicts = judge(table, unions, rounds=_ROUNDS, starts=_STARTS, most=_MOST)
    found.edges += len(pairs)
    edges: list[tuple[int, int, float]] = []
    for row, ((i, j), union) in enumerate(zip(pairs, unions, strict=True)):
        if not verdicts.ok[row]:
            found.refused[union] = tuple(float(x) for x in verdicts.slowdown[row, : len(union)])
            continue
        held = found.held[union] = float(verdicts.held[row])
        saved = price * (_weight(table, groups[i]) + _weight(table, groups[j]) - _weight(table, union))
        if (worth := held - found.held[groups[i]] - found.held[groups[j]] + saved) > 0:
            edges.append((i, j, worth))
    matched = _match(edges, _order(table, groups))
    taken = {number for pair in matched for number in pair}
    found.groups = [_join(groups[i], groups[j]) for i, j in matched] + [
        group for number, group in enumerate(groups) if number not in taken
    ]
    return len(matched)


def _match(edges: list[tuple[int, int, float]], order: Ints) -> list[tuple[int, int]]:
    """Maximum-weight matching, block by block of groups that are near in ``order``."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    blocks: dict[int, list[tuple[int, int, float]]] = {}
    for i, j, worth in edges:
        if (block := int(place[i]) // BLOCK) == int(place[j]) // BLOCK:
            blocks.setdefault(block, []).append((i, j, worth))
    pairs: list[tuple[int, int]] = []
    for block in sorted(blocks):
        pairs += _match_block(blocks[block])
    taken = {number for pair in pairs for number in pair}
    for i, j, _ in sorted(edges, key=lambda edge: -edge[2]):  # across blocks, the best first
        if i not in taken and j not in taken:
            pairs.append((i, j))
            taken |= {i, j}
    return pairs


def _match_block(edges: list[tuple[int, int, float]]) -> list[tuple[int, int]]:
    names = sorted({number for i, j, _ in edges for number in (i, j)})
    index = {name: number for number, name in enumerate(names)}
    graph: rustworkx.PyGraph[int, int] = rustworkx.PyGraph(multigraph=False)
    graph.add_nodes_from(names)
    graph.add_edges_from([(index[i], index[j], max(1, round(worth * 1e6))) for i, j, worth in edges])
    matched = rustworkx.max_weight_matching(graph, weight_fn=int)
    return sorted((min(names[a], names[b]), max(names[a], names[b])) for a, b in matched)


def _weight(table: Table, group: Members) -> float:
    return max(float(table.weight[unit]) for unit in group)


# ── candidates ─────────────────────────────────────────────────────────────


class _Features:
    """Of each group: load (Σ duty ÷ bound), duty, longest period and turn, and the room of its most delicate
    member: the off-time of the closed one with the least."""

    def __init__(self, table: Table, groups: Sequence[Members]) -> None:
        turn, room = unit_blocks(table)
        longest = [max(group, key=lambda unit: table.period[unit]) for group in groups]
        self.load = np.array([sum(table.duty[u] / table.bound[u] for u in group) for group in groups])
        self.weight = np.array([_weight(table, group) for group in groups])
        self.duty = np.array([sum(table.duty[u] for u in group) for group in groups])
        self.period = np.array([table.period[u] for u in longest])
        self.turn = np.array([max(turn[u] for u in group) for group in groups])
        self.room = np.array([min(room[u] for u in group) for group in groups])
        self.bound = np.array([min(table.bound[u] for u in group) for group in groups])
        self.move = np.array([max(table.out_s[u] + table.in_s[u] for u in group) for group in groups])


def unit_blocks(table: Table) -> tuple[Floats, Floats]:
    """Of each unit: the mean of its turns, and its off-time per cycle (infinite if it is buffered)."""
    turn = table.duty * table.period / (table.length / table.rounds)
    off = (1.0 - table.duty) * table.period
    room: Floats = np.where(table.buffered, np.inf, off)
    return turn, room


def _order(table: Table, groups: Sequence[Members]) -> Ints:
    """By size, and among equals by period: partners of one size waste no accelerators."""
    period = [max(float(table.period[u]) for u in group) for group in groups]
    return np.lexsort((period, [_weight(table, group) for group in groups]))


def _candidates(table: Table, groups: Sequence[Members]) -> list[tuple[int, int]]:
    """Few pairs per group, that an estimate says may work: those that fill the accelerators best, and some at
    random so that not everybody wants the same partner."""
    load = np.array([sum(table.duty[u] / table.bound[u] for u in group) for group in groups])
    open_to = np.nonzero(load + load.min() <= _LOAD)[0]
    count = len(open_to)
    if count < 2:
        return []
    some = [groups[int(number)] for number in open_to]
    few = 12 if count <= 300 else 6 if count <= 2000 else 4
    order = _order(table, some)
    features = _Features(table, some)
    span = min(SPAN if count <= 500 else SPAN // 2, count - 1)
    left = np.repeat(order, span)
    shift = np.tile(np.arange(1, span + 1), count) + np.repeat(np.arange(count), span)
    inside = shift < count
    left, right = left[inside], order[shift[inside]]
    fill = features.load[left] + features.load[right]
    rough = fill <= _LOAD
    left, right, fill = left[rough], right[rough], fill[rough]
    slow = _estimate(features, left, right)
    good = slow <= 1.05
    left, right, fill = left[good], right[good], fill[good]
    if not len(left):
        return []
    noise = np.random.default_rng(len(left)).random(len(left))
    both = np.concatenate([left, right]), np.concatenate([right, left])
    chosen = np.zeros(len(left), dtype=bool)
    weight = features.weight
    same = np.minimum(weight[left], weight[right]) / np.maximum(weight[left], weight[right])
    for key in (-fill - 2 * same, noise - 2 * same):
        ranked = np.lexsort((np.concatenate([key, key]), both[0]))
        owner = both[0][ranked]
        begin = np.concatenate([[True], owner[1:] != owner[:-1]])
        rank = np.arange(len(owner)) - np.maximum.accumulate(np.where(begin, np.arange(len(owner)), 0))
        chosen[ranked[rank < few] % len(left)] = True
    return [(int(open_to[i]), int(open_to[j])) for i, j in zip(left[chosen], right[chosen], strict=True)]


def _estimate(features: _Features, left: Ints, right: Ints) -> Floats:
    """Roughly the larger slowdown ÷ its bound: the work bound with two changes of hands in the longer cycle,
    and the wait of the short one for the long turn, if it finds no room in its off-time."""
    period = np.maximum(features.period[left], features.period[right])
    swap = features.move[left] + features.move[right]
    load = features.duty[left] + features.duty[right] + swap / period
    slow = np.maximum(1.0, load) / np.minimum(features.bound[left], features.bound[right])
    for one, other in ((left, right), (right, left)):
        wait = np.maximum(0.0, features.turn[other] + swap - features.room[one])
        share = np.minimum(0.9, wait / np.maximum(features.period[other], features.period[one]))
        slow = np.maximum(slow, 1.0 / (1.0 - share) / features.bound[one])
    found: Floats = slow
    return found


# ── making sure, and improving ─────────────────────────────────────────────


def _verify(table: Table, found: Searched) -> None:
    left = settle(table, found.groups, judge_fully)
    found.held.update(left.held)
    found.refused.update(left.refused)
    found.groups = [part for group in found.groups for part in left.becomes[group]]


def _best(
    table: Table, found: Searched, seen: Sequence[list[Members]], beside: tuple[float, float]
) -> list[list[Members]]:
    """Of the plans that were seen, each group played in full by now, the best; and the first."""
    left = settle(table, [group for plan in seen for group in plan], judge_finally)
    found.held.update(left.held)
    found.refused.update(left.refused)
    plans = [[part for group in plan for part in left.becomes[group]] for plan in seen]

    def duty(plan: list[Members]) -> float:
        held, weight = beside
        held += sum(found.held[group] for group in plan)
        return held / (weight + sum(_weight(table, group) for group in plan))

    ranked = sorted(plans, key=duty, reverse=True)
    best = ranked[:_BEST]
    return best if plans[0] in best else [*best, plans[0]]


def _local(
    table: Table,
    found: Searched,
    may: Allowed,
    max_jobs: int,
    price: float,
    deadline: float,
    rng: random.Random,
) -> list[list[Members]]:
    """Change a few groups where that is worth more; many tries at a time. Returns the plans that came of it,
    with the first."""
    seen = [found.groups]
    load = table.duty / table.bound
    idle = 0
    while len(found.groups) > 1 and idle < _PATIENCE and time.monotonic() < deadline:
        tries = _tries(found.groups, load, may, max_jobs, rng)
        wanted = list(
            dict.fromkeys(group for _, after in tries for group in after if group not in found.held)
        )
        if wanted:
            verdicts = judge_fully(table, wanted)
            for row, group in enumerate(wanted):
                found.held[group] = float(verdicts.held[row]) if verdicts.ok[row] else -np.inf

        def worth(groups: Sequence[Members]) -> float:
            return sum(found.held[group] - price * _weight(table, group) for group in groups)

        gains = [(worth(after) - worth(before), before, after) for before, after in tries]
        gains.sort(key=lambda gain: -gain[0])
        touched: set[Members] = set()
        added: list[Members] = []
        for gain, before, after in gains:
            if gain > 1e-9 and not touched & set(before):
                touched |= set(before)
                added += after
                found.moves += 1
        if touched:
            found.groups = [group for group in found.groups if group not in touched] + added
            seen.append(found.groups)
        idle = 0 if touched else idle + 1
    return seen


Move = tuple[tuple[Members, ...], tuple[Members, ...]]
"""Groups that go, and those that come in their place."""


def _tries(
    groups: list[Members], load: Floats, may: Allowed, max_jobs: int, rng: random.Random
) -> list[Move]:
    total = {group: float(sum(load[unit] for unit in group)) for group in groups}
    roomy = [group for group in groups if total[group] < _LOAD]
    moves: list[Move] = []
    for number in range(_TRIES):
        kind = number % 3
        move = (
            _dissolve(rng.choice(groups), roomy, total, load, rng)
            if kind == 0
            else _exchange(*rng.sample(groups, 2), both=kind == 1, rng=rng)
        )
        if move is not None and all(
            len(group) <= max_jobs and sum(load[unit] for unit in group) <= _LOAD and may(group)
            for group in move[1]
        ):
            moves.append(move)
    return moves


def _dissolve(
    group: Members, roomy: Sequence[Members], total: dict[Members, float], load: Floats, rng: random.Random
) -> Move | None:
    """Every member into another group that has room for it; so one group less is needed."""
    grown: dict[Members, Members] = {}
    for unit in group:
        fitting = [
            other
            for other in rng.sample(roomy, min(_LOOKS, len(roomy)))
            if other != group and other not in grown and total[other] + load[unit] <= _LOAD
        ]
        if not fitting:
            return None
        home = max(fitting, key=lambda other: total[other])
        grown[home] = _join(home, (unit,))
    return (group, *grown), tuple(grown.values())


def _exchange(one: Members, other: Members, *, both: bool, rng: random.Random) -> Move:
    """A unit of one group for one of the other; or it just moves over."""
    unit, rest = _take(one, rng)
    if not both:
        grown = _join(other, (unit,))
        return (one, other), ((rest, grown) if rest else (grown,))
    partner, remains = _take(other, rng)
    return (one, other), (_join(rest, (partner,)), _join(remains, (unit,)))


def _join(one: Members, other: Members) -> Members:
    return tuple(sorted(one + other))


def _take(group: Members, rng: random.Random) -> tuple[int, Members]:
    place = rng.randrange(len(group))
    return group[place], group[:place] + group[place + 1 :]
