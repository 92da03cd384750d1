"""The least that has to change so that everybody in a group keeps the bound. Pure; may take a second.

In this order: nothing; another policy, so that turns come in another order; one job less, the newest that
suffices; two, and so on, always those that came last. Who came before never makes room for somebody who is
not admitted yet."""

import itertools
import math
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from coslice.admission.outlook import TURNS, Outlook, Player, alone, outlook, overloaded
from coslice.core.ids import JobId
from coslice.plan.rules import too_slow
from coslice.plan.units import Unit, unit_of

OTHERS = ("fair_share", "shortest", "reservation", "reservation:idle=0.5", "fifo")
FOR_PAIRS = ("reservation", "reservation:idle=0.5")
"""With two jobs there is never a choice when the lock becomes free: only who keeps it free makes a
difference."""
FOR_MANY = ("shortest", "reservation")
FEW = 4
"""Of more jobs than that, not every pair is tried without but the newest ones, and fewer policies."""


class Question(Struct, frozen=True, kw_only=True):
    """``players``: in the order in which they came. ``newcomers`` are among them, and not admitted yet."""

    players: tuple[Player, ...]
    newcomers: tuple[JobId, ...] = ()
    queued: tuple[JobId, ...] = ()
    """Members that wait at the door."""
    policy: str
    """In force now."""
    base: str
    """What is configured, or an operator set: preferred where it fits."""
    swap_s: float
    version: int = 0


class Plan(Struct, frozen=True, kw_only=True):
    keep: tuple[JobId, ...]
    drop: tuple[JobId, ...]
    """The newest first."""
    policy: str
    outlook: Outlook
    """Of those who stay."""
    now: Outlook | None
    """Of all of them under the policy in force; None: more than the accelerators have, not played."""
    why: str
    """Why all together, as they are, do not keep the bound; empty: they do."""


def arrange(question: Question) -> Plan:
    everybody = question.players
    now, why = _as_it_is(question)
    outside = {*question.newcomers, *question.queued}
    seated = tuple(player for player in everybody if player.job not in outside)
    stay: bool | None = None
    for some in _subsets(everybody, set(question.newcomers)):
        kept = {player.job for player in some}
        if kept & outside and any(player.job not in kept for player in seated):
            if stay is None:
                stay = _best(_in_doubt(seated, question), question, None) is not None
            if stay:
                continue  # nobody makes room for who is queued, if all others can stay
        judged = _in_doubt(some, question)
        found = _best(judged, question, now if judged == everybody else None)
        if found is None:
            continue
        return Plan(
            keep=tuple(player.job for player in some),
            drop=tuple(player.job for player in reversed(everybody) if player.job not in kept),
            policy=found.policy,
            outlook=found,
            now=now,
            why=why,
        )
    raise AssertionError("one job alone keeps every bound")


def _in_doubt(some: Sequence[Player], question: Question) -> tuple[Player, ...]:
    """As they are judged. What is known from few cycles must not move jobs to and fro: who is queued comes
    back if there is room for on-times that are one standard error longer, too; and for a member of which few
    cycles were seen nobody is queued who could stay if its on-times were one shorter."""
    jobs = {player.job for player in some}
    if jobs & set(question.queued):
        return tuple(replace(player, stretch=1.0 + player.error) for player in some)
    if jobs & set(question.newcomers):
        return tuple(some)
    return tuple(replace(p, stretch=1.0 - p.error) if p.few else p for p in some)


def _as_it_is(question: Question) -> tuple[Outlook | None, str]:
    everybody = question.players
    if len(everybody) > 1 and overloaded(everybody):
        total = sum(player.duty for player in everybody)
        bound = max(player.bound for player in everybody)
        return None, (
            f"together they would compute {total:.1%} of the time: that slows them down {total:.2f} x on "
            f"average, and the bound is {bound:.2f}"
        )
    now = outlook(everybody, policy=question.policy, swap_s=question.swap_s)
    return now, "" if now.fits(everybody) else words(everybody, now, question.swap_s)


def words(players: Sequence[Player], seen: Outlook, swap_s: float) -> str:
    """Who would be slowed down most, and by whom; as ``coslice plan`` says it."""
    victim = max(players, key=lambda player: seen.slowdown[player.job] / player.bound)
    if seen.slowdown[victim.job] <= victim.bound:
        victim = min(players, key=lambda player: seen.within[player.job])
        return (
            f"{1 - seen.within[victim.job]:.0%} of {victim.job}'s rolling means over ten steps would be "
            f"above its bound of {victim.bound:.2f} x (on average {seen.slowdown[victim.job]:.2f} x)"
        )
    if math.isinf(seen.slowdown[victim.job]):
        return (
            f"{victim.job}'s steps are so long beside the others' that not one was over when {TURNS} turns "
            "had been played"
        )
    unit = _unit(victim, swap_s)
    others = [_unit(player, swap_s) for player in players if player.job != victim.job]
    longest = max(others, key=lambda other: other.turn_s)
    return too_slow(unit, longest, (seen.slowdown[victim.job], 0.0))


def _unit(player: Player, swap_s: float) -> Unit:
    pool, half = player.profile.pools[0], swap_s / 2
    return unit_of(player.profile, pool, max_slowdown=player.bound, out_s=half, in_s=half)


def _best(some: Sequence[Player], question: Question, now: Outlook | None) -> Outlook | None:
    """Under a policy that keeps everybody's bound: the preferred one, or else where most is computed."""
    if len(some) < 2:
        return alone(some, question.base)
    if overloaded(some):
        return None
    others = FOR_PAIRS if len(some) == 2 else OTHERS if len(some) <= FEW else FOR_MANY
    first = dict.fromkeys((question.base, question.policy))
    for policy in first:
        seen = (
            now
            if now is not None and now.policy == policy
            else outlook(some, policy=policy, swap_s=question.swap_s)
        )
        if seen.fits(some):
            return seen
    played = [
        outlook(some, policy=policy, swap_s=question.swap_s) for policy in others if policy not in first
    ]
    fitting = [seen for seen in played if seen.fits(some)]
    return max(fitting, key=lambda seen: seen.useful_duty, default=None)


def _subsets(players: Sequence[Player], newcomers: set[JobId]) -> Iterator[tuple[Player, ...]]:
    """From all of them down to one, those that lack newer jobs first."""
    count = len(players)
    for less in range(count):
        if count <= FEW or less <= 1:
            absent: Iterator[tuple[int, ...]] = itertools.combinations(range(count - 1, -1, -1), less)
        else:
            absent = iter([tuple(range(count - 1, count - 1 - less, -1))])
        for missing in absent:
            gone = {players[k].job for k in missing}
            if gone - newcomers and newcomers - gone:
                continue  # nobody makes room for somebody who is not admitted yet
            yield tuple(player for player in players if player.job not in gone)
