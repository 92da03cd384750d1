"""A node whose agent is connected and does not finish what it was told: nobody waits for it for ever."""

from core.group_world import RULES, Client, World
from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core.effects import ReasonCode
from coslice.core.group_state import Swapping
from coslice.core.ids import NodeId

RULES = replace(RULES, op_timeout=100.0)


def world(*nodes: str) -> World:
    w = World(*nodes, rules=RULES)
    for name in nodes:
        w.attach(name)
    return w


def hold(w: World, name: str) -> Client:
    client = w.client(f"{name}1", job=name)
    w.ask(client)
    w.settle()
    w.confirm(client)
    w.use_device(client)
    w.settle()
    return client


def hang(w: World) -> Client:
    """``b`` is next; ``n0`` finishes its part, and ``n1`` does not."""
    a = hold(w, "a")
    b = w.client("b1", job="b")
    w.ask(b)
    w.yield_(a)
    w.settle_only("n0")
    return b


def test_a_node_that_does_not_finish_is_left_out_and_the_rest_go_on() -> None:
    w = world("n0", "n1")
    b = hang(w)
    w.wait(99.0)
    assert not b.holding
    w.wait(2.0)
    assert b.holding, "it runs on what is left"
    assert w.group.nodes == ("n0",)
    assert any(
        r.code is ReasonCode.NODE_LOST and "did not finish g/2/n1 within 100 s" in r.text for r in w.reasons
    )


def test_its_late_answer_counts_for_nothing_but_brings_it_back() -> None:
    w = world("n0", "n1")
    b = hang(w)
    w.wait(101.0)
    w.settle_only("n1")
    assert w.group.nodes == ("n0", "n1")
    assert w.group.hung == ()
    assert b.holding
    w.confirm(b)
    w.yield_(b)


def test_its_late_failure_costs_nobody_the_lease() -> None:
    w = world("n0", "n1")
    b = hang(w)
    w.wait(101.0)
    w.nodes[NodeId("n1")].work("incoming")
    w.settle_only("n1")
    assert w.group.nodes == ("n0", "n1")
    assert b.holding
    assert not b.refused


def test_a_new_stream_is_no_answer() -> None:
    """Its report may have been lost with the old one, so it is asked the same again."""
    w = world("n0", "n1")
    hang(w)
    w.wait(101.0)
    w.nodes[NodeId("n1")].ops.clear()
    w.detach("n1")
    w.attach("n1")
    assert w.group.nodes == ("n0",)
    assert [e.op for e in w.last.effects if isinstance(e, fx.MakeResident)] == ["g/2/n1"]


def test_the_last_node_of_a_group_names_itself_to_those_who_wait() -> None:
    w = world("n0")
    a = hold(w, "a")
    b = w.client("b1", job="b")
    w.ask(b)
    w.yield_(a)
    w.wait(101.0)
    assert b.refused == ["group_empty"]
    refusal = next(e for e in w.effects if isinstance(e, fx.Refuse))
    assert "n0 does not finish g/2/n0; restart its agent" in refusal.reason
    w.settle()
    w.ask(b)
    w.settle()
    assert b.holding


def test_a_restart_gives_it_its_full_time_again() -> None:
    w = world("n0", "n1")
    b = hang(w)
    w.wait(90.0)
    w.restart()
    w.reconnect(b)
    for name in ("n0", "n1"):
        w.attach(name)
    w.wait(90.0)
    assert isinstance(w.group.occupancy, Swapping)
