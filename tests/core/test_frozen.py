"""A job that overruns, and whose processes can be frozen, loses its turn and nothing else."""

import pytest
from core.group_world import LIVE, RULES, SAVED, Client, Node, World
from msgspec.structs import replace

from coslice.core import context as node
from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.effects import ReasonCode, RefuseCode
from coslice.core.events import ContextState
from coslice.core.group import Rejected
from coslice.core.group_state import Held, Resident, frozen_lease, lease_with
from coslice.core.holdings import MIB, Holdings, Leaving, Live, Saved, find
from coslice.core.ids import GroupId, Incarnation, JobId, MemberId, NodeId, OpId, RequestId, SessionId
from coslice.core.policy import policy_named
from coslice.core.story import why_waiting

LONG = RULES.max_hold + 1


def world(*, nodes: tuple[str, ...] = ("n0",), policy: str = "fifo", **rules: object) -> World:
    w = World(*nodes, rules=replace(RULES, **rules), policy=policy_named(policy))
    for name in w.nodes:
        w.nodes[name].whole = True
        w.attach(name)
    return w


def hold(w: World, name: str) -> Client:
    client = w.client(f"{name}1", job=name, home="n0", pid=ord(name))
    w.ask(client)
    w.settle()
    w.confirm(client)
    w.use_device(client)
    w.settle()
    return client


def overrun(w: World) -> tuple[Client, Client]:
    """``a`` is frozen, and ``b`` holds the lock."""
    a = hold(w, "a")
    b = w.client("b1", job="b")
    w.ask(b)
    w.wait(LONG)
    w.settle()
    w.confirm(b)
    w.use_device(b)
    w.settle()
    return a, b


def lost(w: World) -> list[fx.LoseLease]:
    return [e for e in w.effects if isinstance(e, fx.LoseLease)]


def test_it_is_moved_out_as_it_is_and_goes_on_when_its_turn_comes() -> None:
    w = world()
    a, b = overrun(w)
    assert a.holding, "nobody told it that anything was over"
    assert b.holding
    assert w.nodes["n0"].contexts["a"] is SAVED
    w.yield_(b)
    w.settle()
    held = w.group.occupancy
    assert isinstance(held, Held)
    assert (held.job, held.epoch) == ("a", 3)
    assert w.group.frozen == ()
    assert w.nodes["n0"].contexts["a"] is LIVE
    w.yield_(a)  # under epoch 1, which is the one that it knows
    assert isinstance(w.group.occupancy, Resident)
    assert lost(w) == []
    assert [r.code for r in w.reasons if r.code in (ReasonCode.FROZEN, ReasonCode.THAWED)] == [
        ReasonCode.FROZEN,
        ReasonCode.THAWED,
    ]


def test_the_node_is_told_that_it_must_leave_though_there_be_room() -> None:
    w = world()
    overrun(w)
    (command,) = [e for e in w.effects if isinstance(e, fx.MakeResident) and e.job == "b"]
    assert command.freeze == ("a",)


def test_without_a_backend_that_freezes_the_lease_is_lost_as_ever() -> None:
    w = world(nodes=("n0", "n1"))
    w.nodes["n1"].whole = False
    a, _ = overrun(w)
    assert not a.holding
    assert [e.job for e in lost(w)] == ["a"]
    assert w.group.frozen == ()


def test_a_process_that_has_not_confirmed_yet_is_not_frozen() -> None:
    w = world(confirm_timeout=1000.0)
    a = hold(w, "a")
    other = w.client("a2", job="a")
    w.ask(other)
    b = w.client("b1", job="b")
    w.ask(b)
    w.wait(LONG)
    w.settle()
    assert not a.holding
    assert b.holding


def test_its_yield_while_it_is_frozen_ends_the_lease_and_its_place() -> None:
    w = world()
    a, b = overrun(w)
    yielded = a.holding
    w.yield_(a)
    assert w.group.frozen == ()
    assert w.group.waiters == ()
    assert yielded
    w.apply(ev.LeaseYielded(at=w.now, job=a.job, session=a.session, epoch=yielded[1]))  # once more
    w.yield_(b)
    assert isinstance(w.group.occupancy, Resident)
    with pytest.raises(Rejected):
        w.apply(ev.LeaseYielded(at=w.now, job=a.job, session=SessionId("b1"), epoch=yielded[1]))


