"""What every ``Store`` has to do, as tests. Subclass in a test module and say how a store is made::

    class TestMyStore(StoreContract):
        durable = True

        @pytest.fixture
        def location(self, tmp_path):
            return tmp_path / "state"

        def make(self, location):
            return MyStore(location)

``make`` is called again with the same location to reopen. Needs pytest and pytest-asyncio (auto mode).
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from coslice.store.base import Conflict, Store, StoreError


class StoreContract:
    durable: ClassVar[bool]
    """What was saved is there when a new store object is made at the location."""
    writes_on_opening: ClassVar[bool] = False
    """It writes what is there anew as it opens, so that a predecessor cannot any more: versions move on."""

    def make(self, location: Any) -> Store:
        raise AssertionError("say how your store is made")

    @pytest.fixture
    def location(self) -> Any:
        return None

    @pytest.fixture
    async def store(self, location: Any) -> AsyncIterator[Store]:
        store = self.make(location)
        await store.load()
        yield store
        await store.close()

    async def test_new_store_is_empty(self, store: Store) -> None:
        assert await store.load() == {}

    async def test_what_was_saved_is_loaded(self, store: Store) -> None:
        values = {"b": b"", "a": b"\x00\xff" * 50_000, "c/ü": b"{}"}
        versions = {key: await store.save(key, value, expect=0) for key, value in values.items()}
        loaded = await store.load()
        assert loaded == {key: (value, versions[key]) for key, value in values.items()}
        assert list(loaded) == sorted(values)

    async def test_versions_are_positive_and_never_repeat(self, store: Store) -> None:
        seen: list[int] = []
        for _ in range(3):
            version = await store.save("key", b"1", expect=0)
            again = await store.save("key", b"1", expect=version)
            await store.delete("key", expect=again)
            seen += [version, again]
        assert seen[0] > 0
        assert seen == sorted(set(seen))

    async def test_a_save_needs_the_current_version(self, store: Store) -> None:
        first = await store.save("key", b"1", expect=0)
        second = await store.save("key", b"2", expect=first)
        for wrong in (0, first, second + 1):
            with pytest.raises(Conflict) as told:
                await store.save("key", b"lost", expect=wrong)
            assert told.value.data == {"key": "key", "expected": str(wrong), "found": str(second)}
        assert await store.load() == {"key": (b"2", second)}

    async def test_a_save_of_nothing_known_conflicts(self, store: Store) -> None:
        with pytest.raises(Conflict):
            await store.save("key", b"1", expect=7)
        assert await store.load() == {}

    async def test_a_delete_needs_the_current_version(self, store: Store) -> None:
        version = await store.save("key", b"1", expect=0)
        with pytest.raises(Conflict):
            await store.delete("key", expect=version + 1)
        with pytest.raises(Conflict):
            await store.delete("other", expect=1)
        await store.delete("key", expect=version)
        assert await store.load() == {}
        with pytest.raises(Conflict):
            await store.delete("key", expect=version)

    async def test_of_concurrent_saves_one_wins(self, store: Store) -> None:
        results = await asyncio.gather(
            *(store.save("key", str(n).encode(), expect=0) for n in range(20)), return_exceptions=True
        )
        won = [(n, result) for n, result in enumerate(results) if isinstance(result, int)]
        assert len(won) == 1
        assert all(isinstance(result, (int, Conflict)) for result in results)
        assert await store.load() == {"key": (str(won[0][0]).encode(), won[0][1])}

    async def test_a_conflict_does_not_harm_its_neighbours(self, store: Store) -> None:
        keys = [f"key-{n:03}" for n in range(250)]
        results = await asyncio.gather(
            *(store.save(key, key.encode(), expect=0 if n % 3 else 99) for n, key in enumerate(keys)),
            return_exceptions=True,
        )
        assert [isinstance(result, Conflict) for result in results] == [not n % 3 for n in range(250)]
        assert list(await store.load()) == [key for n, key in enumerate(keys) if n % 3]

    async def test_concurrent_save_and_delete_are_one_after_the_other(self, store: Store) -> None:
        version = await store.save("key", b"old", expect=0)
        _, second = await asyncio.gather(
            store.delete("key", expect=version), store.save("key", b"new", expect=0), return_exceptions=True
        )
        assert await store.load() == {"key": (b"new", second)}

    async def test_many_writers_each_in_order(self, store: Store) -> None:
        async def write(key: str) -> int:
            version = 0
            for n in range(20):
                version = await store.save(key, str(n).encode(), expect=version)
            return version

        keys = [f"key-{n:02}" for n in range(20)]
        versions = await asyncio.gather(*map(write, keys))
        assert await store.load() == {
            key: (b"19", version) for key, version in zip(keys, versions, strict=True)
        }

    async def test_a_cancelled_save_leaves_the_store_usable(self, store: Store) -> None:
        saving = asyncio.ensure_future(store.save("key", b"1", expect=0))
        await asyncio.sleep(0)
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)
        found = (await store.load()).get("key", (b"", 0))[1]
        assert await store.save("key", b"2", expect=found) > found

    async def test_closed_is_closed(self, location: Any) -> None:
        store = self.make(location)
        await store.load()
        last = asyncio.ensure_future(store.save("key", b"1", expect=0))
        await asyncio.sleep(0)
        await store.close()
        assert await last > 0  # accepted before, so finished
        await store.close()
        with pytest.raises(StoreError):
            await store.save("key", b"2", expect=0)
        with pytest.raises(StoreError):
            await store.delete("key", expect=1)
        with pytest.raises(StoreError):
            await store.load()

    async def test_a_new_store_finds_what_was_saved(self, location: Any) -> None:
        store = self.make(location)
        await store.load()
        version = await store.save("key", b"1", expect=0)
        await store.close()
        again = self.make(location)
        found = await again.load()
        assert [(key, value) for key, (value, _) in found.items()] == (
            [("key", b"1")] if self.durable else []
        )
        if self.durable:
            (_, now) = found["key"]
            assert now > version if self.writes_on_opening else now == version
            assert await again.save("key", b"2", expect=now) > now
        await again.close()
