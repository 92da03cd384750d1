"""Files and folders are ours alone: modes, links, owners; and one job's saved memory is never another's."""

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from agent.conftest import GROUP, MIB, Node

from coslice.agent.buffers import HostBuffers
from coslice.errors import ConfigError
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import OrchestratorConfig
from coslice.runtime.journal import Journal
from coslice.security.files import open_private, private_directory, read_secret, write_secret
from coslice.security.redact import redact
from coslice.store.ownership import Ownership
from coslice.store.sqlite_file import open_file

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def journal(path: Path) -> None:
    opened = Journal(path)
    opened.open(0.0)
    opened.close()


def store(path: Path) -> None:
    open_file(path).close()


def ownership(path: Path) -> None:
    owner = Ownership(path.with_suffix(""))
    owner.take()
    owner.give_up()


WRITERS: tuple[tuple[str, Callable[[Path], None]], ...] = (
    ("journal.jsonl", journal),
    ("state.db", store),
    ("state.lock", ownership),
)


@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_a_link_in_the_place_of_a_file_is_not_followed(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o644)
    (tmp_path / name).symlink_to(victim)
    with pytest.raises(ConfigError, match="link"):
        write(tmp_path / name)
    assert (victim.read_text(), mode(victim)) == ("mine", 0o644)


@as_root
@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_a_file_of_another_user_is_refused(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    (tmp_path / name).touch()
    os.chown(tmp_path / name, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=str(NOBODY)):
        write(tmp_path / name)


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = private_directory(tmp_path / "state")
        for name, write in WRITERS[:2]:
            (folder / name).touch(mode=0o666)
            write(folder / name)
            assert mode(folder / name) == 0o600, name
    finally:
        os.umask(before)
    assert mode(folder) == 0o700


def test_an_open_folder_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    private_directory(folder)
    assert mode(folder) == 0o700


def test_a_folder_that_is_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match=str(tmp_path / name)):
            private_directory(tmp_path / name)
    assert mode(real) == 0o755


@as_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="belongs to user"):
        private_directory(folder)


def test_a_fifo_in_the_place_of_a_file_neither_hangs_nor_opens(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "journal.jsonl")
    with pytest.raises((ConfigError, OSError)):
        open_private(tmp_path / "journal.jsonl", os.O_WRONLY)


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_secret(path, b"x")
    assert mode(path) == 0o600
    assert read_secret(path, "secret") == b"x"
    for bits in (0o644, 0o604, 0o620):
        path.chmod(bits)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_secret(path, "secret")
    with pytest.raises(ConfigError, match="there already"):
        write_secret(path, b"y")


@pytest.mark.parametrize("name", ["token.secret", "password", "node.token", "secret"])
def test_why_a_secret_cannot_be_read_or_written_is_said(name: str, tmp_path: Path) -> None:
    """Its path is no secret, nor what follows it."""
    for attempt in (lambda file: read_secret(file, "token secret"), lambda file: write_secret(file, b"x")):
        with pytest.raises(ConfigError) as told:
            attempt(tmp_path / "missing" / name)
        assert "No such file" in redact(str(told.value))


async def test_everything_that_an_orchestrator_leaves_is_private(tmp_path: Path) -> None:
    folder = private_directory(tmp_path / "state")
    app = OrchestratorApp(
        OrchestratorConfig(
            listen="127.0.0.1:0", store=str(folder / "state.db"), journal=str(folder / "journal.jsonl")
        )
    )
    await app.start()
    try:
        modes = {path.name: mode(path) for path in list_folder(folder)}
    finally:
        await app.stop()
    assert {"state.db", "journal.jsonl"} <= set(modes)
    assert set(modes.values()) == {0o600}, modes


async def test_everything_that_an_agent_leaves_is_private(node: Node) -> None:
    agent = await node.start()
    for folder in (Path(agent.config.state_dir), Path(agent.config.runtime_dir)):
        assert mode(folder) == 0o700
        for path in list_folder(folder):
            assert mode(path) & 0o077 == 0, path


def list_folder(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


# ── saved memory ───────────────────────────────────────────────────────────


async def test_a_buffer_is_zero_when_it_is_new_to_its_owner() -> None:
    """Not even pages that were lent back, or a name used again, show what another job had in them."""
    buffers = HostBuffers(4 * MIB)
    secret = b"weights of another tenant " * 1000
    await buffers.reserve("g/a", 3 * MIB)
    os.pwrite(buffers.descriptor("g/a"), secret, 0)
    buffers.release("g/a")
    await buffers.reserve("g/b", 3 * MIB)  # takes the room of the idle file
    assert os.pread(buffers.descriptor("g/b"), 3 * MIB, 0) == bytes(3 * MIB)
    assert os.pread(buffers.descriptor("g/a"), len(secret), 0) == bytes(len(secret))
    buffers.free("g/b")
    buffers.free("g/a")
    await buffers.reserve("g/a", 3 * MIB)
    assert os.pread(buffers.descriptor("g/a"), 3 * MIB, 0) == bytes(3 * MIB)
    buffers.close()


async def test_another_process_cannot_fetch_a_buffer_with_a_stolen_token(node: Node) -> None:
    """The socket asks the kernel who is there: the token alone, from another pid, is worth nothing."""
    agent = await node.start()
    await node.workload("job-a", size=MIB)
    (member,) = agent.members
    answer = await asyncio.to_thread(_ask, str(agent.config.runtime_dir), member.token)
    assert '"ok": false' in answer
    assert member.group == GROUP


def _ask(runtime: str, token: str) -> str:
    import json
    import socket

    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(f"{runtime}/buffers.sock")
        connection.sendall(json.dumps({"token": token, "bytes": 10}).encode() + b"\n")
        return connection.recv(65536).decode()
