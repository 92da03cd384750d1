"""What another orchestrator makes of a saved group: nobody has lost his place by coming back late."""

import pytest
from core.group_world import Client, World

from coslice.core.group import stalled
from coslice.orchestrator.config import OrchestratorConfig
from coslice.orchestrator.groups import taken_up

SHARED = OrchestratorConfig(store="etcd://127.0.0.1:1/test")
GRACE = SHARED.takeover_grace


def taken_over() -> tuple[World, Client, list[Client]]:
    """a holds, b, c, d wait; another orchestrator leads, and the holder has found it."""
    w = World("n0")
    w.attach("n0")
    a, *queue = [w.client(f"{job}1", job=job) for job in "abcd"]
    for client in (a, *queue):
        w.ask(client)
    w.settle()
    assert a.holding
    w.restart(lambda saved, now: taken_up(saved, now, SHARED))
    w.attach("n0")
    w.reconnect(a)
    w.yield_(a)
    return w, a, queue


@pytest.mark.parametrize("late", [6.0, GRACE - 0.1])
def test_the_order_is_kept_however_late_the_first_comes_back(late: float) -> None:
    w, _, (b, c, d) = taken_over()
    w.reconnect(d)
    w.reconnect(c)
    w.wait(late)
    w.settle()
    assert not c.holding
    assert not d.holding
    w.reconnect(b)
    for client in (b, c, d):
        w.settle()
        assert client.holding
        w.yield_(client)


def test_who_does_not_come_back_at_all_is_given_up() -> None:
    w, _, (_, c, _) = taken_over()
    w.reconnect(c)
    w.wait(GRACE)
    w.settle()
    assert c.holding


def test_a_stall_of_the_new_leader_costs_nobody_his_place() -> None:
    w, _, (b, c, _) = taken_over()
    w.reconnect(c)
    w.wait(5.0)
    w.group = stalled(w.group, w.now)
    w.wait(GRACE - 5.1)
    w.settle()
    assert not c.holding
    w.reconnect(b)
    w.settle()
    assert b.holding
