"""A node out for maintenance: who goes on, who waits where it was, and that nothing of it is given up."""

import msgspec
import pytest
from core.group_world import LIVE, SAVED, Client, World

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.draining import moving
from coslice.core.effects import ReasonCode
from coslice.core.events import ContextState
from coslice.core.group import Group, Held, Resident, Swapping, next_deadline
from coslice.core.group_state import held_by
from coslice.core.ids import Incarnation, JobId, NodeId, SessionId
from coslice.core.story import describe, why_waiting
from coslice.orchestrator import metrics

A, B, C = JobId("a"), JobId("b"), JobId("c")
N0 = NodeId("n0")


def world(*nodes: str) -> tuple[World, Client, Client]:
    """``a`` holds the lock, ``b`` waits."""
    w = World(*(nodes or ("n0",)))
    for node in w.nodes:
        w.attach(node)
    a, b = w.client("a1", job="a"), w.client("b1", job="b")
    w.ask(a)
    w.confirm(a)
    w.use_device(a)
    w.settle()
    w.ask(b)
    return w, a, b


def asked(w: World) -> list[SessionId]:
    return [e.session for e in w.last.effects if isinstance(e, fx.AskYield)]


def test_the_holder_is_asked_at_once_finishes_and_nobody_follows() -> None:
    w, a, b = world()
    w.drain("n0", reason="new memory")
    assert asked(w) == ["a1"]
    assert a.holding
    assert held_by(w.group, N0) == A
    w.yield_(a)
    assert w.group.occupancy == Resident(job=A), "its state stays where it is"
    assert b.asking
    assert held_by(w.group, N0) is None
    w.wait(10_000.0)
    assert b.asking, "and it keeps its place as long as it takes"
    (line,) = [s for s in why_waiting(w.group, B, w.now) if "out for maintenance" in s]
    assert "`coslice drain n0 --undo`" in line
    said = "Node n0 is drained by an operator (new memory): no lease begins there."
    assert said in describe(w.group, w.now)


def test_the_queue_goes_on_at_once_in_its_order() -> None:
    w, a, b = world()
    w.drain("n0")
    c = w.client("c1", job="c")
    w.ask(c)
    w.yield_(a)
    w.undrain("n0")
    assert isinstance(w.group.occupancy, Swapping)
    w.settle()
    assert b.holding
    assert c.asking
    assert w.group.drained == ()


def test_said_again_it_changes_nothing() -> None:
    w, _, _ = world()
    w.undrain("n0")
    assert w.last.reasons[0].code is ReasonCode.REPEATED
    w.drain("n0", reason="first")
    before = w.group
    w.drain("n0", reason="second")
    assert (w.group, w.last.effects) == (before, ())


def test_a_swap_that_is_on_ends_without_a_grant() -> None:
    w, a, b = world()
    w.yield_(a)
    assert isinstance(w.group.occupancy, Swapping)
    w.drain("n0")
    assert b.asking
    assert moving(w.group, N0), "the agent may still finish what it is at"
    w.settle()
    assert b.asking
    assert not moving(w.group, N0)
    w.undrain("n0")
    w.settle()
    assert b.holding


def test_a_node_that_served_others_is_out_once_nothing_moves_there() -> None:
    """Its agent saw epochs that the store never had (it is new, or a backup): nobody answers for those."""
    w = World("n0")
    w.nodes[N0].epoch = 41
    w.attach("n0")
    w.drain("n0")
    assert not moving(w.group, N0)
    node = w.nodes[N0]
    node.contexts[A], node.incarnations[A] = ContextState.LEAVING, Incarnation("a-1")
    node.push()
    w.settle()
    assert moving(w.group, N0)
    w.undrain("n0")
    w.ask(w.client("a1", job="a"))
    assert [e.epoch for e in w.last.effects if isinstance(e, fx.MakeResident)] == [42], (
        "it is asked all the same"
    )


def test_a_report_that_was_lost_with_its_stream_keeps_no_node_from_being_out() -> None:
    w, a, b = world()
    w.yield_(a)
    w.drain("n0")
    w.abandon(b)
    node = w.nodes[N0]
    node.up = False
    w.settle()  # what it says now is heard by nobody, and nobody asks again
    w.detach("n0")
    w.attach("n0")
    assert not moving(w.group, N0)


def test_other_nodes_serve_who_has_nothing_there() -> None:
    """As when a node leaves, but that nobody is at fault and nothing is lost."""
    w, a, b = world("n0", "n1")
    w.drain("n0")
    w.yield_(a)
    w.settle()
    assert b.holding
    assert w.nodes[N0].contexts == {A: LIVE}, "nothing moved there"
    assert w.nodes[NodeId("n1")].contexts == {A: SAVED}
    w.ask(a)
    w.confirm(b)
    w.yield_(b)
    assert a.asking, "its state is on the drained node"
    assert [r.fault for r in w.group.jobs if r.job == A] == [None]
    w.undrain("n0")
    w.settle()
    assert a.holding


