"""Orchestrators and agents that are killed or stopped: nothing is lost, nobody else waits."""

import subprocess

from faults.cluster import BOUND, COSLICE, ENVIRONMENT, Cluster


def test_c11_the_queue_survives_a_kill_of_the_orchestrator(cluster: Cluster) -> None:
    """C11: kill -9 with five waiters; the holder yields meanwhile; afterwards order and epochs go on."""
    settles = {"resettle": 60.0}  # ends when all are back; by default soon, which a busy machine may miss
    orchestrator = cluster.orchestrator(**settles)
    cluster.agent()
    holder = cluster.job("holder")
    waiters = {name: cluster.job(name) for name in ("w3", "w1", "w5", "w2", "w4")}
    epochs = [holder.acquire()["epoch"]]
    for count, waiter in enumerate(waiters.values(), 1):
        waiter.tell("acquire")
        cluster.until_waiting(*list(waiters)[:count])
    orchestrator.kill()
    holder.yield_()  # delivered when it is back: the lock is free before all waiters are
    cluster.orchestrator(**settles)
    for position, waiter in enumerate(waiters.values()):
        epochs.append(waiter.expect("granted")["epoch"])
        status = cluster.until("pool", lambda group: group.state == "held")
        assert [other.job for other in status.waiters] == list(waiters)[position + 1 :]
        waiter.yield_()
    assert epochs == sorted(set(epochs))


def test_c14_a_saved_job_survives_a_kill_of_the_agent(cluster: Cluster) -> None:
    """C14: kill -9 of the agent while A is saved; A's next grant restores it bit-equal."""
    cluster.orchestrator()
    agent = cluster.agent()
    a, b = cluster.job("job-a", mib=40), cluster.job("job-b", mib=40)
    before = {}
    for job in (a, b):
        job.acquire()
        before[job] = job.digest()
        job.yield_()
    agent.kill()
    cluster.agent()
    assert a.acquire()["restored"]
    assert a.digest() == before[a]
    a.yield_()
    assert b.acquire()["restored"]
    assert b.digest() == before[b]


def test_c11_c14_everything_is_killed_at_once(cluster: Cluster) -> None:
    """C11, C14: kill -9 of orchestrator and agent while A is saved and B holds; both go on."""
    orchestrator = cluster.orchestrator()
    agent = cluster.agent()
    a, b = cluster.job("job-a", mib=40), cluster.job("job-b", mib=40)
    a.acquire()
    before = a.digest()
    a.yield_()
    held = b.acquire()
    a.tell("acquire")
    cluster.until_waiting("job-a")
    orchestrator.kill()
    agent.kill()
    cluster.orchestrator()
    cluster.agent()
    assert cluster.until("pool", lambda group: True).epoch == held["epoch"]
    b.yield_()
    assert a.expect("granted")["restored"]
    assert a.digest() == before


def test_rb3_a_hung_agent_delays_only_its_own_group(cluster: Cluster) -> None:
    """RB3: one node's agent is stopped in the middle of work; another group's jobs keep taking turns."""
    cluster.orchestrator()
    hung = cluster.agent("n1", "hung")
    cluster.agent("n2", "well")
    a, b = (cluster.job(name, group="hung") for name in ("job-a", "job-b"))
    c, d = (cluster.job(name, group="well") for name in ("job-c", "job-d"))
    a.turn()
    hung.stop()
    b.tell("acquire")
    cluster.until("hung", lambda group: group.state == "swapping")
    for _ in range(20):
        c.turn()
        d.turn()
    assert cluster.until("hung", lambda group: True).state == "swapping"
    hung.go_on()
    b.expect("granted")


def test_rb10_a_second_orchestrator_on_one_store_names_the_first(cluster: Cluster) -> None:
    """RB10: two orchestrators on one store: the second ends at once, naming the first, which goes on."""
    first = cluster.orchestrator()
    command = [*COSLICE, "orchestrator", "--listen", "127.0.0.1:0", "--state", str(cluster.folder)]
    second = subprocess.run(
        command, capture_output=True, text=True, timeout=BOUND, env=ENVIRONMENT, check=False
    )
    assert second.returncode == 2
    assert f"in use by process {first.pid}" in second.stderr
    cluster.agent()
    cluster.job("job-a").turn()
