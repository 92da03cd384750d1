"""A cluster of real processes that tests kill and stop: orchestrator, agents, jobs, each by its pid.

Waiting is for events (a line of output, a status that the orchestrator pushes, a process's end), always with
a bound.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from forked import Forked
from ports import Kept

from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

BOUND = 60.0
MIB = 1 << 20
HERE = Path(__file__).parent
COSLICE = (sys.executable, "-m", "coslice.cli.main")
ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("COSLICE_")}


class Process:
    """A child whose JSON lines are read in the background; ``facts`` is the first of them."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        """``command``: of a script in this folder, or of ``coslice``."""
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        variables = ENVIRONMENT | environment
        self.process: Forked | subprocess.Popen[str]
        with log.open("a") as stderr:
            if command[0].endswith(".py"):
                self.process = Forked(HERE / command[0], *command[1:], env=variables, stderr=stderr)
            else:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    env=variables,
                )
        self.log, self.pid = log, self.process.pid
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def hear(self, *, within: float = BOUND) -> dict[str, Any]:
        """The next thing it says."""
        try:
            said = self._lines.get(timeout=within)
        except queue.Empty:
            raise AssertionError(f"{self.log.stem} said nothing for {within} s") from None
        assert said is not None, f"{self.log.stem} ended: {self.log.read_text()[-2000:]}"
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(BOUND)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """However the test left it."""
        self.process.kill()
        self.process.wait(BOUND)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Job(Process):
    """Several start side by side; each registers when it is first told something, and not before."""

    ready = False

    def tell(self, command: str) -> None:
        self.until_ready()
        self._write(command)

    def until_ready(self) -> None:
        if not self.ready:
            self._write("begin")
            self.expect("ready")
            self.ready = True

    def _write(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def expect(self, event: str, *, within: float = BOUND) -> dict[str, Any]:
        said = self.hear(within=within)
        assert said["event"] == event, said
        return said

    def acquire(self) -> dict[str, Any]:
        self.tell("acquire")
        return self.expect("granted")

    def yield_(self) -> None:
        self.tell("yield")
        self.expect("yielded")

    def turn(self) -> dict[str, Any]:
        grant = self.acquire()
        self.yield_()
        return grant

    def digest(self) -> str:
        self.tell("digest")
        return str(self.expect("digest")["digest"])

    def leave(self) -> None:
        self.tell("leave")
        self.expect("left")
        assert self.process.wait(BOUND) == 0


class Cluster:
    """Addresses stay the same over restarts, as those of a service do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = ""
        self.agents: dict[str, str] = {}
        self._places: list[Kept] = []
        self._processes: list[Process] = []
        self._commands: dict[str, list[str]] = {}

    def _place(self) -> str:
        """Of a server that may be started again: nobody else's meanwhile."""
        self._places.append(Kept())
        return self._places[-1].address

    def orchestrator(self, **settings: object) -> Process:
        """``settings``: of ``OrchestratorConfig``; none: ``coslice orchestrator`` as users start it."""
        listen = self.address or self._place()
        if settings:
            config = {"listen": listen, "store": str(self.folder / "orchestrator.db"), **settings}
            command = ["serve.py", "orchestrator", json.dumps(config)]
        else:
            command = [*COSLICE, "orchestrator", "--json", "--listen", listen, "--state", str(self.folder)]
        process = self._start(Process, "orchestrator", command)
        self.address = str(process.hear()["orchestrator"])
        return process

    def agent(self, node: str = "n1", group: str = "pool", **settings: object) -> Process:
        """A host accelerator with room for one job's state. ``settings``: of ``AgentConfig``."""
        listen = self.agents.get(node) or self._place()
        folder = self.folder / node
        if settings:
            config = {
                "node": node,
                "orchestrator": self.address,
                "listen": listen,
                "groups": [{"group": group, "device_budget": 64 * MIB}],
                "host_budget": 512 * MIB,
                "state_dir": str(folder),
                "runtime_dir": str(folder / "run"),
                **settings,
            }
            command = ["serve.py", "agent", json.dumps(config)]
        else:
            command = [*COSLICE, "agent", "--json", "--node", node, "--group", group, "--device", "host"]
            command += ["--memory", "64MiB", "--host-memory", "512MiB", "--state", str(folder)]
            command += ["--listen", listen, "--orchestrator", self.address]
        process = self._start(Process, node, command)
        self.agents[node] = str(process.hear()["agent"])
        self.until(group, lambda status: any(at.node == node and at.attached for at in status.nodes))
        return process

    def job(self, name: str, *flags: str, group: str = "pool", node: str = "n1", mib: int = 0) -> Job:
        """With ``mib`` it has that much torch state; without it only the lock concerns it."""
        command = ["job.py", *flags]
        environment = {"COSLICE_JOB": name, "COSLICE_GROUP": group, "COSLICE_ORCHESTRATOR": self.address}
        environment["COSLICE_INCARNATION"] = f"{name}-{len(self._processes)}"
        if mib:
            command += ["--state", str(mib * MIB)]
            environment["COSLICE_AGENT"] = self.agents[node]
        job: Job = self._start(Job, name, command, **environment)
        return job

    def _start(self, kind: type[Any], name: str, command: list[str], **environment: str) -> Any:
        process = kind(command, self.folder / f"{name}.log", **environment)
        self._processes.append(process)
        return process

    def until(
        self, group: str, condition: Callable[[pb.GroupStatus], bool], *, within: float = BOUND
    ) -> pb.GroupStatus:
        """The first status of the group that fulfils it: the orchestrator pushes every change."""
        deadline = time.monotonic() + within
        seen: object = None
        with grpc.insecure_channel(self.address) as channel:
            while (left := deadline - time.monotonic()) > 0:
                watch = rpc.OrchestratorStub(channel).WatchStatus(
                    pb.GetStatusRequest(), timeout=left, wait_for_ready=True
                )
                try:
                    for answer in watch:
                        for status in answer.groups:
                            if status.group == group:
                                seen = status
                                if condition(status):
                                    return status
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                        raise
        raise AssertionError(f"not within {within} s; the last status was: {seen}")

    def until_waiting(self, *jobs: str, group: str = "pool") -> None:
        self.until(group, lambda status: [waiter.job for waiter in status.waiters] == list(jobs))

    def until_back(self, job: str, group: str = "pool", *, times: int = 1) -> None:
        """The job's client has a stream again: what it asked before it has asked again, so many times."""
        deadline = time.monotonic() + BOUND
        with grpc.insecure_channel(self.address) as channel:
            stub = rpc.OrchestratorStub(channel)
            while True:
                story = stub.Explain(pb.ExplainRequest(group=group, job=job, last=50), timeout=BOUND)
                if sum(f"{job} asked again" in line for line in story.lines) >= times:
                    return
                assert time.monotonic() < deadline, story
                time.sleep(0.02)  # the story is not pushed

    def close(self) -> None:
        for process in reversed(self._processes):
            process.end()
