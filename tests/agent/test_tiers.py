"""Host memory is a budget with disk behind it: what is refused, what is spilled, what is found damaged."""

import asyncio
import errno
import os
import random
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent.conftest import GROUP, MIB, Node, contexts
from agent.process_world import lone_member

from coslice.agent.backends.app_channel import AppChannelBackend
from coslice.agent.backends.base import MoveError, Restored
from coslice.agent.members import Member, OpenChannel
from coslice.agent.tiers import disk as disk_module
from coslice.agent.tiers.disk import BLOCK, SUFFIX, Damaged, DiskTier, NoDisk
from coslice.agent.tiers.host import HostBuffers, NoHostMemory
from coslice.errors import ConfigError
from coslice.wire.v1 import coslice_pb2 as pb

SIZE = 3 * BLOCK + 12_345


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.pwrite(fd, random.Random(4).randbytes(SIZE), 0)
    yield fd
    os.close(fd)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def written(folder: Path) -> Path:
    (path,) = folder.glob(f"*{SUFFIX}")
    return path


async def test_what_is_written_comes_back_also_to_another_agent(tmp_path: Path, memory: int) -> None:
    tier = DiskTier(tmp_path, 10 * MIB)
    before = os.pread(memory, SIZE, 0)
    await tier.write("g/a/1", memory, SIZE)
    assert (tier.used, tier.has("g/a/1")) == (SIZE, True)
    os.ftruncate(memory, 0)
    os.ftruncate(memory, SIZE)
    again = DiskTier(tmp_path, 10 * MIB)
    assert again.names() == ["g/a/1"]
    assert await again.read("g/a/1", memory) == SIZE
    assert os.pread(memory, SIZE, 0) == before
    assert oct(written(tmp_path).stat().st_mode)[-3:] == "600"
    again.keep_only(lambda name: False)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("at", "message"),
    [(0, "damaged at byte 0"), (SIZE - 1, f"damaged at byte {3 * BLOCK}"), (SIZE + 12, "checksums")],
)
async def test_a_changed_byte_is_found(tmp_path: Path, memory: int, at: int, message: str) -> None:
    tier = DiskTier(tmp_path, 10 * MIB)
    await tier.write("g/a/1", memory, SIZE)
    path = written(tmp_path)
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(Damaged, match=message):
        await tier.read("g/a/1", memory)


@pytest.mark.parametrize("cut", [1, 17, 40, BLOCK, SIZE])
async def test_a_torn_write_is_refused(tmp_path: Path, memory: int, cut: int) -> None:
    tier = DiskTier(tmp_path, 10 * MIB)
    await tier.write("g/a/1", memory, SIZE)
    path = written(tmp_path)
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(Damaged):
        await tier.read("g/a/1", memory)
    assert DiskTier(tmp_path, 10 * MIB).names() == []  # and a new agent does not take it for state
    assert files(tmp_path) == []


@pytest.mark.parametrize("suffix", [SUFFIX, disk_module.UNFINISHED])
def test_what_cannot_be_removed_from_the_folder_is_told_with_the_folder_and_what_to_do(
    tmp_path: Path, suffix: str
) -> None:
    left = tmp_path / f"left{suffix}"
    left.mkdir()  # cannot be removed as a file, whoever we are; as on a disk that is read-only
    with pytest.raises(ConfigError, match=f"cannot use {tmp_path}, .*{left}: Is a directory.*--disk-dir"):
        DiskTier(tmp_path, 10 * MIB)


async def test_blocks_written_in_the_wrong_order_are_refused(tmp_path: Path, memory: int) -> None:
    """A crash of the machine after the name was there, before all blocks were."""
    tier = DiskTier(tmp_path, 10 * MIB)
    await tier.write("g/a/1", memory, SIZE)
    with written(tmp_path).open("r+b") as file:
        file.seek(BLOCK)
        file.write(bytes(BLOCK))
    with pytest.raises(Damaged, match=f"byte {BLOCK}"):
        await tier.read("g/a/1", memory)


async def test_another_ones_file_is_not_taken_for_ours(tmp_path: Path, memory: int) -> None:
    tier = DiskTier(tmp_path, 10 * MIB)
    await tier.write("g/a/1", memory, SIZE)
    first = written(tmp_path)
    await tier.write("g/b/1", memory, SIZE)
    second = next(path for path in files(tmp_path) if path != first)
    os.replace(first, second)
    with pytest.raises(Damaged, match="'g/a/1'"):
        await tier.read("g/b/1", memory)


