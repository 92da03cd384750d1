"""Predictions in bulk for the search, and the bound: several starts count.

Where jobs begin relative to each other is chance, and with few regular jobs it may last; so a group has to
keep its bounds when all begin at once, as in ``coslice simulate``, and on average over other starts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coslice.plan.batch import Floats, Ints, Table, predict_many

_GOLDEN = 0.6180339887498949
_CHANCE = 1.01
_CHUNK = 4096
_STEP = 1.5
"""Groups whose turns differ by up to 2 to this power are played together."""
_LENGTHS = (
    (16, 200.0, 3, 20_000, True),
    (128, 60.0, 3, 1200, False),
    (1 << 62, 24.0, 3, 300, False),
)
"""How groups are judged while a plan is made: up to so many units in all, rounds, starts, most turns, and
whether exactly. Few units are played as long as ``coslice simulate`` lasts by default."""
_IN_THE_END = (200.0, 1, 4000, True)
_IN_THE_END_OF_MANY = (100.0, 1, 1500, True)
"""The groups of a plan of many units, once more, as ``coslice simulate`` plays them; of more than ``_MANY``,
half as long."""
_MANY = 500
MARGIN = 1.0
"""Slowdowns are compared with bound × this."""


class Verdicts:
    """Of some groups: do they keep the bounds, and how much do they compute?"""

    __slots__ = ("held", "ok", "slowdown", "swap", "useful")

    def __init__(self, groups: int, width: int) -> None:
        self.ok: npt.NDArray[np.bool_] = np.zeros(groups, dtype=bool)
        self.held: Floats = np.zeros(groups)
        """Weighted useful duty of each group; mean over the starts, as the next two."""
        self.useful: Floats = np.zeros((groups, width))
        """Useful duty of each member: of all the group's accelerators, also where it uses some only."""
        self.swap: Floats = np.zeros(groups)
        self.slowdown: Floats = np.zeros((groups, width))
        """The first start's; or the mean over all, less one per cent, if that is larger."""


Judge = Callable[[Table, Sequence[Sequence[int]]], Verdicts]


def judge_fully(table: Table, groups: Sequence[Sequence[int]]) -> Verdicts:
    """What a search goes by. The same for a group whenever it is asked for, and played once."""
    length = next(row for row in _LENGTHS if len(table.units) <= row[0])
    return _remembered(table, table.judged, groups, length[1:])


def judge_finally(table: Table, groups: Sequence[Sequence[int]]) -> Verdicts:
    """What a plan rests on: as long as ``coslice simulate``."""
    if len(table.units) <= _LENGTHS[0][0]:
        return judge_fully(table, groups)
    length = _IN_THE_END if len(table.units) <= _MANY else _IN_THE_END_OF_MANY
    return _remembered(table, table.judged_finally, groups, length)


def _remembered(
    table: Table,
    known: dict[tuple[int, ...], tuple[Any, int]],
    groups: Sequence[Sequence[int]],
    length: tuple[float, int, int, bool],
) -> Verdicts:
    new = [group for group in dict.fromkeys(map(tuple, groups)) if group not in known]
    if new:
        rounds, starts, most, exactly = length
        seen = judge(table, new, rounds=rounds, starts=starts, most=most, exactly=exactly)
        for row, group in enumerate(new):
            known[group] = (seen, row)
    found = Verdicts(len(groups), max(map(len, groups)))
    for number, some in enumerate(groups):
        seen, row = known[tuple(some)]
        width = len(some)
        found.ok[number], found.held[number], found.swap[number] = (
            seen.ok[row],
            seen.held[row],
            seen.swap[row],
        )
        found.useful[number, :width] = seen.useful[row, :width]
        found.slowdown[number, :width] = seen.slowdown[row, :width]
    return found


def judge(
    table: Table,
    groups: Sequence[Sequence[int]],
    *,
    rounds: float,
    starts: int,
    most: int,
    exactly: bool = False,
) -> Verdicts:
    """``rounds``: so many cycles of the slowest member are played, in at most ``most`` turns; ``starts``: how
    many different ones. ``exactly``: over the same seconds as ``coslice simulate``."""
    width = max(map(len, groups))
    padded = np.full((len(groups), width), -1, dtype=np.int64)
    for row, group in enumerate(groups):
        padded[row, : len(group)] = group
    found = Verdicts(len(groups), width)
    for rows, turns in _batches(table, padded, rounds, most):
        some = padded[rows]
        unit = np.where(some >= 0, some, 0)
        weight = np.where(some >= 0, table.weight[unit], 0.0).max(axis=1)
        bound = np.where(some >= 0, table.bound[unit], np.inf)
        begin = np.concatenate([_starts(table, unit, number) for number in range(starts)])
        until = np.where(some >= 0, table.period[unit], 0.0).max(axis=1) * rounds if exactly else None
        seen = predict_many(
            table,
            np.tile(some, (starts, 1)),
            turns=turns,
            starts=begin,
            until=None if until is None else np.tile(until, starts),
        )
        slowdown = seen.slowdown.reshape(starts, *some.shape)
        found.slowdown[rows] = np.maximum(slowdown[0], slowdown.mean(axis=0) / _CHANCE)
        found.useful[rows] = seen.held.reshape(starts, *some.shape).mean(axis=0)
        found.useful[rows] *= np.where(table.sized[unit], table.weight[unit] / weight[:, None], 1.0)
        found.held[rows] = found.useful[rows].sum(axis=1) * weight
        found.swap[rows] = seen.swap.reshape(starts, len(some)).mean(axis=0)
        found.ok[rows] = (found.slowdown[rows] <= bound * MARGIN).all(axis=1)
    return found


def _starts(table: Table, unit: Ints, number: int) -> Floats:
    """Number 0: all at once. Later ones spread the members over the longest period."""
    members = np.arange(unit.shape[1])[None, :]
    longest = table.period[unit].max(axis=1)[:, None]
    spread: Floats = ((members + 1) * number * _GOLDEN) % 1.0 * longest * (number > 0)
    return spread


def _batches(table: Table, padded: Ints, rounds: float, most: int) -> list[tuple[Ints, int]]:
    """Rows that need about as many turns together, so that few are played in vain; closed groups, which need
    less work, by themselves; and no more at once than stays in the processor's cache."""
    present = padded >= 0
    unit = np.where(present, padded, 0)
    turns_a_second = np.where(present, table.length[unit] / table.rounds[unit] / table.period[unit], 0.0)
    needed = turns_a_second.sum(axis=1) * np.where(present, table.period[unit], 0.0).max(axis=1) * rounds
    needed = np.minimum(np.ceil(needed), most).astype(np.int64)
    size = np.ceil(np.log2(np.maximum(needed, 64)) / _STEP).astype(np.int64)
    kind = 2 * size + (present & table.buffered[unit]).any(axis=1)
    found = []
    for value in np.unique(kind):
        rows = np.nonzero(kind == value)[0]
        # Depends on the group alone, not on who is judged with it. (A play that ends by time ends sooner.)
        turns = min(most, int(2.0 ** (_STEP * (value // 2))))
        found += [(rows[first : first + _CHUNK], turns) for first in range(0, len(rows), _CHUNK)]
    return found
