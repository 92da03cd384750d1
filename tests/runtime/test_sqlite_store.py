"""The SQLite store where it differs from the contract: its file, its owner, and what a kill leaves behind."""

import asyncio
import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from coslice.errors import ConfigError
from coslice.store import SqliteStore, sqlite
from coslice.store.base import StoreError
from coslice.store.ownership import Ownership
from coslice.store.sqlite_file import open_file

_WRITER = """
import asyncio, sys
from coslice.store import SqliteStore

async def write(store, key):
    version = n = 0
    while True:
        n += 1
        version = await store.save(key, str(n).encode() * 50, expect=version)
        sys.stdout.write(f"{key} {n}\\n")  # acknowledged: from here on it may not be lost
        sys.stdout.flush()

async def main():
    store = SqliteStore(sys.argv[1])
    await store.load()
    await asyncio.gather(*(write(store, f"key-{k}") for k in range(8)))

asyncio.run(main())
"""


def _start_writer(path: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)


def _kill(writer: "subprocess.Popen[str]") -> str:
    writer.send_signal(signal.SIGKILL)
    assert writer.stdout is not None
    with writer.stdout as out:
        rest = out.read()
    writer.wait()
    return rest


async def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    for lines in (1, 50, 400):  # killed early, and while the log is long
        path.unlink(missing_ok=True)
        writer = _start_writer(path)
        assert writer.stdout is not None
        acknowledged = [writer.stdout.readline() for _ in range(lines)]
        acknowledged += _kill(writer).splitlines(keepends=True)
        promised: dict[str, int] = {}
        for line in acknowledged:
            if line.endswith("\n"):
                key, n = line.split()
                promised[key] = int(n)
        store = SqliteStore(path)
        found = {key: int(value[: len(value) // 50]) for key, (value, _) in (await store.load()).items()}
        await store.close()
        assert promised
        for key, n in promised.items():
            assert found[key] in (n, n + 1)  # one more may have been on its way


async def test_after_a_kill_the_file_is_free(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    writer = _start_writer(path)
    assert writer.stdout is not None
    writer.stdout.readline()
    second = SqliteStore(path)
    with pytest.raises(ConfigError) as told:
        await second.load()
    assert told.value.data["pid"] == str(writer.pid)
    assert str(writer.pid) in str(told.value)
    assert told.value.data["started"] in str(told.value)
    _kill(writer)
    assert await second.load()  # the same object may try again
    await second.close()


async def test_a_second_opener_in_the_same_process_is_refused_and_does_no_harm(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / "state.db")
    await first.load()
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        await SqliteStore(tmp_path / "state.db").load()
    await first.save("key", b"1", expect=0)
    with pytest.raises(ConfigError):
        await SqliteStore(tmp_path / "state.db").load()
    await first.close()


async def test_it_is_private_durable_and_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    old = os.umask(0)
    try:
        store = SqliteStore(path)
        await store.load()
        await store.save("key", b"1", expect=0)
        modes = _modes(tmp_path)
    finally:
        os.umask(old)
    assert set(modes.values()) == {0o600}
    await store.close()
    assert list(_modes(tmp_path)) == ["state.db"]


def _modes(directory: Path) -> dict[str, int]:
    return {file.name: stat.S_IMODE(file.stat().st_mode) for file in directory.iterdir()}


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE customers (name TEXT)")
    db.close()


def _newer(path: Path) -> None:
    asyncio.run(_create(path))
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


def _text(path: Path) -> None:
    path.write_text("these are my notes, and they are longer than the header of an SQLite file is: " * 10)


def _damage(path: Path) -> None:
    asyncio.run(_create(path))
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(4096))


async def _create(path: Path) -> None:
    store = SqliteStore(path)
    await store.load()
    for n in range(50):
        await store.save(f"key-{n}", b"x" * 500, expect=0)
    await store.close()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_foreign, "another program"),
        (_newer, "schema 99 and this version of coslice knows 1"),
        (_text, "not an SQLite file"),
        (_damage, "is damaged"),
    ],
)
def test_a_file_that_is_not_a_good_store_is_refused_and_left_alone(tmp_path, spoil, message) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "state.db"
    spoil(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=message) as told:
        asyncio.run(_load(path))
    assert str(path) in str(told.value)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["state.db"]


async def _load(path: Path) -> None:
    await SqliteStore(path).load()


async def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory must exist"):
        await _load(tmp_path / "nowhere" / "state.db")


async def test_a_file_open_in_another_program_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    await _create(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ConfigError, match="held open by another program"):
        await _load(path)
    other.close()
    await _load_and_close(path)


async def _load_and_close(path: Path) -> None:
    store = SqliteStore(path)
    assert await store.load()
    await store.close()


