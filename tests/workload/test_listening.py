"""Who is below a process, and who listens: asked of real processes and sockets."""

import os
import socket
import subprocess
import sys

import pytest
from ports import Kept

from coslice.workload import listening

CHILDREN = """
import socket, subprocess, sys, threading
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
kids = []
def child():
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    kids.append(subprocess.Popen(waits, stdin=subprocess.PIPE))
    over.wait()  # a child belongs to the thread that made it, for as long as that lives
over = threading.Event()
threads = [threading.Thread(target=child) for _ in range(2)]
for thread in threads:
    thread.start()
while len(kids) < 2:
    pass
print(kids[0].pid, kids[1].pid, flush=True)
sys.stdin.read()
over.set()
for kid in kids:
    kid.kill()
    kid.wait()
"""


@pytest.mark.parametrize("way", ["kernel lists", "all of proc"])
def test_a_process_its_children_and_those_of_its_threads_are_one(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "all of proc":
        monkeypatch.setattr(os.path, "exists", lambda path: False)
    place = Kept()  # or somebody else may listen there when the parent has ended
    port, pipe = place.port, subprocess.PIPE
    command = [sys.executable, "-c", CHILDREN, str(port)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        first, second = map(int, parent.stdout.readline().split())
        assert sorted(listening.tree(parent.pid)) == sorted((parent.pid, first, second))
        assert listening.tree(parent.pid)[0] == parent.pid
        assert listening.tree(first) == (first,)
        assert parent.pid in listening.tree(os.getpid())
        assert listening.listens((parent.pid,), port) is True
        assert listening.listens((first, os.getpid()), port) is False
        assert listening.listener(port) == parent.pid
        parent.communicate("")
    assert listening.tree(parent.pid) == ()
    assert listening.started(parent.pid) is None
    assert listening.listener(port) is None


def test_a_port_that_is_only_connected_to_is_not_listened_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            mine = client.getsockname()[1]
            assert listening.listens((os.getpid(),), port) is True
            assert listening.listens((os.getpid(),), mine) is False
