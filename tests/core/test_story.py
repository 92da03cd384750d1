"""Why does a job wait? The answer names the jobs, nodes and figures."""

from core.group_world import World

from coslice.core import events as ev
from coslice.core.events import ContextFact, ContextState, NodeFacts
from coslice.core.ids import JobId, NodeId
from coslice.core.prose import names, size
from coslice.core.story import describe, where, why_waiting


def two_jobs() -> World:
    """a holds, uses the device; b waits for 3 s."""
    world = World("n0", "n1")
    world.attach("n0")
    world.attach("n1")
    a, b = world.client("a1", job="a"), world.client("b1", job="b")
    world.ask(a)
    world.confirm(a)
    world.use_device(a)
    world.settle()
    world.ask(b)
    world.wait(3)
    return world


def told(world: World, job: str) -> str:
    return " ".join(why_waiting(world.group, JobId(job), world.now))


def test_a_waiter_hears_who_holds_and_for_how_long() -> None:
    text = told(two_jobs(), "b")
    assert "b has waited for g for 3.0 s, at the head of the queue" in text
    assert "a holds the lock for 3.0 s under epoch 1" in text


def test_a_waiter_hears_who_is_ahead() -> None:
    world = two_jobs()
    world.ask(world.client("c1", job="c"))
    assert "behind b" in told(world, "c")


def test_the_holder_does_not_wait() -> None:
    assert told(two_jobs(), "a").startswith("a holds the lock")


def test_the_incoming_job_hears_which_nodes_it_waits_for() -> None:
    world = two_jobs()
    world.yield_(world.clients["a1"])
    text = told(world, "b")
    assert "b is being made resident in the place of a" in text
    assert "waiting for n0 and n1" in text


def test_the_incoming_job_hears_why_another_has_not_left() -> None:
    world = two_jobs()
    world.yield_(world.clients["a1"])
    leaving = ContextFact(job=JobId("a"), state=ContextState.LEAVING, reason="process 7 does not answer")
    facts = NodeFacts(version=50, contexts=(leaving,))
    world.apply(ev.NodeReported(at=world.now, node=NodeId("n0"), facts=facts))
    assert "a is leaving with 0 B on n0: process 7 does not answer." in told(world, "b")


def test_a_missing_agent_is_named() -> None:
    world = two_jobs()
    world.detach("n1")
    assert "The agent of n1 is not connected; it leaves the group in 60.0 s." in told(world, "b")


def test_a_blocked_waiter_hears_by_whom() -> None:
    world = two_jobs()
    world.yield_(world.clients["a1"])
    world.nodes["n0"].work("stuck")
    world.deliver(world.nodes["n0"])
    assert "BLOCKED_BY(a, pid 7) on n0: injected" in told(world, "b")


def test_a_lost_client_is_passed_over() -> None:
    world = two_jobs()
    world.drop(world.clients["b1"])
    assert "Its connection is lost: passed over, and removed in 10.0 s" in told(world, "b")


def test_a_lost_holder_is_told_of_with_the_time_that_is_left() -> None:
    world = two_jobs()
    world.drop(world.clients["a1"])
    world.wait(4.0)
    assert "its connection is lost, and the lease expires in 6.0 s unless it returns" in told(world, "b")
    assert "its connection is lost" in told(world, "a")


def test_a_job_is_lost_once_the_last_of_its_processes_is() -> None:
    world = two_jobs()
    world.ask(world.client("b2", job="b"))
    world.drop(world.clients["b1"])
    assert "lost" not in told(world, "b")
    world.wait(3.0)
    world.drop(world.clients["b2"])
    assert "removed in 10.0 s" in told(world, "b")


def test_a_faulted_job_hears_its_fault() -> None:
    world = two_jobs()
    world.yield_(world.clients["a1"])
    world.nodes["n0"].work("incoming")
    world.deliver(world.nodes["n0"])
    assert "b is refused (job_faulted): injected" in told(world, "b")


def test_a_group_without_nodes_says_so() -> None:
    world = two_jobs()
    world.apply(ev.NodesChanged(at=world.now, nodes=()))
    assert world.clients["b1"].refused == ["group_empty"]
    assert "No node serves group g" in told(world, "b")


def test_a_free_lock_is_described() -> None:
    world = two_jobs()
    world.abandon(world.clients["b1"])
    world.yield_(world.clients["a1"])
    assert "the state of a was there last" in " ".join(describe(world.group, world.now))
    assert told(world, "b").startswith("b does not wait")
    assert "a on n0: live, 100 B" in where(world.group, JobId("a"))
    assert where(world.group, JobId("b")) == ["No agent of g holds state of b."]


def test_figures_read_well() -> None:
    assert [size(n) for n in (0, 999, 1000, 1536, 512 << 20, 5 << 40)] == [
        "0 B",
        "999 B",
        "1000 B",
        "1.5 KiB",
        "512 MiB",
        "5 TiB",
    ]
    assert [names(x) for x in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "nobody",
        "a",
        "a and b",
        "a, b and c",
    ]
