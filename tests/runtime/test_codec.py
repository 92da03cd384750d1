"""Saved state: read back as it was, upgraded where it is old, refused by name where it is not understood."""

import pytest
from msgspec import Struct

from coslice.errors import ConfigError
from coslice.store import MemoryStore, SqliteStore, make_store
from coslice.store.base import Conflict
from coslice.store.codec import Codec
from coslice.store.slot import Slot


class Old(Struct, frozen=True):
    who: str


class New(Struct, frozen=True):
    name: str
    age: int = 0


OLD = Codec(Old, kind="person")
NEW = Codec(New, kind="person", schema=2, upgrades={1: lambda plain: {"name": plain["who"]}})


def test_read_back_and_upgraded() -> None:
    assert NEW.decode(NEW.encode(New("ada", 36))) == New("ada", 36)
    assert NEW.decode(OLD.encode(Old("ada"))) == New("ada")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a saved state"),
        (b"\x80\x04garbage", "not a saved state"),
        (Codec(Old, kind="dog").encode(Old("rex")), "of a 'dog', not of a 'person'"),
        (Codec(Old, kind="person", schema=3).encode(Old("ada")), "has schema 3 .* knows up to 2"),
        (Codec(Old, kind="person", schema=2).encode(Old("ada")), "damaged"),
        (Codec(Old, kind="person", schema=0).encode(Old("ada")), "no way from schema 0"),
    ],
)
def test_what_cannot_be_understood_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NEW.decode(data)


async def test_a_slot_writes_only_what_changed_and_only_over_what_it_knows() -> None:
    store = MemoryStore()
    slot = Slot(store, "ada", NEW)
    assert slot.state() is None
    await slot.save(New("ada", 1))
    await slot.save(New("ada", 2))
    (_, version) = (await store.load())["ada"]
    await slot.save(New("ada", 2))
    assert (await store.load())["ada"][1] == version
    other = Slot(store, "ada", NEW, (await store.load())["ada"])
    assert other.state() == New("ada", 2)
    await other.save(New("ada", 3))
    with pytest.raises(Conflict):
        await slot.save(New("ada", 4))
    await other.delete()
    assert await store.load() == {}


def test_a_location_says_which_store() -> None:
    assert isinstance(make_store(":memory:"), MemoryStore)
    assert isinstance(make_store("some/state.db"), SqliteStore)