def test_admission_does_not_end_it() -> None:
    w = world()
    a, _ = overrun(w)
    with pytest.raises(Rejected, match="nothing to take away"):
        w.apply(ev.JobEvicted(at=w.now, job=JobId("a"), reason="not admitted beside b", by="admission"))
    assert a.holding
    assert frozen_lease(w.group, JobId("a")) is not None


def test_nobody_else_yields_it() -> None:
    w = world()
    a, b = overrun(w)
    for job, session in (("a", "b1"), ("b", "a1"), ("a", "x")):
        with pytest.raises(Rejected):
            w.apply(ev.LeaseYielded(at=w.now, job=JobId(job), session=SessionId(session), epoch=a.holding[1]))
    assert frozen_lease(w.group, JobId("a")) is not None
    assert b.holding


def test_another_of_its_processes_asks_and_shares_the_place_and_the_lease() -> None:
    w = world()
    a, b = overrun(w)
    other = w.client("a2", job="a")
    w.ask(other)
    assert [x.job for x in w.group.waiters] == ["a"]
    w.yield_(b)
    w.settle()
    assert other.holding == (RequestId("a2/1"), 3)
    w.yield_(a)
    assert isinstance(w.group.occupancy, Held), "one of two has yielded"
    w.yield_(other)
    assert isinstance(w.group.occupancy, Resident)


def test_its_silence_starts_no_grace_before_it_is_thawed() -> None:
    w = world()
    a, b = overrun(w)
    w.drop(a)
    w.wait(200)
    assert frozen_lease(w.group, JobId("a")) is not None
    w.yield_(b)
    w.settle()
    assert lease_with(w.group, JobId("a")) is not None
    w.wait(9)
    assert isinstance(w.group.occupancy, Held)
    w.wait(2)
    assert isinstance(w.group.occupancy, Resident), "now it had its grace, and was not heard of"


def test_the_end_of_its_process_ends_it() -> None:
    w = world()
    a, _ = overrun(w)
    w.drop(a)
    w.process_ends("n0", a)
    w.settle()
    assert w.group.frozen == ()
    assert w.group.waiters == ()


def test_it_is_told_when_its_state_is_lost() -> None:
    w = world(nodes=("n0", "n1"))
    a, b = overrun(w)
    w.detach("n1")
    w.wait(RULES.node_loss + 1)
    assert b.holding
    assert not a.holding
    assert [e.job for e in lost(w)] == ["a"]
    assert w.group.frozen == ()


def test_a_node_that_hangs_while_it_should_leave_takes_it_along() -> None:
    """It may have left that device or not: it would go on without what it had there."""
    w = world(nodes=("n0", "n1"), op_timeout=100.0)
    a = hold(w, "a")
    b = w.client("b1", job="b")
    w.ask(b)
    w.wait(LONG)
    w.settle_only("n0")
    w.wait(101)
    assert b.holding
    assert w.group.nodes == ("n0",)
    assert not a.holding
    assert [e.job for e in lost(w)] == ["a"]


def test_who_was_made_to_wait_goes_first_whatever_the_policy_prefers() -> None:
    """``fewest_swaps`` would give the lock to whoever is loaded."""
    w = world(policy="fewest_swaps")
    a, b = overrun(w)
    assert b.holding
    assert a.holding


def test_a_restart_keeps_it() -> None:
    w = world()
    a, b = overrun(w)
    w.restart()
    w.attach("n0")
    for client in (a, b):
        w.reconnect(client)
    assert a.holding
    assert b.holding
    w.yield_(b)
    w.settle()
    w.yield_(a)
    assert isinstance(w.group.occupancy, Resident)


def test_operators_see_it_take_it_away_and_do_not_forget_it() -> None:
    w = world()
    overrun(w)
    assert "frozen in the middle of a phase" in " ".join(why_waiting(w.group, JobId("a"), w.now))
    with pytest.raises(Rejected):
        w.apply(ev.JobForgotten(at=w.now, job=JobId("a")))
    w.apply(ev.JobEvicted(at=w.now, job=JobId("a"), reason="enough"))
    assert [e.job for e in lost(w)] == ["a"]
    assert w.group.frozen == ()


