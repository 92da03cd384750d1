"""Field reports that are about order, not about anything that dies: cold starts, newcomers, duplicates."""

from concurrent.futures import ThreadPoolExecutor

import grpc
from faults.cluster import BOUND, Cluster

from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc


def test_c1_jobs_that_never_touched_the_device_are_granted(cluster: Cluster) -> None:
    """C1: cold start, twice; and again with B beginning only once A holds."""
    cluster.orchestrator()
    cluster.agent()
    a, b, late = (cluster.job(name) for name in ("job-a", "job-b", "late"))
    for job in (a, b, a, b):
        assert not job.turn()["restored"]
    a.acquire()
    late.tell("acquire")
    cluster.until_waiting("late")
    a.yield_()
    late.expect("granted")
    late.yield_()


def test_c2_a_grant_given_back_before_it_was_used(cluster: Cluster) -> None:
    """C2: A yields before it has any state, B (saved) is restored; then A's state comes: never both."""
    cluster.orchestrator()
    cluster.agent()
    a, b = cluster.job("job-a", "--late", mib=40), cluster.job("job-b", mib=40)
    b.acquire()
    state = b.digest()
    b.yield_()
    a.acquire()  # B has to leave for a need that nobody knows
    b.tell("acquire")
    cluster.until_waiting("job-b")
    a.yield_()
    assert b.expect("granted")["restored"]
    assert b.digest() == state
    a.tell("register")  # while B holds: A's state is set aside
    a.expect("registered")
    assert b.digest() == state
    b.yield_()
    assert a.acquire()["restored"]
    a.yield_()
    b.acquire()
    assert b.digest() == state
    b.yield_()


def test_c3_c12_two_newcomers_and_no_holder(cluster: Cluster) -> None:
    """C3: both bring state to a device for one; C12: a grant says restored only if something was."""
    cluster.orchestrator()
    cluster.agent()
    a, b = cluster.job("job-a", mib=40), cluster.job("job-b", mib=40)
    a.until_ready()
    b.until_ready()
    assert b.acquire()["restored"]
    state = b.digest()
    b.yield_()
    assert not b.acquire()["restored"]
    b.yield_()
    assert a.turn()["restored"]
    assert b.acquire()["restored"]
    assert b.digest() == state


def test_c13_status_and_moves_of_one_job_from_many_threads(cluster: Cluster) -> None:
    """C13: nothing waits for ever; after it the job is where it was."""
    cluster.orchestrator()
    cluster.agent()
    job = cluster.job("direct", group="", mib=16)
    job.until_ready()
    before = job.digest()
    handled = {grpc.StatusCode.OK, grpc.StatusCode.ABORTED}
    with grpc.insecure_channel(cluster.agents["n1"]) as channel:
        stub = rpc.AgentStub(channel)

        def hammer(number: int) -> grpc.StatusCode:
            try:
                match number % 4:
                    case 0:
                        stub.Snapshot(pb.SnapshotRequest(job="direct"), timeout=BOUND)
                    case 1:
                        stub.Restore(pb.RestoreRequest(job="direct"), timeout=BOUND)
                    case _:
                        stub.GetNodeStatus(pb.GetNodeStatusRequest(), timeout=BOUND)
            except grpc.RpcError as error:
                status: grpc.StatusCode = error.code()
                return status
            return grpc.StatusCode.OK

        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(hammer, range(120))) <= handled
        stub.Restore(pb.RestoreRequest(job="direct"), timeout=BOUND)
    assert job.digest() == before


def test_c17_a_second_process_under_the_same_name_is_refused(cluster: Cluster) -> None:
    """C17: another incarnation of a job that runs; the first keeps what it has."""
    cluster.orchestrator()
    cluster.agent()
    first, second = cluster.job("job-a"), cluster.job("job-a")
    held = first.acquire()
    second.tell("acquire")
    assert second.expect("error")["kind"] == "JobRunning"
    now = cluster.until("pool", lambda group: True)
    assert (now.state, now.job, now.epoch) == ("held", "job-a", held["epoch"])
    first.yield_()
