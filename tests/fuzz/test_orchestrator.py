"""Every rpc of the orchestrator with whatever bytes: it lives, it answers, nobody else's lease changes.

The victim holds the lock of ``pool`` all the while. Attackers know its job, its group, its epoch and even the
ids of its requests, but neither its session nor its incarnation.
"""

import itertools
import uuid
from collections.abc import Iterator

import pytest
from faults.cluster import Cluster, Process
from fuzz.messages import payloads
from fuzz.server import Server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import coslice
from coslice.client.sync import Client
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

MESSAGES = pb.DESCRIPTOR.message_types_by_name
SEARCH = settings().max_examples > 100
FUZZ = settings(
    max_examples=settings().max_examples if SEARCH else 30, suppress_health_check=list(HealthCheck)
)
_names = itertools.count()


class Target:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.process: Process = cluster.orchestrator(
            groups=[{"id": "pool", "nodes": ["n1"]}],
            journal=str(cluster.folder / "journal.jsonl"),
            session_grace=0.5,
            hello_timeout=0.2,
            max_message_bytes=1 << 16,
        )
        cluster.agent("n1")
        self.victim: Client = coslice.connect(
            address=cluster.address, job="victim", groups="pool", incarnation=uuid.uuid4().hex
        )
        self.epoch = self.victim.acquire(timeout=30).leases[0].epoch
        self.server = Server(cluster.address, "Orchestrator")
        self.stub = rpc.OrchestratorStub(self.server.channel)

    def check(self) -> None:
        """It answers, and the victim has what it had."""
        status = self.stub.GetStatus(pb.GetStatusRequest(group="pool"), timeout=30).groups[0]
        assert (status.state, status.job, status.epoch) == ("held", "victim", self.epoch)
        assert [node.node for node in status.nodes] == ["n1"]
        assert self.process.process.poll() is None
        assert "Traceback" not in (log := self.process.log.read_text()), log[-3000:]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    cluster = Cluster(tmp_path_factory.mktemp("fuzz"))
    try:
        target = Target(cluster)
        yield target
        target.victim.yield_()  # unharmed: it yields, and another is served
        with coslice.connect(address=cluster.address, job="next", groups="pool") as other:
            assert other.acquire(timeout=30).leases[0].epoch > target.epoch
            other.yield_()
        target.victim.close()
    finally:
        cluster.close()


def hello() -> bytes:
    """A stranger that behaves until now."""
    who = pb.Hello(job=f"stranger-{next(_names)}", session=uuid.uuid4().hex, incarnation="one")
    return pb.ClientMessage(hello=who).SerializeToString()


def agent_hello() -> bytes:
    name = f"node-{next(_names)}"
    offers = [pb.GroupOffer(group="pool", epoch=1), pb.GroupOffer(group="other", epoch=1)]
    who = pb.AgentHello(node=name, instance=uuid.uuid4().hex, groups=offers)
    return pb.AgentMessage(hello=who).SerializeToString()


@FUZZ
@given(sent=st.lists(payloads(MESSAGES["ClientMessage"]), max_size=6))
def test_session_with_anything(target: Target, sent: list[bytes]) -> None:
    target.server.call("Session", sent)
    target.check()


@FUZZ
@given(sent=st.lists(payloads(MESSAGES["ClientMessage"]), max_size=6))
def test_session_of_a_stranger_that_goes_wrong(target: Target, sent: list[bytes]) -> None:
    target.server.call("Session", [hello(), *sent])
    target.check()


@FUZZ
@given(sent=st.lists(payloads(MESSAGES["AgentMessage"]), max_size=6))
def test_attach_with_anything(target: Target, sent: list[bytes]) -> None:
    target.server.call("Attach", sent)
    target.check()


@FUZZ
@given(sent=st.lists(payloads(MESSAGES["AgentMessage"]), max_size=6))
def test_attach_of_a_stranger_that_goes_wrong(target: Target, sent: list[bytes]) -> None:
    target.server.call("Attach", [agent_hello(), *sent])
    target.check()


@FUZZ
@given(
    asked=st.one_of(
        st.tuples(st.just("GetStatus"), payloads(MESSAGES["GetStatusRequest"])),
        st.tuples(st.just("WatchStatus"), payloads(MESSAGES["GetStatusRequest"])),
        st.tuples(st.just("Explain"), payloads(MESSAGES["ExplainRequest"])),
    )
)
def test_questions(target: Target, asked: tuple[str, bytes]) -> None:
    target.server.call(asked[0], [asked[1]], answers=1)
    target.check()


def test_who_knows_a_request_cannot_end_it(target: Target) -> None:
    """The ids of requests are in the status of every group: they name, they do not authorise."""
    number = 1
    session = target.victim._link()._session.hello.session  # what an attacker would have read
    request = f"{session}/{number}"
    sent = [
        pb.ClientMessage(acquire=pb.Acquire(request=uuid.uuid4().hex, groups=["pool"])),
        pb.ClientMessage(abandon=pb.Abandon(request=request, reason="not mine")),
        pb.ClientMessage(confirm=pb.Confirm(request=request)),
        pb.ClientMessage(acquire=pb.Acquire(request=request, groups=["pool"])),
    ]
    steal = pb.ClientMessage()
    getattr(steal, "yield").CopyFrom(
        pb.Yield(request="theft", leases=[pb.LeaseRef(group="pool", epoch=target.epoch)])
    )
    target.server.call("Session", [hello(), *(m.SerializeToString() for m in [*sent, steal])])
    target.check()
