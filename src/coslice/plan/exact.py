"""The best grouping of a few units: every set is predicted, every partition into allowed sets is compared.

What is maximised is useful duty over all accelerators used, a ratio: Σ computing ÷ Σ accelerators. With a
price λ for an accelerator it is a sum, Σ (computing − λ · accelerators), and the λ at which the best sum is
zero is the best ratio (Dinkelbach, Management Science 13 (1967) 492). ``best_partition`` solves the sum,
``planner`` moves λ.
"""

import itertools
from collections.abc import Callable, Sequence

from coslice.plan.batch import Table
from coslice.plan.judge import judge_fully

LIMIT = 10
"""Units up to which it is exact: 1,023 sets, 115,975 partitions."""
_FEW = 16
_FEW_SETS = 300
"""Also up to ``_FEW`` units, if no more sets than these are within the work bound."""
_LOAD = 1.02
"""The work bound holds for long runs; a little above it the prediction decides."""

Sets = dict[tuple[int, ...], float]
"""Allowed sets of units → weighted useful duty."""


def promising(
    table: Table, units: Sequence[int], *, may: Callable[[Sequence[int]], bool], max_jobs: int
) -> list[tuple[int, ...]] | None:
    """Sets of two and more within the static rules ``may`` and the work bound. None: too many for this."""
    if len(units) > _FEW:
        return None
    sets: list[tuple[int, ...]] = []
    for size in range(2, min(max_jobs, len(units)) + 1):
        sets += [
            members
            for members in itertools.combinations(units, size)
            if sum(table.duty[u] / table.bound[u] for u in members) <= _LOAD and may(members)
        ]
        if len(units) > LIMIT and len(sets) > _FEW_SETS:
            return None
    return sets


def allowed_sets(
    table: Table, units: Sequence[int], asked: Sequence[tuple[int, ...]]
) -> tuple[Sets, dict[tuple[int, ...], list[float]]]:
    """Those of ``asked`` that keep every bound, and every unit alone; and of the others, the slowdowns."""
    sets: Sets = {(unit,): float(table.weight[unit] * table.duty[unit]) for unit in units}
    failed: dict[tuple[int, ...], list[float]] = {}
    if asked:
        verdicts = judge_fully(table, asked)
        for row, members in enumerate(asked):
            if verdicts.ok[row]:
                sets[members] = float(verdicts.held[row])
            else:
                failed[members] = [float(x) for x in verdicts.slowdown[row, : len(members)]]
    return sets, failed


def best_partition(worth: Sets, units: Sequence[int]) -> list[tuple[int, ...]]:
    """The partition of ``units`` into the sets of ``worth`` with the largest sum of it. Dynamic programme
    over subsets: the first unit that is left goes into one of its sets."""
    place = {unit: number for number, unit in enumerate(units)}
    by_first: list[list[tuple[int, float, tuple[int, ...]]]] = [[] for _ in units]
    for members, value in worth.items():
        bits = sum(1 << place[unit] for unit in members)
        by_first[min(place[unit] for unit in members)].append((bits, value, members))
    full = (1 << len(units)) - 1
    best: dict[int, tuple[float, tuple[int, ...]]] = {full: (0.0, ())}

    def solve(done: int) -> float:
        if done in best:
            return best[done][0]
        first = next(number for number in range(len(units)) if not done >> number & 1)
        found: tuple[float, tuple[int, ...]] = (-float("inf"), ())
        for bits, value, members in by_first[first]:
            if not bits & done and (total := value + solve(done | bits)) > found[0]:
                found = (total, members)
        best[done] = found
        return found[0]

    solve(0)
    partition, done = [], 0
    while done != full:
        members = best[done][1]
        partition.append(members)
        done |= sum(1 << place[unit] for unit in members)
    return partition
