"""A node out for maintenance, on the real wire: who is told what, and what outlives whom."""

import grpc
from orchestrator.test_admin import refusal, waiting
from orchestrator.world import World

from coslice.orchestrator.config import GroupConfig
from coslice.wire.v1 import coslice_pb2 as pb


def drained(status: pb.GroupStatus) -> list[str]:
    return [node.node for node in status.nodes if node.HasField("drained")]


async def test_the_holder_is_asked_and_the_next_waits_until_the_node_serves_again(world: World) -> None:
    await world.start()
    await world.agent(node="n0")
    a, b = await world.client("job-a"), await world.client("job-b")
    granted = await a.acquire("pool")
    request = await b.ask("pool")
    await waiting(b, "job-b")
    answer = await a.stub.Drain(pb.DrainRequest(node="n0", reason="new fan", by="eve"))
    assert answer.changed
    assert [(one.group, one.node.drained.holder) for one in answer.groups] == [("pool", "job-a")]
    assert (await a.news.get()).should_yield.group == "pool"
    again = await a.stub.Drain(pb.DrainRequest(node="n0"))
    assert not again.changed
    assert again.groups[0].node.drained.reason == "new fan"
    await a.yielded(granted)
    status = await a.until("pool", lambda s: not any(n.drained.holder for n in s.nodes))
    assert [w.job for w in status.waiters] == ["job-b"]
    assert "out for maintenance" in status.waiters[0].reason
    told = "\n".join(await a.explain("pool", "job-b"))
    assert "Node n0 is drained by eve (new fan): no lease begins there." in told
    assert not b.answered(request)
    undone = await a.stub.Drain(pb.DrainRequest(node="n0", undo=True))
    assert undone.changed
    await b.granted(request)


async def test_an_unknown_node_is_refused_with_those_that_are_known(world: World) -> None:
    await world.start()
    a = await world.client("job-a")
    nobody = await refusal(a.stub.Drain(pb.DrainRequest(node="n7")))
    assert nobody.code() is grpc.StatusCode.NOT_FOUND
    assert "known: none, no agent has attached" in str(nobody.details())
    for name in ("n1", "n0"):
        await world.agent(node=name)
    await a.until("pool", lambda s: len(s.nodes) == 2)
    unknown = await refusal(a.stub.Drain(pb.DrainRequest(node="n7", undo=True)))
    assert unknown.details() == "there is no node n7 here; known: n0, n1"
    for bad in ("", "n 0"):
        malformed = await refusal(a.stub.Drain(pb.DrainRequest(node=bad)))
        assert malformed.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_it_holds_in_every_group_of_the_node_also_in_one_that_it_joins_later(world: World) -> None:
    await world.start(groups=tuple(GroupConfig(id=name) for name in ("one", "two", "late")))
    agent = await world.agent(node="n0", groups=("one", "two"))
    a = await world.client("job-a")
    await a.until("two", lambda s: len(s.nodes) == 1)
    answer = await a.stub.Drain(pb.DrainRequest(node="n0"))
    assert [one.group for one in answer.groups] == ["one", "two"]
    await agent.stop()
    await a.until("two", lambda s: not s.nodes[0].attached)
    await world.agent(node="n0", groups=("one", "two", "late"))
    for name in ("one", "two", "late"):
        status = await a.until(name, lambda s: any(n.attached for n in s.nodes))
        assert drained(status) == ["n0"], name
    request = await a.ask("late")
    await a.stub.Drain(pb.DrainRequest(node="n0", undo=True))
    await a.granted(request)


async def test_a_successor_and_an_agent_that_comes_back_find_it_drained(world: World, store: str) -> None:
    await world.start(store=store, session_grace=3600)
    agent = await world.agent(node="n0")
    a = await world.client("job-a")
    await a.until("pool", lambda s: len(s.nodes) == 1)
    await a.stub.Drain(pb.DrainRequest(node="n0", by="eve"))
    welcomed = agent.welcomed
    await world.restart()
    await a.ended.wait()
    await a.connect()
    await agent.wait_for(lambda: agent.welcomed > welcomed)
    request = await a.ask("pool")
    status = await a.until("pool", lambda s: [w.job for w in s.waiters] == ["job-a"])
    assert drained(status) == ["n0"]
    assert status.nodes[0].drained.by == "eve"
    assert not a.answered(request)
