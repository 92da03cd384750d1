"""What jobs would do to each other in one group: played together, by the lock's own core. Pure.

The same as ``coslice simulate``, for so long that the slowest job goes through ``CYCLES`` cycles. Where jobs
stand relative to each other is chance and, with few regular jobs, may last: all begin at once, and then once
more apart. ``coslice plan`` predicts the same with arithmetic of its own, which is compared with this.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from coslice.core.ids import JobId
from coslice.profile.model import Profile
from coslice.simulate.engine import Engine
from coslice.simulate.from_profile import job_of
from coslice.simulate.report import report, rolling
from coslice.simulate.spec import Drift, Pool, Scenario, whole_swap

CYCLES = 40.0
TURNS = 1500
"""At most so many turns are played."""
WARMUP = 0.1
ENOUGH = 0.99
"""So many of the rolling means of a job's slowdown over ten steps have to keep the bound."""
_GOLDEN = 0.6180339887498949
_CLOSE = 1e-6


class Player(Struct, frozen=True, kw_only=True):
    job: JobId
    profile: Profile
    bound: float
    correction: float = 1.0
    """What was measured ÷ what was predicted, where that was more."""
    error: float = 0.0
    """Standard error of its mean on-time ÷ that."""
    few: bool = False
    """It was measured over few cycles."""
    stretch: float = 1.0
    """Its on-times are played so many times as long."""

    @property
    def duty(self) -> float:
        pool = self.profile.pools[0]
        return pool.duty * self.stretch


class Outlook(Struct, frozen=True, kw_only=True):
    policy: str
    slowdown: dict[str, float]
    """Of each job, on average; of the worse start."""
    within: dict[str, float]
    """Share of its rolling means over ten steps within its bound; of the worse start."""
    useful_duty: float

    def fits(self, players: Sequence[Player]) -> bool:
        return all(self.keeps(player) for player in players)

    def keeps(self, player: Player) -> bool:
        job = player.job
        return self.slowdown[job] <= player.bound + _CLOSE and self.within[job] >= ENOUGH


def alone(players: Sequence[Player], policy: str) -> Outlook:
    """Of one job, or of none."""
    names = [player.job for player in players]
    duty = sum(player.duty for player in players)
    return Outlook(
        policy=policy,
        slowdown=dict.fromkeys(names, 1.0),
        within=dict.fromkeys(names, 1.0),
        useful_duty=duty,
    )


def overloaded(players: Sequence[Player]) -> bool:
    """The work bound: they ask for more than there is, whoever goes first (``core.duty``)."""
    return sum(player.duty / player.bound for player in players) > 1.0 + _CLOSE


def outlook(players: Sequence[Player], *, policy: str, swap_s: float) -> Outlook:
    """``swap_s``: seconds of one change of hands."""
    if len(players) < 2:
        return alone(players, policy)
    together = _play(players, policy, swap_s, apart=False)
    if not together.fits(players):
        return together  # one start suffices to say no
    played = [together, _play(players, policy, swap_s, apart=True)]
    names = [player.job for player in players]
    return Outlook(
        policy=policy,
        slowdown={name: max(one.slowdown[name] for one in played) for name in names},
        within={name: min(one.within[name] for one in played) for name in names},
        useful_duty=sum(one.useful_duty for one in played) / len(played),
    )


def _play(players: Sequence[Player], policy: str, swap_s: float, *, apart: bool) -> Outlook:
    periods = [max(1e-9, player.profile.pools[0].period.mean) for player in players]
    turns = sum(1.0 / period for period in periods)
    until = min(CYCLES * max(periods), TURNS / turns)
    jobs = [
        replace(
            job_of(
                player.profile,
                name=player.job,
                seed=number,
                arrival=number * _GOLDEN % 1.0 * periods[number] if apart else 0.0,
            ),
            drift=(Drift(0.0, player.stretch, "on"),) if player.stretch != 1.0 else (),
        )
        for number, player in enumerate(players)
    ]
    engine = Engine(
        Scenario(
            pools=(Pool(name="pool"),),
            jobs=tuple(jobs),
            cost=whole_swap(swap_s),
            policy=policy,
            until=until,
            warmup=WARMUP * until,
        )
    )
    engine.run()
    told = report(engine, policy=policy)
    slowdown: dict[str, float] = {}
    within: dict[str, float] = {}
    for player in players:
        mine = told.jobs.get(player.job)
        slowdown[player.job] = mine.slowdown * player.correction if mine is not None else float("inf")
        within[player.job] = _within(engine, player)
    return Outlook(policy=policy, slowdown=slowdown, within=within, useful_duty=told.useful_duty)


def _within(engine: Engine, player: Player) -> float:
    run = engine.runs[player.job]
    ends, solo = [run.arrival, *run.ends], [0.0, *run.alone().ends]
    first = next((k for k, end in enumerate(ends) if end >= engine.scenario.warmup), len(ends))
    if len(ends) - first < 2:
        return 0.0
    means = rolling(ends[first:], solo[first : len(ends)])
    kept = sum(mean * player.correction <= player.bound + _CLOSE for mean in means)
    return kept / len(means)
