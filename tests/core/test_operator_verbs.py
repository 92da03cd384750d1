"""Forget, evict, delete: what an operator may do, and to whom it does nothing."""

import pytest
from core.group_world import LOST, Client, Rejected, World

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.effects import RefuseCode
from coslice.core.group import Held
from coslice.core.ids import Incarnation, JobId, NodeId

A, B = JobId("a"), JobId("b")


def world() -> tuple[World, Client, Client]:
    """``a`` holds the lock, ``b`` waits."""
    w = World("n0")
    w.attach("n0")
    a, b = w.client("a1", job="a"), w.client("b1", job="b")
    w.ask(a)
    w.confirm(a)
    w.use_device(a)
    w.ask(b)
    w.settle()
    return w, a, b


def forget(w: World, job: JobId) -> None:
    w.apply(ev.JobForgotten(at=w.now, job=job))


def test_who_runs_is_not_forgotten() -> None:
    w, a, b = world()
    before = w.group
    for job in (A, B):
        with pytest.raises(Rejected, match="1 connected process") as refusal:
            forget(w, job)
        assert refusal.value.code == "job_running"
    w.drop(a)
    with pytest.raises(Rejected, match=r"holds group g: .*coslice evict a"):
        forget(w, A)
    w.reconnect(a)
    assert w.group == before
    assert b.asking


def test_a_waiter_that_is_lost_is_forgotten_with_its_place() -> None:
    w, _, b = world()
    w.drop(b)
    forget(w, B)
    assert w.open_requests() == []
    assert [r.job for r in w.group.jobs] == ["a"]
    assert w.group.lost == ()


def test_fault_and_lost_state_go_here_and_on_the_nodes() -> None:
    w, a, b = world()
    w.yield_(a)
    node = w.nodes[NodeId("n0")]
    node.contexts[B], node.incarnations[B] = LOST, Incarnation("b-1")
    node.work("incoming")
    w.settle()
    assert b.refused == ["job_faulted"]
    w.close(b)
    assert [r.fault is not None for r in w.group.jobs if r.job == "b"] == [True]
    forget(w, B)
    assert [e for e in w.last.effects if isinstance(e, fx.ForgetJob)] == [
        fx.ForgetJob(node=NodeId("n0"), job=B)
    ]
    w.settle()
    assert all(r.job != "b" for r in w.group.jobs)
    assert B not in node.contexts
    again = w.client("b2", job="b")
    w.ask(again)
    w.settle()
    assert again.holding, "the same start is welcome again"


def test_the_lease_is_taken_away_and_the_next_is_served() -> None:
    w, a, b = world()
    w.apply(ev.JobEvicted(at=w.now, job=A, reason="it hangs"))
    assert not a.holding
    (lost,) = (e for e in w.last.effects if isinstance(e, fx.LoseLease))
    assert "an operator took it away: it hangs" in lost.reason
    w.settle()
    assert b.holding
    w.ask(a)
    assert a.asking, "it may ask again"


@pytest.mark.parametrize("moment", ["waiting", "swapping"])
def test_a_place_is_taken_away(moment: str) -> None:
    w, a, b = world()
    if moment == "swapping":
        w.yield_(a)
    w.apply(ev.JobEvicted(at=w.now, job=B, reason="not now"))
    w.settle()
    assert b.refused == [RefuseCode.FAILED]
    assert w.open_requests() == []
    assert not isinstance(w.group.occupancy, Held) or w.group.occupancy.job == "a"


@pytest.mark.parametrize("moment", ["waiting", "swapping"])
def test_who_is_not_admitted_is_told_so(moment: str) -> None:
    w, a, b = world()
    if moment == "swapping":
        w.yield_(a)
    w.apply(ev.JobEvicted(at=w.now, job=B, reason="b is not admitted beside a", by="admission"))
    w.settle()
    assert b.refused == [RefuseCode.NOT_ADMITTED]
    assert w.open_requests() == []


def test_admission_interrupts_nobody() -> None:
    """Granted between the verdict and what follows from it."""
    w, a, _ = world()
    with pytest.raises(Rejected, match="neither holds group g nor waits"):
        w.apply(ev.JobEvicted(at=w.now, job=A, reason="a is not admitted beside b", by="admission"))
    assert a.holding


def test_there_must_be_something_to_take_away() -> None:
    w, a, _ = world()
    w.yield_(a)
    w.settle()
    with pytest.raises(Rejected, match="neither holds group g nor waits") as refusal:
        w.apply(ev.JobEvicted(at=w.now, job=A))
    assert refusal.value.code == "not_held"


@pytest.mark.parametrize("moment", ["held", "swapping"])
def test_a_deleted_group_tells_everybody(moment: str) -> None:
    w, a, b = world()
    c = w.client("c1", job="c")
    w.ask(c)
    if moment == "swapping":
        w.yield_(a)
    w.apply(ev.GroupDeleted(at=w.now, reason="moved to pool-2"))
    assert not a.holding
    assert b.refused == c.refused == [RefuseCode.GROUP_GONE]
    told = next(r.reason for r in w.last.effects if isinstance(r, fx.Refuse))
    assert told.startswith("group g was deleted: moved to pool-2")
    w.settle()
    assert w.open_requests() == []
    w.ask(b)
    assert b.refused[-1] is RefuseCode.GROUP_GONE
    deleted = w.group
    w.drop(c)
    w.detach("n0")
    w.attach("n0")
    assert w.group == deleted, "nobody brings it back by speaking to it"


def test_a_group_is_deleted_for_want_of_users_only_if_it_has_none() -> None:
    w, a, b = world()
    idle = ev.GroupDeleted(at=w.now, idle=True)
    before = w.group
    with pytest.raises(Rejected, match="group g is in use: a holds it; b waits"):
        w.apply(idle)
    assert w.group == before
    w.abandon(b)
    w.yield_(a)
    with pytest.raises(Rejected, match="a and b connected"):
        w.apply(idle)
    w.close(a)
    w.close(b)
    with pytest.raises(Rejected, match="state of a is there"):
        w.apply(idle)
    node = w.nodes[NodeId("n0")]
    node.contexts.clear()
    node.push()
    w.settle()
    w.apply(idle)
    assert w.group.deleted
