"""Job processes that are killed at a bad moment: the others go on."""

from faults.cluster import Cluster

from coslice.wire.v1 import coslice_pb2 as pb

SHORT = {"session_grace": 1.0}


def test_c4_a_killed_waiter_leaves_no_ghost(cluster: Cluster) -> None:
    """C4: B is killed while queued; C behind it is granted and nothing of B is left."""
    cluster.orchestrator(**SHORT)
    cluster.agent()
    a, b, c = (cluster.job(name) for name in ("job-a", "job-b", "job-c"))
    a.acquire()
    b.tell("acquire")
    cluster.until_waiting("job-b")
    c.tell("acquire")
    cluster.until_waiting("job-b", "job-c")
    b.kill()
    a.yield_()
    c.expect("granted")
    c.yield_()
    left = cluster.until("pool", lambda group: not group.waiters)
    assert left.state != "held"


def test_rb1_a_killed_holder_loses_the_lock(cluster: Cluster) -> None:
    """RB1: SIGKILL of the holder; the waiter is granted, under a later epoch."""
    cluster.orchestrator(**SHORT)
    cluster.agent()
    a, b = cluster.job("job-a"), cluster.job("job-b")
    held = a.acquire()
    b.tell("acquire")
    cluster.until_waiting("job-b")
    a.kill()
    assert b.expect("granted")["epoch"] > held["epoch"]


def test_c9_a_job_killed_after_its_last_yield_blocks_nobody(cluster: Cluster) -> None:
    """C9: A yields with no waiter (its snapshot is put off) and is killed; B is granted."""
    cluster.orchestrator(**SHORT)
    cluster.agent()
    a, b = cluster.job("job-a", mib=40), cluster.job("job-b", mib=40)
    a.turn()
    b.until_ready()
    a.kill()
    b.turn()


def test_c9_a_job_killed_during_its_snapshot_blocks_nobody(cluster: Cluster) -> None:
    """C9: A is killed in the middle of its snapshot, before B's turn; B is granted."""
    cluster.orchestrator(**SHORT)
    cluster.agent()
    a, b = cluster.job("job-a", "--stall-snapshot", mib=40), cluster.job("job-b", mib=40)
    a.turn()
    b.tell("acquire")
    a.expect("snapshotting")
    a.kill()
    b.expect("granted")
    b.yield_()


def test_c10_one_faulted_job_blocks_no_other_and_may_register_again(cluster: Cluster) -> None:
    """C10: A's restore fails for good; B goes on; A's next process is accepted under the same name."""
    cluster.orchestrator(**SHORT)
    cluster.agent(retries=0)
    a, b = cluster.job("job-a", "--fail-restore", mib=40), cluster.job("job-b")
    a.turn()
    b.turn()
    a.tell("acquire")
    assert a.expect("error")["kind"] == "JobFaulted"
    assert b.turn()
    a.kill()
    again = cluster.job("job-a", mib=40)
    cluster.until("pool", lambda group: all(job.sessions == 0 for job in group.jobs if job.job == "job-a"))
    b.acquire()  # the newcomer registers while the device is another's
    again.tell("acquire")
    cluster.until_waiting("job-a")
    b.yield_()
    again.expect("granted")
    again.yield_()
    b.turn()


def test_c15_a_name_used_again_starts_clean(cluster: Cluster) -> None:
    """C15: a job leaves while its state is saved; the next one of that name gets none of it."""
    cluster.orchestrator(**SHORT)
    cluster.agent()
    a, b = cluster.job("job-a", mib=40), cluster.job("job-b", mib=40)
    a.acquire()
    others = a.digest()
    a.yield_()
    b.acquire()
    bs = b.digest()
    b.yield_()
    a.kill()
    cluster.until("pool", forgotten)
    again = cluster.job("job-a", mib=40)  # B's state is on the device: the newcomer's is set aside at once
    again.acquire()
    own = again.digest()
    assert own not in (others, bs)
    again.yield_()
    b.acquire()
    assert b.digest() == bs
    b.yield_()
    again.acquire()
    assert again.digest() == own
    again.yield_()


def forgotten(group: pb.GroupStatus) -> bool:
    """Neither the orchestrator nor the node knows anything of job-a."""
    contexts = [context.job for node in group.nodes for context in node.contexts]
    return "job-a" not in contexts and all(job.job != "job-a" for job in group.jobs)
