"""Who leads and who stands by, as far as the place where the state is answers."""

import pytest

from coslice.errors import ConfigError
from coslice.orchestrator.roster import FRESH_S, Roster
from coslice.store import Seat, Tenure
from coslice.store.base import StoreError
from coslice.store.election import Alone
from coslice.store.memory import MemoryStore

ME = Seat("me:1", id="me")


class Known(Alone):
    """Knows whom it is told."""

    def __init__(self, *seats: Seat) -> None:
        super().__init__(MemoryStore())
        self.seats, self.asked, self.away = list(seats), 0, False
        self.why: Exception = StoreError("away")

    async def candidates(self) -> list[Seat]:
        self.asked += 1
        if self.away:
            raise self.why
        return self.seats

    def lease_left(self) -> float:
        return 3.5


class Time:
    at = 100.0

    def now(self) -> float:
        return self.at


async def told(roster: Roster) -> list[str]:
    return [one.address for one in await roster.status() if not one.leads]


async def test_the_leader_is_told_first_then_who_stands_by() -> None:
    time = Time()
    known = Known(Seat("z:1", id="z"), ME, Seat("a:1", id="a"), Seat("", id="a backup"))
    roster = Roster(known, ME, Tenure(7), time)
    time.at += 60
    leader, *others = await roster.status()
    assert (leader.address, leader.leads, leader.since_s, leader.term) == ("me:1", True, 60.0, 7)
    assert leader.lease_left_s == 3.5
    assert [(one.address, one.leads) for one in others] == [("a:1", False), ("z:1", False)]


async def test_one_that_is_gone_is_told_no_longer_and_nobody_is_asked_too_often() -> None:
    time, known = Time(), Known(ME, Seat("a:1", id="a"))
    roster = Roster(known, ME, Tenure(), time)
    for _ in range(5):
        assert await told(roster) == ["a:1"]
    assert known.asked == 1
    time.at += FRESH_S
    known.away = True
    assert await told(roster) == ["a:1"], "nobody knows better"
    time.at += FRESH_S
    known.away, known.seats = False, [ME]
    assert await told(roster) == []


@pytest.mark.parametrize("why", [StoreError("away"), ConfigError("the password cannot be read")])
async def test_how_many_stand_by_is_unknown_until_somebody_could_say(why: Exception) -> None:
    time, known = Time(), Known(ME, Seat("a:1", id="a"))
    known.away, known.why = True, why
    roster = Roster(known, ME, Tenure(), time)
    assert await told(roster) == []
    assert roster.standbys is None
    time.at += FRESH_S
    known.away = False
    await roster.refresh()
    assert roster.standbys == 1
    time.at += FRESH_S
    known.away = True
    await roster.refresh()
    assert roster.standbys == 1, "nobody knows better"
