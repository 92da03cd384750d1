"""A lost session whose process is known to have ended is not waited for; nobody alive is taken for dead."""

import pytest
from core.group_world import Client, World

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.ids import Incarnation, NodeId


def hold(w: World, session: str, job: str, **more: object) -> Client:
    client = w.client(session, job=job, **more)  # type: ignore[arg-type]
    w.ask(client)
    w.settle()
    assert client.holding
    w.confirm(client)
    return client


def world(*nodes: str) -> World:
    w = World(*(nodes or ("n0",)))
    for name in w.nodes:
        w.attach(name)
    return w


def ended(w: World, client: Client) -> bool:
    return all(client.session not in r.sessions for r in w.group.jobs)


@pytest.mark.parametrize("first", ["stream", "process"])
def test_a_killed_holder_loses_the_lock_at_once(first: str) -> None:
    """RB1: the agent of its node says that its process ended; the grace is for those who may be back."""
    w = world()
    a = hold(w, "a1", "a", home="n0", pid=7)
    b = w.client("b1", job="b")
    w.ask(b)
    if first == "stream":
        w.drop(a)
        w.process_ends("n0", a)
    else:
        w.process_ends("n0", a)
        w.settle()
        assert not ended(w, a), "its stream still stands: whoever speaks on it is alive"
        w.drop(a)
    w.settle()
    assert b.holding
    assert [e.session for e in w.effects if isinstance(e, fx.LoseLease)] == [a.session]


def test_a_killed_waiter_loses_its_place_at_once() -> None:
    w = world()
    hold(w, "a1", "a")
    b, c = w.client("b1", job="b", home="n0", pid=8), w.client("c1", job="c")
    w.ask(b)
    w.ask(c)
    w.drop(b)
    w.process_ends("n0", b)
    w.settle()
    assert w.open_requests() == [c.asking]


def test_the_name_of_a_host_may_be_longer_than_that_of_its_node() -> None:
    w = world()
    a = hold(w, "a1", "a", home="n0.example.org", pid=7)
    w.drop(a)
    w.process_ends("n0", a)
    w.settle()
    assert ended(w, a)


@pytest.mark.parametrize("other", ["start", "pid", "start_time", "node", "job", "token"])
def test_the_end_of_another_process_says_nothing(other: str) -> None:
    w = world("n0", "n1")
    token = "" if other == "token" else "a-1"
    a = hold(w, "a1", "a", home="n0", pid=7)
    if other == "token":  # callers without one cannot be told apart from an older start
        a = w.client("x1", job="x", home="n0", pid=7)
        a.incarnation = Incarnation("")
        w.ask(a)
    w.drop(a)
    end = ev.EndedProcess(
        job="b" if other == "job" else a.job,  # type: ignore[arg-type]
        incarnation=Incarnation("a-2" if other == "start" else token),
        pid=8 if other == "pid" else 7,
        start_time=8 if other == "start_time" else 7,
    )
    node = w.nodes[NodeId("n1" if other == "node" else "n0")]
    node.ended.append(end)
    node.push()
    w.settle()
    assert not ended(w, a)
    w.wait(w.group.rules.session_grace)
    assert ended(w, a)


def test_other_processes_of_the_job_keep_the_lease() -> None:
    w = world()
    a = hold(w, "a1", "a", home="n0", pid=7)
    a2 = w.client("a2", job="a", home="n0", pid=8)
    w.ask(a2)
    w.drop(a)
    w.process_ends("n0", a)
    w.settle()
    assert ended(w, a)
    assert a2.holding
    w.confirm(a2)
    w.yield_(a2)


def test_who_died_while_the_orchestrator_was_away_is_not_waited_for() -> None:
    w = world()
    a = hold(w, "a1", "a", home="n0", pid=7)
    b = w.client("b1", job="b")
    w.ask(b)
    w.restart()
    w.process_ends("n0", a)
    w.reconnect(b)
    w.attach("n0")
    w.settle()
    assert b.holding


def test_a_new_start_of_a_killed_job_is_welcome_at_once() -> None:
    w = world()
    a = hold(w, "a1", "a", home="n0", pid=7)
    w.drop(a)
    w.process_ends("n0", a)
    w.settle()
    again = hold(w, "a2", "a", incarnation="a-2")
    assert again.holding
