"""Orchestrator, agent and clients killed or stopped at random instants of a hand-over: nothing is lost.

Two jobs with real state take turns; each round somebody is struck while state moves. The instants come from a
seed that the test prints; ``make test-faults`` has many of them, ``make soak`` all day.
"""

import random
import time
from collections.abc import Callable

import pytest
from faults.cluster import Cluster, Process

REACH = 0.15
"""Seconds after a hand-over began in which something strikes: about as long as one takes."""


class Struck:
    """One of the servers, which comes back under its address."""

    def __init__(self, start: Callable[[], Process]) -> None:
        self._start = start
        self.process = start()

    def strike(self, draw: random.Random) -> str:
        time.sleep(draw.uniform(0.0, REACH))  # the instant is the test
        if draw.random() < 0.7:
            self.process.kill()
            self.process = self._start()
            return "killed"
        self.process.stop()
        time.sleep(draw.uniform(0.0, 2 * REACH))  # for that long it is away
        self.process.go_on()
        return "stopped"


def campaign(cluster: Cluster, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    struck = [Struck(cluster.orchestrator), Struck(cluster.agent)]
    jobs = [cluster.job(name, mib=40) for name in ("job-a", "job-b")]
    digests, epoch = [], 0
    for job in jobs:
        epoch = job.acquire()["epoch"]
        digests.append(job.digest())
        job.yield_()
    for number in range(rounds):
        mine = number % 2
        targets = draw.sample(struck, draw.choice((1, 1, 2)))
        jobs[mine].tell("acquire")
        how = [target.strike(draw) for target in targets]
        print(f"seed {seed}, round {number}: {how}")
        granted = jobs[mine].expect("granted")
        assert granted["epoch"] > epoch
        epoch = granted["epoch"]
        assert jobs[mine].digest() == digests[mine]
        jobs[mine].yield_()


def test_c11_c14_servers_struck_while_state_moves(cluster: Cluster) -> None:
    """C11, C14: a few instants; each grant comes, under a later epoch, with the state bit-equal."""
    campaign(cluster, seed=1, rounds=4)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2, 4))
def test_c11_c14_servers_struck_at_many_instants(cluster: Cluster, seed: int) -> None:
    campaign(cluster, seed, rounds=15)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1, 3))
def test_c4_c9_clients_killed_at_many_instants(cluster: Cluster, seed: int) -> None:
    """C4, C9, RB1: a job is killed at any instant between its asking and its end; the other is served."""
    draw = random.Random(seed)
    cluster.orchestrator(session_grace=1.0)
    cluster.agent()
    other = cluster.job("other", mib=40)
    other.acquire()
    digest = other.digest()
    other.yield_()
    for number in range(5):
        doomed = cluster.job(f"doomed-{number}", mib=40)
        doomed.tell("acquire")
        other.tell("acquire")
        instant = draw.uniform(0.0, 3 * REACH)
        print(f"seed {seed}, round {number}: killed after {instant:.3f} s")
        time.sleep(instant)  # the instant is the test
        doomed.kill()
        other.expect("granted")
        assert other.digest() == digest
        other.yield_()
    left = cluster.until("pool", lambda group: not group.waiters and group.state != "held")
    assert left.job in ("", "other")
