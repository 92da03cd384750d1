"""What survived is looked at no more; new circles go all the same, old ones once many sessions ended."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from coslice.runtime.heap import ENDED, SESSION, STEPS, Heap


class Circle:
    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Nothing is collected, and so nothing gets old, but by what is tested."""
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


async def test_what_is_new_is_collected_after_so_many_steps_and_what_survives_is_set_apart() -> None:
    heap, kept, circle = Heap(), Circle(), Circle()
    gone = weakref.ref(circle)
    del circle
    heap.began()
    for _ in range(STEPS - SESSION):
        heap.stepped()
    await asyncio.sleep(0)
    assert gone() is None
    assert not any(each is kept for each in gc.get_objects()), "it would be looked at again"


async def test_circles_of_what_was_set_apart_go_once_as_many_sessions_ended_as_are_left() -> None:
    heap, circle = Heap(), Circle()
    gone = weakref.ref(circle)
    heap.stepped(STEPS)
    await asyncio.sleep(0)
    del circle
    gc.collect()
    assert gone() is not None, "set apart: not looked at"
    for _ in range(ENDED):
        heap.ended(left=ENDED + 1)
    await asyncio.sleep(0)
    assert gone() is not None, "more are left: their heap is larger"
    heap.ended(left=ENDED + 1)
    await asyncio.sleep(0)
    assert gone() is None


async def test_circles_from_elsewhere_go_once_twice_as_much_is_set_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coslice.runtime.heap.ROUNDS", 1)
    heap, circle = Heap(), Circle()
    gone = weakref.ref(circle)
    heap.stepped(STEPS)
    await asyncio.sleep(0)
    del circle
    heap.stepped(STEPS)
    await asyncio.sleep(0)
    assert gone() is not None, "no more than there was"
    more = [[number] for number in range(2 * gc.get_freeze_count())]
    heap.stepped(STEPS)
    await asyncio.sleep(0)
    assert gone() is None
    del more
