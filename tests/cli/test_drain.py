"""Maintenance of a node, step by step, with real processes; the orchestrator is killed in between."""

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import COSLICE, ENVIRONMENT, in_process
from client.waiting import wait_for
from ports import Kept

import coslice
from coslice.cli.rpc import orchestrator
from coslice.wire.v1 import coslice_pb2 as pb

BOUND = 60.0


class Cluster:
    """An orchestrator and one agent, each a process of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._place = Kept()
        self.folder, self.address, self.monkeypatch = folder, self._place.address, monkeypatch
        self.started: list[subprocess.Popen[str]] = []

    def orchestrator(self) -> "subprocess.Popen[str]":
        """The same place and port again if it ran before."""
        state = str(self.folder / "orchestrator")
        process, ready = self._serve("orchestrator", "--listen", self.address, "--state", state)
        self.address = ready["orchestrator"]
        return process

    def agent(self) -> "subprocess.Popen[str]":
        listen = ("--orchestrator", self.address, "--listen", "127.0.0.1:0")
        state = ("--state", str(self.folder / "agent"))
        return self._serve("agent", "--node", "n0", "--device", "host", "--memory", "64MiB", *listen, *state)[
            0
        ]

    def _serve(self, *arguments: str) -> "tuple[subprocess.Popen[str], dict[str, Any]]":
        process = self.spawn(*arguments, "--json")
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())

    def spawn(self, *arguments: str) -> "subprocess.Popen[str]":
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*COSLICE, *arguments], text=True, env=ENVIRONMENT, **pipes)
        self.started.append(process)
        return process

    def drain(self, *options: str) -> "subprocess.CompletedProcess[str]":
        return in_process("drain", "n0", *options, "-o", self.address, monkeypatch=self.monkeypatch)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster(tmp_path, monkeypatch)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until_attached(address: str) -> pb.GroupStatus:
    with orchestrator(address) as stub:
        for state in stub.WatchStatus(pb.GetStatusRequest(), timeout=BOUND):
            for group in state.groups:
                if any(node.attached for node in group.nodes):
                    return group
    raise AssertionError("the watch ended")


def until_told(process: "subprocess.Popen[str]", text: str) -> None:
    """Its standard error, up to a line with ``text``."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"it ended with {process.wait()} and did not say {text!r}")


def test_a_node_is_drained_over_the_death_of_the_orchestrator_and_serves_again(cluster: Cluster) -> None:
    server, agent = cluster.orchestrator(), cluster.agent()
    until_attached(cluster.address)
    a, b = (coslice.Client(cluster.address, job=job, groups="default") for job in ("job-a", "job-b"))
    a.acquire(timeout=BOUND)
    granted = threading.Event()
    waiter = threading.Thread(target=lambda: (b.acquire(), granted.set()), daemon=True)
    waiter.start()

    wait = cluster.spawn("drain", "n0", "--wait", "--reason", "new fan", "-o", cluster.address)
    until_told(wait, "group default: job-a holds a lease and was asked to give way")
    wait_for(a.should_yield)
    wait.send_signal(signal.SIGINT)
    until_told(wait, "interrupted. n0 stays drained: `coslice drain n0 --wait` waits again")
    assert wait.wait(BOUND) == 130
    late = cluster.drain("--wait", "--timeout", "0.1")
    assert late.returncode == 1
    assert "n0 is drained already" in late.stdout
    assert "after 0.1 s it is not out yet. n0 stays drained" in late.stderr

    server.kill()
    server.wait()
    cluster.orchestrator()
    a.yield_()
    out = cluster.drain("--wait", "--json")
    said = json.loads(out.stdout)
    assert (said["drained"], said["changed"], said["out"]) == (True, False, True)

    agent.send_signal(signal.SIGINT)  # the maintenance itself
    agent.wait(BOUND)
    cluster.agent()
    group = until_attached(cluster.address)
    assert group.nodes[0].drained.reason == "new fan"
    assert [waiter.job for waiter in group.waiters] == ["job-b"]
    assert "out for maintenance" in group.waiters[0].reason
    assert not granted.is_set()
    assert cluster.drain("--undo").stdout == "n0 serves again.\n"
    waiter.join(BOUND)
    assert granted.is_set()
    for client in (a, b):
        client.close()
