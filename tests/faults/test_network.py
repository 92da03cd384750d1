"""Connections that break, stall or end on one side only: places are kept, leases fenced (C4, RB1, RB3, P1).

Client and orchestrator, or agent and orchestrator, talk through a proxy; nothing else is faked.
"""

from collections.abc import Iterator

import pytest
from faults.cluster import Cluster, Job
from faults.proxy import Proxy

SHORT = {"session_grace": 2.0, "keepalive": 1.0}


@pytest.fixture
def proxied(cluster: Cluster) -> Iterator["Proxied"]:
    setting = Proxied(cluster)
    yield setting
    for proxy in setting.proxies:
        proxy.close()


class Proxied:
    """Jobs whose sessions go through a proxy of their own."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.proxies: list[Proxy] = []

    def job(self, name: str) -> tuple[Job, Proxy]:
        proxy = Proxy(self.cluster.address)
        self.proxies.append(proxy)
        direct, self.cluster.address = self.cluster.address, proxy.address
        try:
            return self.cluster.job(name), proxy
        finally:
            self.cluster.address = direct

    def agent(self, group: str, **settings: object) -> Proxy:
        proxy = Proxy(self.cluster.address)
        self.proxies.append(proxy)
        self.cluster.agent("n1", group, orchestrator=proxy.address, **settings)
        return proxy


def test_p1_a_waiter_whose_connections_break_keeps_its_place(proxied: Proxied) -> None:
    """P1, C4: B's connection is reset again and again while it waits before C; B is granted first, once."""
    cluster = proxied.cluster
    cluster.orchestrator()
    cluster.agent()
    a, c = cluster.job("job-a"), cluster.job("job-c")
    b, proxy = proxied.job("job-b")
    epoch = a.acquire()["epoch"]
    b.tell("acquire")
    cluster.until_waiting("job-b")
    c.tell("acquire")
    cluster.until_waiting("job-b", "job-c")
    for times in (1, 2, 3):
        assert proxy.drop() == 1
        cluster.until_back("job-b", times=times)
    cluster.until_waiting("job-b", "job-c")
    a.yield_()
    assert b.expect("granted")["epoch"] == epoch + 1
    b.yield_()
    assert c.expect("granted")["epoch"] == epoch + 2


def test_p1_a_yield_on_a_breaking_connection_happens_once(proxied: Proxied) -> None:
    """P1: A yields without a connection: the yield arrives later and counts once; B is granted."""
    cluster = proxied.cluster
    cluster.orchestrator()
    cluster.agent()
    a, proxy = proxied.job("job-a")
    b = cluster.job("job-b")
    epoch = a.acquire()["epoch"]
    b.tell("acquire")
    cluster.until_waiting("job-b")
    proxy.refuse()
    proxy.drop()
    a.yield_()  # without a connection: it is delivered later
    proxy.refuse(False)
    assert b.expect("granted")["epoch"] == epoch + 1
    a.tell("acquire")
    cluster.until_waiting("job-a")
    b.yield_()
    assert a.expect("granted")["epoch"] == epoch + 2


def test_rb1_a_holder_behind_a_black_hole_loses_the_lock_and_is_told(proxied: Proxied) -> None:
    """RB1: nothing arrives, nothing is closed: the keepalive finds it; A's late yield ends nothing."""
    cluster = proxied.cluster
    cluster.orchestrator(**SHORT)
    cluster.agent()
    a, proxy = proxied.job("job-a")
    b = cluster.job("job-b")
    held = a.acquire()
    b.tell("acquire")
    cluster.until_waiting("job-b")
    proxy.hole()
    granted = b.expect("granted")
    assert granted["epoch"] > held["epoch"]
    proxy.hole(False)
    proxy.drop()
    a.tell("yield")
    said = a.hear()
    assert said["event"] == "yielded" or said["kind"] == "LeaseLost"
    now = cluster.until("pool", lambda group: True)
    assert (now.state, now.job, now.epoch) == ("held", "job-b", granted["epoch"])
    b.yield_()


def test_c4_a_half_closed_client_is_gone(proxied: Proxied) -> None:
    """C4: the orchestrator sees the end of A's connection, A does not; after its grace B is served."""
    cluster = proxied.cluster
    cluster.orchestrator(**SHORT)
    cluster.agent()
    a, proxy = proxied.job("job-a")
    b = cluster.job("job-b")
    held = a.acquire()
    b.tell("acquire")
    cluster.until_waiting("job-b")
    proxy.refuse()
    proxy.half_close()
    assert b.expect("granted")["epoch"] > held["epoch"]
    b.yield_()


def test_a_slow_network_changes_no_order(proxied: Proxied) -> None:
    """C11: every chunk of B's connection is late; turns alternate all the same, each under the next epoch."""
    cluster = proxied.cluster
    cluster.orchestrator()
    cluster.agent()
    a = cluster.job("job-a")
    b, proxy = proxied.job("job-b")
    proxy.delay(0.05)
    epochs = [job.turn()["epoch"] for _ in range(4) for job in (a, b)]
    assert epochs == list(range(epochs[0], epochs[0] + 8))


def test_rb3_rb4_a_black_holed_agent_delays_only_its_own_group(proxied: Proxied) -> None:
    """RB3, RB4: an agent out of reach: no grant on its old word; another group goes on; then it is served."""
    cluster = proxied.cluster
    cluster.orchestrator(**SHORT)
    proxy = proxied.agent("holed", groups=[{"group": "holed", "device_budget": 64 << 20}])
    cluster.agent("n2", "well")
    a, b = cluster.job("job-a", group="holed"), cluster.job("job-b", group="holed")
    c, d = cluster.job("job-c", group="well"), cluster.job("job-d", group="well")
    a.turn()
    proxy.hole()
    b.tell("acquire")
    cluster.until("holed", lambda group: not any(node.attached for node in group.nodes))
    for _ in range(5):
        c.turn()
        d.turn()
    assert cluster.until("holed", lambda group: True).state != "held"
    proxy.hole(False)
    proxy.drop()
    b.expect("granted")
