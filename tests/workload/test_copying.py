"""Copies of only what changed: the same bytes as a copy of all, and fewer of them."""

import ctypes
import itertools
import mmap
import os
import random
from collections.abc import Iterator

import pytest

from coslice.errors import OperationFailed
from coslice.workload import copying
from coslice.workload.arena import Arena
from coslice.workload.copying import FINE, Copied, Range

MIB = 1 << 20


class Memory:
    def __init__(self, size: int) -> None:
        self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(view)
        del view


@pytest.fixture
def pair() -> Iterator[tuple[Memory, Memory]]:
    source, target = Memory(40 * MIB), Memory(40 * MIB)
    block = random.Random(3).randbytes(MIB)
    for at in range(0, 40 * MIB, MIB):
        source.map[at : at + MIB] = block
    yield source, target
    source.map.close()
    target.map.close()


def whole(source: Memory, target: Memory, cut: int = 0) -> list[Range]:
    """Odd sizes and a gap in the middle."""
    first = Range(target.address, source.address, 17 * MIB + 4321)
    second = Range(target.address + 20 * MIB + 64, source.address + 20 * MIB + 64, 19 * MIB - cut)
    return [first, second]


def test_all_is_copied_at_first_and_nothing_when_nothing_changed(pair: tuple[Memory, Memory]) -> None:
    ranges = whole(*pair)
    assert copying.copy_changed(ranges).copied == sum(each.size for each in ranges)
    copying.verify(ranges)
    again = copying.copy_changed(ranges)
    assert (again.copied, again.touched) == (0, frozenset())


def test_any_changes_are_found_and_little_else_is_copied(pair: tuple[Memory, Memory]) -> None:
    source, target = pair
    ranges = whole(source, target)
    copying.copy_all(ranges)
    draw = random.Random(5)
    for changes in (1, 3, 40):
        for _ in range(changes):
            each = draw.choice(ranges)
            at = each.source - source.address + draw.randrange(each.size)
            source.map[at] ^= 1 << draw.randrange(8)
        done = copying.copy_changed(ranges)
        assert 0 < done.copied <= changes * FINE
        copying.verify(ranges)
        assert done.touched <= set(ranges)


def test_a_last_byte_that_changed_is_found(pair: tuple[Memory, Memory]) -> None:
    source, target = pair
    ranges = whole(source, target, cut=13)
    copying.copy_all(ranges)
    for each in ranges:
        source.map[each.source - source.address + each.size - 1] ^= 0x80
    done = copying.copy_changed(ranges)
    assert done.touched == set(ranges)
    copying.verify(ranges)


def test_the_proof_finds_a_copy_that_was_left_out(pair: tuple[Memory, Memory]) -> None:
    ranges = whole(*pair)
    copying.copy_all(ranges)
    pair[1].map[20 * MIB + 64 + 777] ^= 1
    with pytest.raises(OperationFailed, match="differ after the copy"):
        copying.verify(ranges)


def test_copies_into_fresh_memory_of_odd_sizes(pair: tuple[Memory, Memory]) -> None:
    source, target = pair
    ranges = [Range(target.address + 1234, source.address + 99, 8 * MIB + 5), Range(target.address, 0, 0)]
    done = copying.copy_fresh(ranges)
    assert done.copied == 8 * MIB + 5
    copying.verify(ranges[:1])
    assert target.map[:1234] == bytes(1234)
    assert target.map[1234 + 8 * MIB + 5 : 9 * MIB] == bytes(MIB - 1234 - 5)


def test_helpers_stay_on_the_cores_of_the_thread_that_copies(pair: tuple[Memory, Memory]) -> None:
    seen = set[frozenset[int]]()
    before = os.sched_getaffinity(0)

    def look(task: Range) -> Copied:
        seen.add(frozenset(os.sched_getaffinity(0)))
        return Copied(task.size)

    ranges = whole(*pair)
    copying.HELPERS.run(look, ranges)
    assert seen == {frozenset(before)}
    seen.clear()
    one = {min(before)}
    os.sched_setaffinity(0, one)
    try:
        assert copying.threads() == 1
        copying.HELPERS.run(look, ranges)
    finally:
        os.sched_setaffinity(0, before)
    assert seen == {frozenset(one)}


def test_an_error_in_one_thread_ends_the_copy_and_is_told(pair: tuple[Memory, Memory]) -> None:
    def fail(task: Range) -> Copied:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        copying.HELPERS.run(fail, whole(*pair))
    assert copying.copy_all(whole(*pair)).copied > 0


# ── places ─────────────────────────────────────────────────────────────────


def overlaps(arena: Arena, sizes: dict[str, int]) -> bool:
    spans = sorted((arena.offset(key), arena.offset(key) + size) for key, size in sizes.items())
    return any(stop > start for (_, stop), (start, _) in itertools.pairwise(spans))


def test_pieces_keep_their_places_though_others_come_and_go() -> None:
    arena = Arena()
    sizes = {"w": 640, "m": 1280, "v": 1280, "bias": 12}
    assert arena.place(sizes) == sum(sizes.values())
    before = {key: arena.offset(key) for key in sizes}
    arena.place(sizes | {"w.grad": 640})
    arena.place(sizes)
    arena.place(sizes | {"w.grad": 640})
    assert {key: arena.offset(key) for key in sizes} == before


def test_places_never_overlap_and_waste_little() -> None:
    draw = random.Random(9)
    arena = Arena()
    parked: dict[str, int] = {}
    high = 0
    for _ in range(300):
        names = [f"t{i}" for i in draw.sample(range(40), draw.randrange(1, 30))]
        wanted = {name: draw.choice([64, 4096, 100, 12345]) for name in names if name not in parked}
        kept = {name: arena.offset(name) for name in parked}
        end = arena.place(wanted, list(parked))
        everything = parked | wanted
        assert {name: arena.offset(name) for name in parked} == kept
        assert not overlaps(arena, everything)
        assert end == max((arena.offset(k) + n for k, n in everything.items()), default=0)
        if not parked:
            assert end <= max(high, 1.125 * sum(wanted.values()))
        high = max(high, end)
        parked = {} if draw.random() < 0.5 else everything
    few = {"t1": 64, "t2": 100}
    assert arena.pack(few) == sum(few.values())
