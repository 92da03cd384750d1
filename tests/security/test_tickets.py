"""Only the process that fetched a ticket is registered with it: once, soon, by its own pid."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from agent.conftest import MIB, PATIENCE, Node

from coslice.agent.processes import start_time
from coslice.agent.tickets import NoTicket, Tickets
from coslice.errors import Denied
from coslice.workload.ticket import fetch

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="being another user needs root")

FETCH = """
import json, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
connection.sendall(b'{"ticket": true}\\n')
print(connection.recv(65536).decode(), end="", flush=True)
sys.stdin.read()
"""


def test_a_ticket_names_its_process_and_is_worth_one_registration() -> None:
    tickets = Tickets(uid=os.getuid())
    ticket = tickets.issue(os.getpid(), os.getuid())
    assert tickets.redeem(("y" if ticket[0] == "x" else "x") + ticket[1:]) is None
    redeemed = tickets.redeem(ticket)
    assert redeemed is not None
    assert (redeemed.pid, redeemed.started) == (os.getpid(), start_time(os.getpid()))
    assert tickets.redeem(ticket) is None


def test_a_ticket_is_short_lived_and_there_are_not_endless_many() -> None:
    clock = [0.0]
    tickets = Tickets(uid=os.getuid(), lifetime=30.0, limit=2, now=lambda: clock[0])
    old = tickets.issue(os.getpid(), os.getuid())
    tickets.issue(os.getpid(), os.getuid())
    with pytest.raises(NoTicket, match="2 tickets"):
        tickets.issue(os.getpid(), os.getuid())
    clock[0] = 30.0
    assert tickets.redeem(old) is None
    tickets.issue(os.getpid(), os.getuid())


def test_a_ticket_ends_with_its_process() -> None:
    tickets = Tickets(uid=os.getuid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ticket = tickets.issue(process.pid, os.getuid())
        process.kill()
    assert tickets.redeem(ticket) is None


def test_no_ticket_for_another_user_or_for_nobody() -> None:
    tickets = Tickets(uid=os.getuid())
    with pytest.raises(NoTicket, match="one user"):
        tickets.issue(os.getpid(), os.getuid() + 1)
    with pytest.raises(NoTicket, match="container"):
        tickets.issue(0, os.getuid())


async def refusal(node: Node, *flags: str) -> dict[str, object]:
    process = await node.workload("job-a", *flags, size=MIB, wait=False)
    return await process.until("refused")


async def test_without_a_ticket_nobody_registers_and_the_next_step_is_named(node: Node) -> None:
    agent = await node.start()
    said = await refusal(node, "--ticket", "none")
    assert said["code"] == "DENIED"
    assert agent.config.runtime_dir in str(said["message"])
    assert "COSLICE_AGENT_SOCKET" in str(said["message"])
    assert not list(agent.members)


async def test_a_made_up_ticket_registers_nobody(node: Node) -> None:
    agent = await node.start()
    assert (await refusal(node, "--ticket", "guess"))["code"] == "FAILED"
    assert not list(agent.members)


async def test_a_process_cannot_be_registered_by_another(node: Node) -> None:
    """The victim is alive, of the same user, and its pid and start time are right: only the ticket is not."""
    agent = await node.start()
    victim = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        started = start_time(victim.pid)
        said = await refusal(node, "--pid", str(victim.pid), "--start-time", str(started))
        assert said["code"] == "DENIED"
        assert str(victim.pid) in str(said["message"])
        assert not list(agent.members)
        assert victim.returncode is None
    finally:
        victim.kill()
        await victim.wait()


async def test_a_ticket_is_of_no_use_to_whom_it_was_passed_on(node: Node) -> None:
    """It was given to one process and is shown by another, as itself or in the first one's name."""
    agent = await node.start()
    path = Path(agent.config.runtime_dir) / "buffers.sock"
    for in_its_name in (False, True):
        owner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", FETCH, str(path)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert owner.stdout is not None
        async with asyncio.timeout(PATIENCE):
            ticket = json.loads(await owner.stdout.readline())["ticket"]
        flags = [f"--ticket={ticket}"]  # one may begin with a dash
        if in_its_name:  # a stolen ticket makes its owner a member, and gives the thief none of its memory
            flags += ["--pid", str(owner.pid), "--start-time", str(start_time(owner.pid))]
            await node.workload("job-a", *flags, size=MIB)
            (member,) = agent.members
            assert member.pid == owner.pid
        else:
            assert (await refusal(node, *flags))["code"] == "DENIED"
            assert not list(agent.members)
        owner.kill()
        await owner.wait()


@as_root
async def test_another_user_gets_no_ticket(node: Node) -> None:
    agent = await node.start()
    path = Path(agent.config.runtime_dir) / "buffers.sock"
    answer = await asyncio.to_thread(_ask_as_nobody, path, opened=False)
    assert answer == "PermissionError"  # the folder is ours alone
    answer = await asyncio.to_thread(_ask_as_nobody, path, opened=True)
    assert "one user" in answer  # and if it were not, the kernel says who asks


def _ask_as_nobody(path: Path, *, opened: bool) -> str:
    if opened:
        for folder in (path.parent, path.parent.parent):
            folder.chmod(0o755)
        path.chmod(0o666)
    code = FETCH.replace("connection.connect", "import os; os.setuid(65534)\nconnection.connect", 1)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        input="",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return done.stdout or done.stderr.strip().splitlines()[-1].partition(":")[0]


@as_root
def test_a_workload_trusts_no_agent_of_another_user() -> None:
    """Whoever listens where the agent should be would get the job's state."""
    folder = Path(tempfile.mkdtemp(prefix="coslice-"))  # tmp_path is for root's eyes only
    folder.chmod(0o777)
    path = folder / "agent.sock"
    code = f"""
import os, socket, sys
os.setuid({NOBODY})
listener = socket.socket(socket.AF_UNIX)
listener.bind({str(path)!r})
os.chmod({str(path)!r}, 0o777)
listener.listen()
print("ready", flush=True)
connection, _ = listener.accept()
connection.sendall(b'{{"ok": true, "ticket": "x"}}\\n')
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(Denied, match=str(NOBODY)):
            fetch(str(path))
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(folder)


def test_a_missing_socket_says_what_to_mount(tmp_path: Path) -> None:
    with pytest.raises(Denied, match="COSLICE_AGENT_SOCKET"):
        fetch(str(tmp_path / "agent.sock"))


def test_an_agent_that_gives_none_says_why(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b'{"ok": false, "code": "INVALID", "message": "no reason at all"}\n')

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Denied, match="no reason at all"):
            fetch(path)
        thread.join(PATIENCE)
