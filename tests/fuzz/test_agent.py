"""Every rpc of the agent with whatever bytes: it lives, it answers, and what others have there stays.

The victim is a process with real memory, registered in the group and on the device all the while.
"""

import itertools
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.cluster import ENVIRONMENT, MIB, Cluster, Process
from fuzz.messages import payloads
from fuzz.server import Server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

MESSAGES = pb.DESCRIPTOR.message_types_by_name
WORKLOAD = Path(__file__).parents[1] / "agent" / "fake_workload.py"
SEARCH = settings().max_examples > 100
FUZZ = settings(
    max_examples=settings().max_examples if SEARCH else 30, suppress_health_check=list(HealthCheck)
)
_names = itertools.count()


class Target:
    def __init__(self, cluster: Cluster) -> None:
        cluster.orchestrator()
        self.process: Process = cluster.agent("n1", move_timeout=1.0, section_wait=0.1, on_stuck="wait")
        address = cluster.agents["n1"]
        self.server = Server(address, "Agent")
        self.stub = rpc.AgentStub(self.server.channel)
        command = [sys.executable, str(WORKLOAD), "--agent", address, "--job", "victim", "--group", "pool"]
        self.victim = subprocess.Popen(
            [*command, "--bytes", str(32 * MIB)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        assert self.victim.stdout is not None
        assert json.loads(self.victim.stdout.readline())["event"] == "registered"
        self.bystander = subprocess.Popen(["sleep", "600"])
        """A process that strangers may name without harm to us."""

    def register(self, *, direct: bool) -> bytes:
        stat = Path(f"/proc/{self.bystander.pid}/stat").read_text().rpartition(")")[2].split()
        job = f"stranger-{next(_names)}"
        said = pb.Register(
            job=job,
            incarnation=uuid.uuid4().hex,
            group="" if direct else "pool",
            pid=self.bystander.pid,
            start_time=int(stat[19]),
            state_bytes=MIB,
        )
        return pb.WorkloadMessage(register=said).SerializeToString()

    def check(self) -> None:
        status = self.stub.GetNodeStatus(pb.GetNodeStatusRequest(), timeout=30)
        pool = next(group for group in status.groups if group.group == "pool")
        found = [(c.state, c.bytes, list(c.pids)) for c in pool.contexts if c.job == "victim"]
        assert found == [(pb.LIVE, 32 * MIB, [self.victim.pid])]
        assert self.victim.poll() is None
        assert self.process.process.poll() is None
        assert "Traceback" not in (log := self.process.log.read_text()), log[-3000:]

    def close(self) -> None:
        for process in (self.victim, self.bystander):
            process.kill()
            process.wait(30)
        for pipe in (self.victim.stdin, self.victim.stdout):
            if pipe is not None:
                pipe.close()
        self.server.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    cluster = Cluster(tmp_path_factory.mktemp("fuzz"))
    try:
        target = Target(cluster)
        yield target
        target.close()
    finally:
        cluster.close()


@FUZZ
@given(sent=st.lists(payloads(MESSAGES["WorkloadMessage"]), max_size=6))
def test_channel_with_anything(target: Target, sent: list[bytes]) -> None:
    target.server.call("Channel", sent)
    target.check()


@FUZZ
@given(sent=st.lists(payloads(MESSAGES["WorkloadMessage"]), max_size=6), direct=st.booleans())
def test_channel_of_a_process_that_goes_wrong(target: Target, sent: list[bytes], direct: bool) -> None:
    target.server.call("Channel", [target.register(direct=direct), *sent])
    target.check()


@FUZZ
@given(
    asked=st.one_of(
        st.tuples(st.just("Snapshot"), payloads(MESSAGES["SnapshotRequest"])),
        st.tuples(st.just("Restore"), payloads(MESSAGES["RestoreRequest"])),
        st.tuples(st.just("GetNodeStatus"), payloads(MESSAGES["GetNodeStatusRequest"])),
    )
)
def test_questions(target: Target, asked: tuple[str, bytes]) -> None:
    target.server.call(asked[0], [asked[1]])
    target.check()