def test_who_has_a_process_there_waits_too() -> None:
    w, a, b = world("n0", "n1")
    w.abandon(b)
    c = w.client("c1", job="c", home="n0.cluster", pid=7)
    w.drain("n0")
    w.ask(c)
    w.yield_(a)
    w.settle()
    assert c.asking


def test_a_node_that_comes_back_in_the_middle_of_a_lease_is_made_right() -> None:
    w, a, b = world("n0", "n1")
    w.drain("n0")
    w.yield_(a)
    w.settle()
    w.confirm(b)
    w.undrain("n0")
    (told,) = [e for e in w.last.effects if isinstance(e, fx.MakeResident)]
    assert (told.node, told.job) == (N0, B)
    w.settle()
    assert w.nodes[N0].contexts == {A: SAVED}


def test_a_node_undrained_during_a_swap_takes_part_in_it() -> None:
    w, a, b = world("n0", "n1")
    w.drain("n0")
    w.yield_(a)
    w.undrain("n0")
    swap = w.group.occupancy
    assert isinstance(swap, Swapping)
    assert swap.pending == ("n0", "n1")
    w.settle()
    assert b.holding
    assert w.nodes[N0].contexts == {A: SAVED}


def test_its_agent_may_be_away_for_hours_and_nothing_is_given_up() -> None:
    w, a, b = world()
    w.drain("n0")
    w.yield_(a)
    w.detach("n0")
    assert next_deadline(w.group) is None
    w.wait(10_000.0)
    assert w.group.nodes == ("n0",)
    w.attach("n0")
    assert b.asking
    w.detach("n0")
    w.undrain("n0")
    assert next_deadline(w.group) == w.now + w.group.rules.node_loss, "now it is missed again"
    w.attach("n0")
    w.settle()
    assert b.holding


def test_the_lease_is_over_with_the_grace_of_a_client_that_died() -> None:
    w, a, b = world()
    w.drain("n0")
    w.drop(a)
    w.wait(w.group.rules.session_grace)
    assert held_by(w.group, N0) is None
    assert b.asking


def test_a_restart_keeps_it_and_asks_the_holder_again() -> None:
    w, a, b = world()
    w.drain("n0", reason="fan")
    w.restart()
    w.attach("n0")
    assert [(d.node, d.reason) for d in w.group.drained] == [("n0", "fan")]
    w.reconnect(a)
    assert asked(w) == ["a1"]
    w.reconnect(b)
    w.yield_(a)
    w.settle()
    assert b.asking


def test_a_holder_that_was_away_hears_that_it_was_asked() -> None:
    w, a, _ = world()
    w.drop(a)
    w.drain("n0")
    assert asked(w) == []
    w.reconnect(a)
    assert asked(w) == ["a1"]
    w.drop(a)
    w.reconnect(a)
    assert asked(w) == ["a1"], "its stream broke: it may not have heard"


def test_a_holder_is_not_ended_for_the_sake_of_waiters_that_are_held_up() -> None:
    w, a, _ = world()
    w.drain("n0")
    w.wait(2 * w.group.rules.max_hold)
    assert a.holding


def test_a_node_may_be_drained_before_it_comes() -> None:
    w = World("n0", "n1")
    w.attach("n0")
    w.apply(ev.NodesChanged(at=w.now, nodes=(N0,)))
    w.drain("n1")
    w.attach("n1")
    a = w.client("a1", job="a")
    w.ask(a)
    w.confirm(a)
    w.use_device(a)
    assert w.nodes[NodeId("n1")].contexts == {}


@pytest.mark.parametrize("whole", [True, False])
def test_a_frozen_job_does_not_compute_on_beside_the_next(whole: bool) -> None:
    """It overran on two nodes, one of which is drained: that one still has to stop it."""
    w, _, b = world("n0", "n1")
    for node in w.nodes.values():
        node.whole = whole
        node.push()
    w.settle()
    w.drain("n0")
    w.wait(w.group.rules.max_hold)
    assert not isinstance(w.group.occupancy, Held)
    w.settle()
    assert b.holding
    assert w.nodes[N0].contexts == {A: SAVED if whole else LIVE}


def test_the_metrics_count_it_and_do_not_miss_it() -> None:
    w, _, _ = world("n0", "n1", "n2")
    for name in ("n0", "n1"):
        w.drain(name)
    for name in ("n1", "n2"):
        w.detach(name)
    counted = metrics.of_groups(metrics.Taken((w.group,), w.now))
    nodes = {labels[1]: value for metric, labels, value in counted if metric is metrics.NODES}
    assert nodes == {"attached": 0, "away": 1, "hung": 0, "drained": 2}


def test_a_state_without_the_field_loads() -> None:
    w, _, _ = world()
    stored = msgspec.to_builtins(w.group)
    del stored["drained"]
    assert msgspec.convert(stored, Group) == w.group
