"""``coslice store``: a backup of an orchestrator that runs, put back into a store of its own."""

import json
import os
import shutil
import socket
import sqlite3
import stat
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from cli.conftest import Start
from typer.testing import CliRunner

import coslice
from coslice.cli.main import app
from coslice.core.group_state import Held
from coslice.errors import ConfigError
from coslice.orchestrator.groups import CODEC
from coslice.store.backup import read_backup, write_backup
from coslice.store.base import StoreError
from coslice.store.sqlite import SqliteStore
from coslice.testing.fake_kubernetes_http import FakeKubernetes

RECORDED = Path(__file__).parent.parent / "store" / "data" / "store-1.backup"
"""Of file format 1 and group schema 1: job-a holds ``train`` and job-b waits, ``sample`` has a policy set."""


def store(*arguments: str | Path) -> str:
    """What ``coslice store`` prints, in this process. Raises what it raises."""
    result = CliRunner().invoke(app, ["store", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_running_orchestrators_backup_is_restored_elsewhere(up: Start, tmp_path: Path) -> None:
    there = up("--memory", "64MiB")
    client = coslice.Client(there.orchestrator, job="job-a", groups="default", incarnation="one")
    client.acquire(timeout=30)
    file, state, other = tmp_path / "backup", tmp_path / "state", tmp_path / "other"
    made = store("backup", file, "-o", there.orchestrator, "--json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (entry,) = json.loads(made)["entries"]
    assert (entry["key"], entry["kind"], entry["schema"]) == ("group/default", "group", 1)
    with pytest.raises(ConfigError, match="is there already"):
        store("backup", file, "-o", there.orchestrator)
    with pytest.raises(ConfigError, match=f"in use by process {there.process.pid}"):
        store("restore", file, "--state", state, "--force")
    with pytest.raises(ConfigError, match=f"process {there.process.pid}.*ask that orchestrator with -o"):
        store("show", "--state", state)
    client.close()
    there.stop()

    store("restore", file, "--state", other)
    assert json.loads(store("show", "--state", other, "--json")) == {"entries": [entry]}
    with pytest.raises(ConfigError, match="then say --force"):
        store("restore", file, "--state", other)
    store("restore", file, "--state", other, "--force")
    # Goes on with what was saved, above its epoch; job-a, which held, is given up first.
    back = up("--memory", "64MiB", "--set", "session_grace=1s", state=other)
    client = coslice.Client(back.orchestrator, job="job-b", groups="default")
    client.acquire(timeout=30)
    client.close()
    back.stop()
    (later,) = json.loads(store("show", "--state", other, "--json"))["entries"]
    assert later["epoch"] > entry["epoch"] > 0


async def test_a_file_of_this_format_is_read_by_every_later_version(tmp_path: Path) -> None:
    """As a backup, and in the place of an orchestrator's store."""
    values = read_backup(RECORDED)
    groups = {key: CODEC.decode(value) for key, value in values.items()}
    train, sample = groups["group/train"], groups["group/sample"]
    assert isinstance(train.occupancy, Held)
    assert (train.occupancy.job, train.epoch, [w.job for w in train.waiters]) == ("job-a", 1, ["job-b"])
    assert sample.policy == "fifo"
    shutil.copyfile(RECORDED, tmp_path / "orchestrator.db")
    opened = SqliteStore(tmp_path / "orchestrator.db")
    assert {key: value for key, (value, _) in (await opened.load()).items()} == values
    await opened.close()


def test_a_backup_takes_the_place_of_a_file_and_of_nothing_else(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "elsewhere")
    for path in (pipe, link):
        with pytest.raises(ConfigError, match="no plain file"):
            write_backup(path, {}, force=True)
    assert pipe.is_fifo()
    assert link.is_symlink()


def _file_schema(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 7")


def _group_schema(path: Path) -> None:
    values = {key: value.replace(b'"schema":1', b'"schema":7') for key, value in read_backup(path).items()}
    write_backup(path, values, force=True)


def _admission_schema(path: Path) -> None:
    values = read_backup(path) | {"admission/train": b'{"kind":"admission","schema":7,"state":{}}'}
    write_backup(path, values, force=True)


def _of_an_agent(path: Path) -> None:
    write_backup(path, {"holdings/train": b'{"kind":"holdings","schema":1,"state":{}}'}, force=True)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def _one_byte(path: Path) -> None:
    """Of a value: a file of this version, in which an epoch became another."""
    write_backup(path, read_backup(path), force=True)
    whole = path.read_bytes()
    at = whole.index(b'"epoch":') + len(b'"epoch":')
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])


def _of_another_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA application_id = 1")


def _text(path: Path) -> None:
    path.write_text("no database at all, but longer than the header of one " * 20)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_file_schema, "has file format 7 and this coslice knows up to 1"),
        (_group_schema, "has schema 7 and this coslice knows up to 1: use the newer coslice"),
        (_admission_schema, "admission/train: .* of this admission has schema 7"),
        (_of_an_agent, "state of a 'holdings', not of a 'group'"),
        (_cut, "damaged or cut short"),
        (_one_byte, "its content is not what was written"),
        (_of_another_program, "no backup of coslice"),
        (_text, "no backup of coslice"),
        (_empty, "no backup of coslice"),
        (Path.unlink, "there is no backup"),
    ],
)
def test_what_cannot_be_restored_is_refused_before_anything_is_touched(
    tmp_path: Path, spoil: Callable[[Path], object], says: str
) -> None:
    file = tmp_path / "backup"
    shutil.copyfile(RECORDED, file)
    spoil(file)
    with pytest.raises(ConfigError, match=says):
        store("restore", file, "--state", tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_a_backup_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "no such folder" / "backup"):
        with pytest.raises(ConfigError, match="directory: name another file"):
            write_backup(where, {}, force=True)
    assert not list(tmp_path.iterdir())

    def forbidden(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:  # root may look everywhere
        patch.setattr(Path, "exists", forbidden)
        with pytest.raises(ConfigError, match="Permission denied: name another file"):
            write_backup(tmp_path / "backup", {}, force=False)


def test_a_newer_store_is_refused_naming_both_versions(tmp_path: Path) -> None:
    state = tmp_path / "state"
    store("restore", RECORDED, "--state", state)
    _file_schema(state / "orchestrator.db")
    with pytest.raises(ConfigError, match="has schema 7 and this version of coslice knows 1"):
        store("show", "--state", state)


def test_a_backup_moves_into_a_shared_store_and_back(tmp_path: Path) -> None:
    with FakeKubernetes() as api:
        place = f"kubernetes://here/t?api={api.url}"
        assert "2 saved values restored." in store("restore", RECORDED, "--store", place)
        store("backup", tmp_path / "back", "--store", place)
        assert read_backup(tmp_path / "back") == read_backup(RECORDED)
        with pytest.raises(ConfigError, match="then say --force"):
            store("restore", RECORDED, "--store", place)
        write_backup(tmp_path / "less", {"group/other": read_backup(RECORDED)["group/train"]}, force=False)
        assert ", 2 replaced." in store("restore", tmp_path / "less", "--store", place, "--force")
        (left,) = json.loads(store("show", "--store", place, "--json"))["entries"]
        assert left["key"] == "group/other"


@pytest.mark.parametrize("listens", [False, True])
@pytest.mark.parametrize("kind", ["etcd://{}/t", "kubernetes://here/t?api=http://{}"])
def test_a_shared_store_that_is_away_is_told_with_its_address_and_what_to_do(
    tmp_path: Path, kind: str, listens: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        if not listens:
            silent.close()
        away = ("--store", kind.format(address), "--timeout", "0.2")
        for command in (("show",), ("backup", tmp_path / "made"), ("restore", RECORDED)):
            with pytest.raises(StoreError, match=f"{address}.* did not answer within 0.2 s.*--timeout"):
                store(*command, *away)
    assert not (tmp_path / "made").exists()


def test_a_shared_store_without_its_package_names_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    for command in (("show",), ("backup", tmp_path / "made"), ("restore", RECORDED)):
        with pytest.raises(ConfigError, match=r"pip install 'coslice\[ha\]'"):
            store(*command, "--store", "etcd://127.0.0.1:1/t")