def test_a_node_that_joins_with_it_on_the_device_is_told_to_move_it_out() -> None:
    w = world()
    a, _ = overrun(w)
    joins = Node(NodeId("n1"), {a.job: LIVE}, {a.job: a.incarnation}, whole=True)
    w.nodes[joins.name] = joins
    w.attach("n1")
    w.settle()
    assert w.nodes["n1"].contexts["a"] is SAVED


def test_two_may_be_frozen_and_each_has_its_turn() -> None:
    w = world()
    a, b = overrun(w)
    c = w.client("c1", job="c")
    w.ask(c)
    w.wait(LONG)  # a is first in the queue: it goes on, and b is frozen
    w.settle()
    assert [f.job for f in w.group.frozen] == ["b"]
    w.yield_(a)
    w.settle()
    w.confirm(c)
    w.yield_(c)
    w.settle()
    assert isinstance(w.group.occupancy, Held)
    assert w.group.occupancy.job == "b"
    w.yield_(b)
    assert (lost(w), w.group.frozen) == ([], ())
    assert RefuseCode.FAILED not in a.refused


# ── the node's part ──


def register(h: Holdings, job: str, *, bytes: int = 0) -> Holdings:
    member = ev.MemberRegistered(
        at=0.0,
        job=JobId(job),
        incarnation=Incarnation("1"),
        member=MemberId(job),
        pid=ord(job),
        start_time=1,
        bytes=bytes,
        need=40 * MIB,
        whole=True,
    )
    return node.step(h, member).state


@pytest.mark.parametrize("freeze", [(), (JobId("a"),)])
def test_a_node_moves_out_who_is_frozen_even_if_all_fit(freeze: tuple[JobId, ...]) -> None:
    h = register(Holdings(group=GroupId("g"), node=NodeId("n"), device_budget=100 * MIB), "a")
    command = ev.MakeResidentCommanded(
        at=0.0, op=OpId("g/1/n"), epoch=1, job=JobId("b"), need=40 * MIB, freeze=freeze
    )
    taken = node.step(h, command)
    moves = [e.job for e in taken.effects if isinstance(e, fx.RunSnapshot)]
    assert moves == list(freeze)
    found = find(taken.state, JobId("a"))
    assert found is not None
    assert isinstance(found.place, Live) == (not freeze)
    if freeze:
        done = ev.SnapshotSucceeded(
            at=1.0, job=JobId("a"), op=OpId("g/1/n"), bytes=7, residual=0, seconds=1.0, attempt=1
        )
        found = find(node.step(taken.state, done).state, JobId("a"))
        assert found is not None
        assert isinstance(found.place, Saved)


def test_what_it_takes_while_it_leaves_counts_when_it_comes_back() -> None:
    """It computes until it stands still."""
    h = register(Holdings(group=GroupId("g"), node=NodeId("n"), device_budget=100 * MIB), "a")
    h = node.step(h, ev.UsageMeasured(at=0.0, job=JobId("a"), bytes=30 * MIB)).state
    command = ev.MakeResidentCommanded(
        at=0.0, op=OpId("g/1/n"), epoch=1, job=JobId("b"), need=40 * MIB, freeze=(JobId("a"),)
    )
    h = node.step(h, command).state
    h = node.step(h, ev.UsageMeasured(at=0.5, job=JobId("a"), bytes=70 * MIB)).state
    found = find(h, JobId("a"))
    assert found is not None
    assert isinstance(found.place, Leaving)
    assert found.peak == 70 * MIB


def test_a_process_that_registered_state_is_not_said_to_be_whole() -> None:
    h = Holdings(group=GroupId("g"), node=NodeId("n"), device_budget=100 * MIB)
    assert [c.whole for c in node.facts(register(h, "a")).contexts] == [True]
    assert [c.whole for c in node.facts(register(h, "a", bytes=MIB)).contexts] == [False]
    assert ContextState.LIVE in [c.state for c in node.facts(register(h, "a")).contexts]