async def test_a_start_that_was_cut_off_before_the_first_write_is_a_new_store(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    path.touch()
    store = SqliteStore(path)
    assert await store.load() == {}
    await store.close()


async def test_a_full_disk_fails_every_waiting_save_and_all_that_follow(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = SqliteStore(path, max_pages=30)
    await store.load()
    version = await store.save("small", b"1", expect=0)
    results = await asyncio.gather(
        *(store.save(f"key-{n}", b"x" * 40_000, expect=0) for n in range(5)), return_exceptions=True
    )
    failed = [result for result in results if isinstance(result, StoreError)]
    assert failed
    assert "Check the disk" in str(failed[0])
    with pytest.raises(StoreError):
        await store.save("small", b"2", expect=version)
    await store.close()
    again = SqliteStore(path)
    found = await again.load()
    assert found["small"] == (b"1", version)
    acknowledged = {f"key-{n}" for n, result in enumerate(results) if isinstance(result, int)}
    assert acknowledged == found.keys() - {"small"}
    await again.close()


async def test_saves_of_many_writers_share_a_commit(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    await store.load()
    await asyncio.gather(*(store.save(f"key-{n}", b"1", expect=0) for n in range(500)))
    assert store.commits < 100
    await store.close()


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, list[str]]]:
    """Of each commit: whether the loop's thread wrote it, and which keys."""
    found: list[tuple[bool, list[str]]] = []
    here, execute = threading.get_ident(), sqlite._Writer._execute

    def watched(self: Any, after: dict[str, Any]) -> None:
        found.append((threading.get_ident() == here, list(after)))
        execute(self, after)

    monkeypatch.setattr(sqlite._Writer, "_execute", watched)
    return found


def test_a_commit_writes_one_page_whether_a_value_grows_or_shrinks(tmp_path: Path) -> None:
    with contextlib.closing(open_file(tmp_path / "state.db")) as db:
        save = (
            "INSERT INTO state (key, version, value) VALUES ('group/g', 1, zeroblob(?)) "
            "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        )
        db.execute(save, (800,))
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        for turn in range(20):
            db.execute(save, (800 if turn % 2 else 1300,))
        assert db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1] == 20


async def test_what_is_saved_in_one_turn_of_the_loop_is_written_by_it_while_the_disk_is_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: list[tuple[bool, list[str]]]
) -> None:
    monkeypatch.setattr(sqlite, "QUICK_S", 60.0)
    monkeypatch.setattr(sqlite, "STUCK_S", 60.0)
    store = SqliteStore(tmp_path / "state.db")
    await store.load()
    assert await store.save("a", b"1", expect=0) == 1
    assert writers == [(True, ["a"])]
    await asyncio.gather(store.save("b", b"1", expect=0), store.save("c", b"1", expect=0))
    assert writers[1:] == [(True, ["b", "c"])]
    await store.close()


async def test_a_slow_disk_does_not_hold_up_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: list[tuple[bool, list[str]]]
) -> None:
    monkeypatch.setattr(sqlite, "QUICK_S", 0.0)
    monkeypatch.setattr(sqlite, "STUCK_S", 60.0)
    store = SqliteStore(tmp_path / "state.db")
    await store.load()
    for n in range(6):
        await store.save(f"key-{n}", b"1", expect=0)
    assert [here for here, _ in writers] == [True] * 3 + [False] * 3  # nothing is known of the disk at first
    await store.close()


async def test_a_disk_that_hung_once_does_not_hold_up_the_loop_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: list[tuple[bool, list[str]]]
) -> None:
    monkeypatch.setattr(sqlite, "QUICK_S", 60.0)
    monkeypatch.setattr(sqlite, "STUCK_S", 0.0)
    store = SqliteStore(tmp_path / "state.db")
    await store.load()
    for n in range(3):
        await store.save(f"key-{n}", b"1", expect=0)
    assert [here for here, _ in writers] == [True, False, False]
    monkeypatch.setattr(sqlite, "STUCK_S", 60.0)  # none of the last commits hung
    await store.save("later", b"1", expect=0)
    assert writers[3:] == [(True, ["later"])]
    await store.close()


async def test_a_save_waits_its_turn_behind_those_with_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writers: list[tuple[bool, list[str]]]
) -> None:
    monkeypatch.setattr(sqlite, "QUICK_S", 60.0)
    monkeypatch.setattr(sqlite, "STUCK_S", 60.0)
    store = SqliteStore(tmp_path / "state.db")
    await store.load()
    loading = asyncio.ensure_future(store.load())  # the thread has the file meanwhile
    saving = asyncio.ensure_future(store.save("a", b"1", expect=0))
    found, version = await asyncio.gather(loading, saving)
    assert (found, version) == ({}, 1)
    assert not writers[0][0]
    closing = asyncio.ensure_future(store.save("a", b"2", expect=1))
    await asyncio.sleep(0)  # asked, not begun
    await store.close()
    assert await closing == 2
    again = SqliteStore(tmp_path / "state.db")
    assert await again.load() == {"a": (b"2", 2)}
    await again.close()


def test_an_owner_that_leaves_while_the_next_one_comes_does_not_let_two_in(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    first, third = Ownership(path), Ownership(path)
    first.take()

    class Late(Ownership):
        """Between its look at the lock file and its lock the file is removed, and made anew by another."""

        def _open(self) -> int:
            fd = super()._open()
            first.give_up()
            third.take()
            return fd

    with pytest.raises(ConfigError, match="is in use by process"):
        Late(path).take()
    third.give_up()
    assert list(_modes(tmp_path)) == []
