"""Job processes that are stopped, not dead: their connections stay open and say nothing."""

from faults.cluster import BOUND, Cluster

SHORT = {"session_grace": 1.0, "keepalive": 1.0}
"""Keepalive: how soon a peer that is stopped, not dead, is noticed (one ping, one wait for its answer)."""


def test_rb1_a_stopped_holder_loses_the_lock_and_its_late_yield_is_fenced(cluster: Cluster) -> None:
    """RB1: SIGSTOP of the holder; the waiter is granted; the late yield changes nothing for it."""
    cluster.orchestrator(**SHORT)
    cluster.agent()
    a, b = cluster.job("job-a"), cluster.job("job-b")
    held = a.acquire()
    b.tell("acquire")
    cluster.until_waiting("job-b")
    a.stop()
    granted = b.expect("granted")
    assert granted["epoch"] > held["epoch"]
    a.go_on()
    a.tell("yield")
    said = a.hear()  # that it was lost, unless it is still reconnecting: then the yield is delivered later
    assert said["event"] == "yielded" or said["kind"] == "LeaseLost"
    a.tell("acquire")
    now = cluster.until("pool", lambda group: [waiter.job for waiter in group.waiters] == ["job-a"])
    assert (now.state, now.job, now.epoch) == ("held", "job-b", granted["epoch"])  # after A's late yield
    b.yield_()
    a.expect("granted")


def test_rb1_a_stopped_holder_with_state_on_the_device_gives_way(cluster: Cluster) -> None:
    """RB1: a stopped process cannot move its state; after the agent's grace it is killed, B runs."""
    cluster.orchestrator(**SHORT)
    cluster.agent(move_timeout=5.0, section_wait=0.5, retries=0, stuck_grace=0.0)
    a, b = cluster.job("job-a", mib=40), cluster.job("job-b", mib=40)
    a.acquire()
    b.tell("acquire")
    cluster.until_waiting("job-b")
    a.stop()
    b.expect("granted")
    assert a.process.wait(BOUND) < 0
