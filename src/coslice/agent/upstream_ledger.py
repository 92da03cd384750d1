"""Where the state of each process is that speaks the upstream workload channel: it does not say so itself
when it comes back, so the agent writes down what it orders before it orders it.

After a crash of the agent, or a stream that broke in the middle, an order has no answer. Then the process's
memory tells, as far as it can; ``UNSURE`` is what it cannot tell.
"""

import asyncio
from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from coslice.agent.members import Member
from coslice.agent.occupancy import NOTABLE
from coslice.agent.processes import alive
from coslice.store import Store
from coslice.store.codec import Codec
from coslice.store.slot import Slot

KEY = "upstream/channels"


class Place(StrEnum):
    HERE = "here"
    LEAVING = "leaving"
    """Told to leave; no answer."""
    AWAY = "away"
    RETURNING = "returning"
    """Told to come back; no answer."""
    UNSURE = "unsure"
    """Told to leave or to come, and nothing tells whether it did. A restore settles it."""


class Entry(Struct, frozen=True, kw_only=True):
    """One process. ``before``: bytes in use when it was told to leave, or to come back; ``freed``: what it
    gave up the last time it left."""

    group: str
    job: str
    pid: int
    started: int
    place: Place = Place.HERE
    before: int = 0
    freed: int = 0

    @property
    def settled(self) -> bool:
        return self.place in (Place.HERE, Place.AWAY)


class Book(Struct, frozen=True):
    entries: dict[str, Entry] = {}


CODEC = Codec(Book, kind="upstream-channels")


class Ledger:
    def __init__(self, store: Store, found: Mapping[str, tuple[bytes, int]]) -> None:
        """``found``: what the store held. Raises ``ConfigError`` if it is not ours to read."""
        self._slot = Slot(store, KEY, CODEC, found.get(KEY))
        self._entries = dict((self._slot.state() or Book()).entries)
        self._writing = asyncio.Lock()

    def of(self, member: Member) -> Entry:
        return self.get(member.group, member.job, member.pid, member.started)

    def get(self, group: str, job: str, pid: int, started: int) -> Entry:
        found = self._entries.get(_key(group, job, pid, started))
        return found or Entry(group=group, job=job, pid=pid, started=started)

    def living(self, group: str, job: str | None = None) -> list[Entry]:
        """Of processes that live, connected or not; of all jobs or of one."""
        entries = [e for e in self._entries.values() if e.group == group and job in (None, e.job)]
        return [e for e in entries if alive(e.pid, e.started)]

    async def put(self, entry: Entry) -> None:
        """Returns once it is written; only then may what it says be done."""
        self._entries[_key(entry.group, entry.job, entry.pid, entry.started)] = entry
        self._entries = {key: each for key, each in self._entries.items() if alive(each.pid, each.started)}
        async with self._writing:
            await self._slot.save(Book(dict(self._entries)))

    async def settle(self, entry: Entry, now: int) -> Entry:
        """Its process is back, and whatever it was told it has done by now; ``now``: bytes it uses."""
        if not entry.settled:
            place = judged(entry, now)
            if entry.place is Place.LEAVING and place is Place.AWAY:
                entry = replace(entry, freed=entry.before - now)
            entry = replace(entry, place=place)
            await self.put(entry)
        return entry


def _key(group: str, job: str, pid: int, started: int) -> str:
    return f"{group}/{job}/{pid}/{started}"


def judged(entry: Entry, now: int) -> Place:
    """By its memory: much of what it had is gone, or all is there that went the last time."""
    if entry.place is Place.RETURNING:
        rose = now - entry.before
        if entry.freed < NOTABLE or entry.freed // 10 <= rose < entry.freed // 2:
            return Place.UNSURE
        return Place.HERE if rose >= entry.freed // 2 else Place.AWAY
    if entry.place is not Place.LEAVING:
        return Place.UNSURE
    fell = entry.before - now
    usual = entry.freed or entry.before // 2
    if usual < NOTABLE:
        return Place.UNSURE
    if fell >= usual // 2:
        return Place.AWAY
    return Place.HERE if entry.freed and fell < entry.freed // 10 else Place.UNSURE