async def test_a_write_that_is_called_off_leaves_nothing(
    tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread goes on, and what it writes is not for the next agent to find."""
    begun, go_on, over, write = threading.Event(), threading.Event(), threading.Event(), disk_module._write

    def slow(*args: Any) -> None:
        begun.set()
        go_on.wait()
        try:
            write(*args)
        finally:
            over.set()

    monkeypatch.setattr(disk_module, "_write", slow)
    tier = DiskTier(tmp_path, 10 * MIB)
    writing = asyncio.ensure_future(tier.write("g/a/1", memory, SIZE))
    await asyncio.to_thread(begun.wait)
    writing.cancel()
    await asyncio.sleep(0)  # a turn of the loop, in which it is told
    go_on.set()
    await asyncio.wait((writing,))
    await asyncio.to_thread(over.wait)
    assert writing.cancelled()
    assert (tier.used, files(tmp_path)) == (0, [])


async def test_a_full_tier_or_disk_refuses_and_leaves_nothing(
    tmp_path: Path, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoDisk, match="bytes left"):
        await DiskTier(tmp_path, SIZE - 1).write("g/a/1", memory, SIZE)
    tier = DiskTier(tmp_path, 10 * MIB)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoDisk, match="No space left"):
        await tier.write("g/a/1", memory, SIZE)
    assert (tier.used, files(tmp_path)) == (0, [])


async def test_a_disk_that_turns_read_only_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there can be read; what it holds of no use goes when it can be written again."""
    buffers = HostBuffers(4 * MIB, disk=DiskTier(tmp_path, 20 * MIB))
    before = await filled(buffers, "g/a/1", 3 * MIB)
    await filled(buffers, "g/b/1", 3 * MIB)
    assert buffers.spilled("g/a/1") == 3 * MIB
    stale = written(tmp_path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", read_only)
        buffers.release("g/b/1")
        await buffers.fetch("g/a/1")
        assert os.pread(buffers.descriptor("g/a/1"), 3 * MIB, 0) == before
        assert (buffers.spilled("g/a/1"), buffers.held, stale.exists()) == (0, 3 * MIB, True)
        patch.setattr("coslice.agent.tiers.disk._write", read_only)
        with pytest.raises(NoHostMemory):
            await buffers.reserve("g/b/1", 3 * MIB)
        assert os.pread(buffers.descriptor("g/a/1"), 3 * MIB, 0) == before
    buffers.free("g/b/1")
    assert files(tmp_path) == []
    buffers.close()


async def after_the_agent(buffers: HostBuffers, name: str, folder: Path) -> HostBuffers:
    """The next one's, with the file that the process has kept; what is on disk is found there."""
    kept = os.dup(buffers.descriptor(name))
    buffers.close()
    again = HostBuffers(buffers.budget, disk=DiskTier(folder, 20 * MIB))
    again.adopt(name, kept, held=True)
    await again.fetch(name)
    return again


def read_only(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize("wanted", [False, True], ids=["went and came back", "wanted meanwhile"])
async def test_what_a_read_only_disk_kept_is_not_taken_for_the_state_by_the_next_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    """It can be written again by then, and the agent was killed before it could remove anything."""
    disk = DiskTier(tmp_path, 20 * MIB)
    buffers, write = HostBuffers(5 * MIB, disk=disk), disk.write
    await filled(buffers, "g/a/1", 4 * MIB)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(name: str, fd: int, size: int) -> None:
        begun.set()
        await go_on.wait()
        await write(name, fd, size)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", read_only)
        patch.setattr(disk, "write", slow)
        other = asyncio.create_task(buffers.reserve("g/b/1", 4 * MIB))
        await begun.wait()
        fetching = asyncio.create_task(buffers.fetch("g/a/1")) if wanted else None
        await asyncio.sleep(0)
        go_on.set()
        if fetching is not None:
            await fetching
            with pytest.raises(NoHostMemory, match="in use"):
                await other
        else:
            await other
            assert buffers.spilled("g/a/1") == 4 * MIB
            buffers.release("g/b/1")
            await buffers.fetch("g/a/1")
    now = random.Random("another step").randbytes(4 * MIB)
    os.pwrite(buffers.descriptor("g/a/1"), now, 0)
    assert written(tmp_path).exists()
    again = await after_the_agent(buffers, "g/a/1", tmp_path)
    assert os.pread(again.descriptor("g/a/1"), 4 * MIB, 0) == now
    assert (again.spilled("g/a/1"), files(tmp_path)) == (0, [])
    again.close()


async def test_what_was_given_up_on_a_read_only_disk_is_not_taken_for_what_its_process_saved_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = HostBuffers(5 * MIB, disk=DiskTier(tmp_path, 20 * MIB))
    await filled(buffers, "g/a/1", 4 * MIB)
    await buffers.reserve("g/b/1", 4 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", read_only)
        buffers.free("g/a/1")
        buffers.free("g/b/1")
    await buffers.reserve("g/a/1", 4 * MIB)
    now = random.Random("another step").randbytes(4 * MIB)
    os.pwrite(buffers.descriptor("g/a/1"), now, 0)
    assert written(tmp_path).exists()
    again = await after_the_agent(buffers, "g/a/1", tmp_path)
    assert os.pread(again.descriptor("g/a/1"), 4 * MIB, 0) == now
    assert (again.spilled("g/a/1"), files(tmp_path)) == (0, [])
    again.close()


async def test_an_agent_that_ends_half_way_back_from_disk_leaves_the_state_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = HostBuffers(5 * MIB, disk=DiskTier(tmp_path, 20 * MIB))
    content = await filled(buffers, "g/a/1", 4 * MIB)
    for _ in range(2):  # the mark of the first way back does not outlive the second way out
        await buffers.reserve("g/b/1", 4 * MIB)
        buffers.release("g/b/1")
        await buffers.fetch("g/a/1")
    await buffers.reserve("g/b/1", 4 * MIB)
    buffers.release("g/b/1")
    with monkeypatch.context() as patch:
        patch.setattr(disk_module, "_read", read_only)
        with pytest.raises(Damaged):
            await buffers.fetch("g/a/1")  # the pages are there, and nothing in them
    again = await after_the_agent(buffers, "g/a/1", tmp_path)
    assert os.pread(again.descriptor("g/a/1"), 4 * MIB, 0) == content
    again.close()


# ── the budget ─────────────────────────────────────────────────────────────


async def filled(buffers: HostBuffers, name: str, size: int) -> bytes:
    await buffers.reserve(name, size)
    content = random.Random(name).randbytes(size)
    os.pwrite(buffers.descriptor(name), content, 0)
    return content


async def test_the_longest_idle_state_goes_to_disk_and_comes_back(tmp_path: Path) -> None:
    buffers = HostBuffers(5 * MIB, disk=DiskTier(tmp_path, 20 * MIB))
    saved = {name: await filled(buffers, name, 2 * MIB) for name in ("g/a/1", "g/b/1")}
    await buffers.fetch("g/a/1")  # used since
    await filled(buffers, "g/c/1", 2 * MIB)
    assert [buffers.spilled(name) for name in ("g/a/1", "g/b/1", "g/c/1")] == [0, 2 * MIB, 0]
    assert buffers.used <= buffers.budget
    assert os.fstat(buffers.descriptor("g/b/1")).st_size == 0  # who reads it unasked gets an error
    await buffers.fetch("g/b/1")
    assert os.pread(buffers.descriptor("g/b/1"), 2 * MIB, 0) == saved["g/b/1"]
    assert buffers.spilled("g/a/1") == 2 * MIB
    await buffers.fetch("g/a/1")
    assert os.pread(buffers.descriptor("g/a/1"), 2 * MIB, 0) == saved["g/a/1"]
    buffers.free("g/a/1")
    buffers.close()


async def test_pages_without_content_are_given_back_before_content_goes_to_disk(tmp_path: Path) -> None:
    buffers = HostBuffers(5 * MIB, disk=DiskTier(tmp_path, 20 * MIB))
    await filled(buffers, "g/a/1", 2 * MIB)
    await filled(buffers, "g/b/1", 2 * MIB)
    buffers.release("g/b/1")
    before = buffers.generation("g/b/1")
    await filled(buffers, "g/c/1", 2 * MIB)
    assert buffers.disk is not None
    assert (buffers.disk.used, buffers.size("g/b/1")) == (0, 0)
    assert buffers.generation("g/b/1") > before
    buffers.close()


async def test_what_does_not_fit_is_refused_with_the_figures_and_changes_nothing(tmp_path: Path) -> None:
    buffers = HostBuffers(5 * MIB, disk=DiskTier(tmp_path, MIB))
    await filled(buffers, "g/a/1", 4 * MIB)
    with pytest.raises(NoHostMemory, match=r"4 MiB of 5 MiB hold other state .* disk tier has 1 MiB left"):
        await buffers.reserve("g/b/1", 3 * MIB)
    assert (buffers.used, buffers.held, buffers.spilled("g/a/1")) == (4 * MIB, 4 * MIB, 0)
    buffers.close()


async def test_state_in_use_stays_in_memory(tmp_path: Path) -> None:
    buffers = HostBuffers(5 * MIB, disk=DiskTier(tmp_path, 20 * MIB))
    buffers.idle = lambda name: name != "g/a/1"
    await filled(buffers, "g/a/1", 2 * MIB)
    await filled(buffers, "g/b/1", 2 * MIB)
    await filled(buffers, "g/c/1", 2 * MIB)
    assert buffers.spilled("g/b/1") == 2 * MIB
    with pytest.raises(NoHostMemory):
        await buffers.reserve("g/d/1", 4 * MIB)
    buffers.close()


async def test_state_that_is_wanted_while_it_goes_to_disk_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskTier(tmp_path, 20 * MIB)
    buffers = HostBuffers(5 * MIB, disk=disk)
    content = await filled(buffers, "g/a/1", 4 * MIB)
    begun, go_on = asyncio.Event(), asyncio.Event()
    write = disk.write

    async def slow(name: str, fd: int, size: int) -> None:
        begun.set()
        await go_on.wait()
        await write(name, fd, size)

    monkeypatch.setattr(disk, "write", slow)
    other = asyncio.create_task(buffers.reserve("g/b/1", 4 * MIB))
    await begun.wait()
    fetching = asyncio.create_task(buffers.fetch("g/a/1"))
    await asyncio.sleep(0)
    go_on.set()
    await fetching
    with pytest.raises(NoHostMemory, match="in use"):
        await other
    assert os.pread(buffers.descriptor("g/a/1"), 4 * MIB, 0) == content
    assert (disk.used, buffers.used) == (0, 4 * MIB)
    buffers.close()


async def test_who_needs_room_waits_for_those_who_are_making_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job's state is fetched ahead of its turn while the holder's is about to leave: both fit one after
    the other, with the disk behind them, and neither is refused."""
    buffers = HostBuffers(5 * MIB, disk=DiskTier(tmp_path, 20 * MIB))
    before = {name: await filled(buffers, name, 3 * MIB) for name in ("g/a/1", "g/c/1")}
    assert buffers.spilled("g/a/1") == 3 * MIB
    writing, may_write = asyncio.Event(), asyncio.Event()
    write = DiskTier.write

    async def slow(*args: Any) -> None:
        writing.set()
        await may_write.wait()
        await write(*args)

    monkeypatch.setattr(DiskTier, "write", slow)
    fetching = asyncio.ensure_future(buffers.fetch("g/a/1"))
    await writing.wait()  # c is on its way to disk, for a
    buffers.check({"g/b/1": 3 * MIB})
    leaving = asyncio.ensure_future(buffers.reserve("g/b/1", 3 * MIB))
    may_write.set()
    await asyncio.gather(fetching, leaving)
    assert buffers.used <= 5 * MIB
    assert buffers.size("g/b/1") == 3 * MIB
    buffers.free("g/b/1")
    for name, content in before.items():
        await buffers.fetch(name)
        assert os.pread(buffers.descriptor(name), 3 * MIB, 0) == content
    buffers.close()


async def test_two_who_fetch_the_same_and_one_who_needs_room_never_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first fetch ends in nothing. The second follows it, after the one who came between."""
    buffers = HostBuffers(5 * MIB, disk=DiskTier(tmp_path, 20 * MIB))
    before = {name: await filled(buffers, name, 3 * MIB) for name in ("g/a/1", "g/c/1")}
    writing, may_write = asyncio.Event(), asyncio.Event()
    write = DiskTier.write

    async def refused(*args: Any) -> None:
        writing.set()
        await may_write.wait()
        monkeypatch.setattr(DiskTier, "write", write)
        raise NoDisk("not now")

    monkeypatch.setattr(DiskTier, "write", refused)
    first = asyncio.ensure_future(buffers.fetch("g/a/1"))
    await writing.wait()  # c is on its way to disk, for a
    second = asyncio.ensure_future(buffers.fetch("g/a/1"))
    leaving = asyncio.ensure_future(buffers.reserve("g/b/1", 3 * MIB))
    await asyncio.sleep(0)  # a turn of the loop, in which both begin to wait
    may_write.set()
    with pytest.raises(NoHostMemory, match="could not leave"):
        await first
    async with asyncio.timeout(20.0):
        await asyncio.gather(second, leaving)
    assert buffers.used <= 5 * MIB
    buffers.free("g/b/1")
    for name, content in before.items():
        await buffers.fetch(name)
        assert os.pread(buffers.descriptor(name), 3 * MIB, 0) == content
    buffers.close()


async def test_a_file_that_is_freed_while_it_changes_is_closed_once_and_used_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ended while its state came back from disk, and another request for it was waiting."""
    buffers = HostBuffers(8 * MIB, disk=DiskTier(tmp_path, 20 * MIB))
    await filled(buffers, "g/a/1", 5 * MIB)
    await filled(buffers, "g/b/1", 4 * MIB)
    buffers.free("g/b/1")
    fd, reading, may_read, closed = buffers.descriptor("g/a/1"), asyncio.Event(), asyncio.Event(), []
    read, close = DiskTier.read, os.close

    async def slow(*args: Any) -> int:
        size = await read(*args)
        reading.set()
        await may_read.wait()
        return size

    def counted(number: int) -> None:
        closed.append(number)
        close(number)

    monkeypatch.setattr(DiskTier, "read", slow)
    fetching = asyncio.ensure_future(buffers.fetch("g/a/1"))
    await reading.wait()
    more = asyncio.ensure_future(buffers.reserve("g/a/1", 6 * MIB))
    await asyncio.sleep(0)  # a turn of the loop, in which it begins to wait
    monkeypatch.setattr(os, "close", counted)
    buffers.free("g/a/1")
    may_read.set()
    for each in (fetching, more):
        with pytest.raises(NoHostMemory, match="given up"):
            await each
    assert (closed.count(fd), buffers.used, files(tmp_path)) == (1, 0, [])
    buffers.close()


async def test_who_gave_up_waiting_keeps_nothing_in_memory(tmp_path: Path) -> None:
    buffers = HostBuffers(5 * MIB, disk=DiskTier(tmp_path, 20 * MIB))
    await filled(buffers, "g/a/1", 3 * MIB)
    async with buffers._files["g/a/1"].changing:
        waiting = asyncio.ensure_future(buffers.fetch("g/a/1"))
        await asyncio.sleep(0)  # a turn of the loop, in which it begins to wait
        waiting.cancel()
        await asyncio.wait((waiting,))
    await buffers.reserve("g/b/1", 3 * MIB)
    assert buffers.spilled("g/a/1") == 3 * MIB
    buffers.close()


async def test_a_restart_waits_for_the_file_before_it_asks_for_a_restore(tmp_path: Path) -> None:
    """What an earlier agent spilled can only go back into the file that the process still has mapped, cut
    short: told to restore before it has handed that back, it would read what is not there (SIGBUS)."""
    member = lone_member("a", os.getpid(), backend="")
    member.device, member.parked, channel = "host", True, OpenChannel()
    earlier = HostBuffers(MIB, disk=DiskTier(tmp_path, 20 * MIB))
    content = await filled(earlier, member.buffer, MIB)
    file = os.dup(earlier.descriptor(member.buffer))
    await filled(earlier, "g/b/1", MIB)
    earlier.close()
    buffers = HostBuffers(4 * MIB, disk=DiskTier(tmp_path, 20 * MIB))
    member.attach(channel)
    told, asked = (asyncio.ensure_future(each) for each in (channel.next(), restored(buffers, member)))
    for _ in range(20):
        await asyncio.sleep(0)  # a turn of the loop, in which it would be told
    assert not told.done()
    buffers.adopt(member.buffer, file, held=True)
    command = await told
    assert command is not None
    assert os.pread(file, MIB, 0) == content
    member.moved(pb.Moved(op=command.move_in.op, bytes=MIB))
    assert (await asked).bytes == MIB
    member.close()
    buffers.close()


async def test_a_restart_waits_for_the_file_before_the_rest_of_the_state_leaves(tmp_path: Path) -> None:
    """A part was spilled by an earlier agent. Read into a file of ours, it would not be where the process has
    it mapped."""
    member = lone_member("a", os.getpid(), backend="")
    member.device, member.state_bytes, member.away, channel = "host", 2 * MIB, MIB, OpenChannel()
    earlier = HostBuffers(MIB, disk=DiskTier(tmp_path, 20 * MIB))
    content = await filled(earlier, member.buffer, MIB)
    file = os.dup(earlier.descriptor(member.buffer))
    await filled(earlier, "g/b/1", MIB)
    earlier.close()
    buffers = HostBuffers(8 * MIB, disk=DiskTier(tmp_path, 20 * MIB))
    member.attach(channel)
    leaving = asyncio.ensure_future(AppChannelBackend(buffers, move_timeout=30.0).snapshot([member], op="1"))
    await asyncio.sleep(0)  # a turn of the loop, in which it would be read
    buffers.adopt(member.buffer, file, held=True)
    command = await channel.next()
    assert command is not None
    assert command.HasField("move_out")
    assert os.pread(file, MIB, 0) == content
    leaving.cancel()
    await asyncio.wait((leaving,))
    member.close()
    buffers.close()


async def restored(buffers: HostBuffers, member: Member) -> Restored:
    return await AppChannelBackend(buffers, move_timeout=30.0).restore([member], op="1")


async def heard(channel: OpenChannel) -> AsyncIterator[pb.WorkloadCommand]:
    """What was sent so far."""
    channel.end()
    while (command := await channel.next()) is not None:
        yield command


@pytest.mark.parametrize("again", [False, True], ids=["nothing else", "another move has begun"])
async def test_who_may_be_writing_to_its_buffer_after_all_keeps_its_pages_until_its_state_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """It did not answer in time, and is told to bring back what it wrote when it does."""
    member = lone_member("a", os.getpid(), backend="")
    member.device, member.state_bytes, channel = "host", 3 * MIB, OpenChannel()
    member.attach(channel)
    buffers = HostBuffers(5 * MIB, disk=DiskTier(tmp_path, 20 * MIB))
    buffers.idle = lambda name: False
    with pytest.raises(MoveError, match="did not answer"):
        await AppChannelBackend(buffers, move_timeout=0.01).snapshot([member], op="1")
    file = buffers.descriptor(member.buffer)
    os.pwrite(file, b"state", 0)
    with pytest.raises(NoHostMemory):
        await buffers.reserve("g/b/1", 3 * MIB)
    assert os.pread(file, 5, 0) == b"state"
    member.moved(pb.Moved(op="1/out", bytes=3 * MIB))
    commands = [command async for command in heard(channel)]
    (late,) = (command.move_in.op for command in commands if command.WhichOneof("kind") == "move_in")
    if again:
        begun, go_on, reserve = asyncio.Event(), asyncio.Event(), buffers.reserve

        async def slow(name: str, size: int) -> None:
            await reserve(name, size)
            begun.set()
            await go_on.wait()

        monkeypatch.setattr(buffers, "reserve", slow)
        member.parked = False
        backend = AppChannelBackend(buffers, move_timeout=0.01)
        moving = asyncio.create_task(backend.snapshot([member], op="2"))
        await begun.wait()
        monkeypatch.undo()
    member.moved(pb.Moved(op=late))
    if again:
        with pytest.raises(NoHostMemory):
            await buffers.reserve("g/b/1", 3 * MIB)
        go_on.set()
        with pytest.raises(MoveError):
            await moving
    else:
        await buffers.reserve("g/b/1", 3 * MIB)
    assert not member.sleeps
    member.close()
    buffers.close()


async def test_one_job_has_its_share_only() -> None:
    buffers = HostBuffers(64 * MIB, per_job=4 * MIB)
    await buffers.reserve("g/a/r/1/1", 3 * MIB)
    with pytest.raises(NoHostMemory, match="job a may keep 4 MiB in host memory and has 5 MiB"):
        await buffers.reserve("g/a/r/2/2", 2 * MIB)
    await buffers.reserve("g/b/r/3/3", 4 * MIB)
    buffers.close()


async def test_memory_is_made_ready_only_where_it_is_plenty() -> None:
    buffers = HostBuffers(4 * MIB)
    await buffers.reserve("g/a/1", 3 * MIB, hold=False)
    assert buffers.held == 0
    with pytest.raises(NoHostMemory, match="short"):
        await buffers.reserve("g/b/1", 3 * MIB, hold=False)
    await buffers.reserve("g/b/1", 3 * MIB)  # in earnest: what was only ready is lent
    assert buffers.size("g/a/1") == 0
    buffers.close()


# ── real processes ─────────────────────────────────────────────────────────


async def test_three_jobs_take_turns_where_memory_holds_the_state_of_one(node: Node) -> None:
    agent = await node.start(budget=100 * MIB, host=100 * MIB, disk_budget=400 * MIB)
    jobs = ("job-a", "job-b", "job-c")
    running = {}
    for epoch, job in enumerate(jobs, start=1):
        await node.orchestrator.make_resident(GROUP, job, epoch)
        running[job] = await node.workload(job, size=70 * MIB)
    for epoch, job in enumerate((*jobs, *jobs), start=4):
        report = await node.orchestrator.make_resident(GROUP, job, epoch)
        assert report.done.restored, report
        assert (await running[job].until("moved_in"))["intact"]
        status = await node.status()
        assert sum(member.host_bytes - member.disk_bytes for member in status.members) <= 100 * MIB
        assert sum(member.disk_bytes for member in status.members) >= 70 * MIB
        assert status.groups[0].disk_used_bytes >= 70 * MIB
    assert agent.peak_device_bytes[GROUP] <= 100 * MIB


async def test_spilled_state_outlives_the_agent(node: Node) -> None:
    agent = await node.start(budget=100 * MIB, host=100 * MIB, disk_budget=400 * MIB)
    running = {}
    for epoch, job in enumerate(("job-a", "job-b", "job-c"), start=1):
        await node.orchestrator.make_resident(GROUP, job, epoch)
        running[job] = await node.workload(job, size=70 * MIB)
    await agent.stop()
    await node.run_again(listen=agent.address)
    for job in ("job-a", "job-b"):
        await running[job].until("gave_back", ok=True)
    for epoch, job in enumerate(("job-a", "job-b"), start=10):
        report = await node.orchestrator.make_resident(GROUP, job, epoch)
        assert report.done.restored, report
        assert (await running[job].until("moved_in"))["intact"]


async def test_a_damaged_file_loses_that_job_and_no_other(node: Node) -> None:
    await node.start(budget=100 * MIB, host=100 * MIB, disk_budget=400 * MIB, stuck_grace=0.2)
    running = {}
    for epoch, job in enumerate(("job-a", "job-b", "job-c"), start=1):
        await node.orchestrator.make_resident(GROUP, job, epoch)
        running[job] = await node.workload(job, size=70 * MIB)
    with written(node.folder / "state" / "saved").open("r+b") as file:
        file.seek(5 * MIB)
        file.write(b"nonsense")
    lost = await node.orchestrator.make_resident(GROUP, "job-a", 10)
    assert "damaged" in lost.failed.reason
    assert lost.failed.culprit == "job-a"
    back = await node.orchestrator.make_resident(GROUP, "job-b", 11)
    assert back.done.restored
    assert (await running["job-b"].until("moved_in"))["intact"]
    assert contexts(back.done.residency)["job-a"] == "LOST"


async def test_what_no_memory_holds_is_refused_before_the_holder_is_touched(node: Node) -> None:
    await node.start(budget=100 * MIB, host=40 * MIB)
    holder = await node.workload("job-a", size=70 * MIB)
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    refused = await node.orchestrator.make_resident(GROUP, "job-b", 2)
    assert refused.failed.culprit == "job-b"
    assert "host memory" in refused.failed.reason
    assert contexts(refused.failed.residency) == {"job-a": "LIVE"}
    await holder.do("drop")
    assert not any(said["event"] == "moved_out" for said in holder.said)
