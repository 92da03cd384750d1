"""What an administrator does, on the real wire: forget, evict, delete a group; nodes that come and go."""

import grpc
import pytest
from orchestrator.raw_client import RawClient
from orchestrator.world import World

from coslice.orchestrator.config import GroupConfig
from coslice.testing.fake_agent import failing
from coslice.wire.v1 import coslice_pb2 as pb


async def refusal(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call  # type: ignore[misc]
    return error.value


async def waiting(client: RawClient, *jobs: str) -> None:
    await client.until("pool", lambda s: [w.job for w in s.waiters] == list(jobs))


async def test_an_evicted_holder_is_told_and_the_next_is_granted(world: World) -> None:
    await world.start()
    await world.agent()
    a, b = await world.client("job-a"), await world.client("job-b")
    granted = await a.acquire("pool")
    request = await b.ask("pool")
    await waiting(b, "job-b")
    answer = await b.stub.Evict(pb.EvictRequest(job="job-a", reason="it hangs"))
    assert (list(answer.held), list(answer.waited)) == (["pool"], [])
    assert "it hangs" in (await a.news.get()).lease_lost.reason
    await b.granted(request)
    assert (await a.give(granted)).refused.code == pb.STALE_LEASE
    assert list((await b.stub.Evict(pb.EvictRequest(job="job-b"))).held) == ["pool"]
    nothing = await refusal(b.stub.Evict(pb.EvictRequest(job="job-a")))
    assert nothing.code() is grpc.StatusCode.NOT_FOUND


async def test_an_evicted_waiter_is_refused_and_may_ask_again(world: World) -> None:
    await world.start()
    await world.agent()
    a, b = await world.client("job-a"), await world.client("job-b")
    await a.acquire("pool")
    request = await b.ask("pool")
    await waiting(b, "job-b")
    answer = await b.stub.Evict(pb.EvictRequest(job="job-b", group="pool", reason="later"))
    assert list(answer.waited) == ["pool"]
    said = await b.refused(request)
    assert said.code == pb.FAILED
    assert "later" in said.message
    await b.ask("pool")
    await waiting(b, "job-b")


async def test_a_job_that_is_over_is_forgotten_here_and_on_its_node(world: World) -> None:
    await world.start()
    agent = await world.agent(behaviour=failing(reason="it does not come back", times=1))
    a, b = await world.client("job-a"), await world.client("job-b")
    await a.yielded(await a.acquire("pool"))
    assert (await b.refused(await b.ask("pool"))).code == pb.JOB_FAULTED
    runs = await refusal(a.stub.Forget(pb.ForgetRequest(job="job-b")))
    assert runs.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "stop it first" in runs.details()
    await b.goodbye()
    await a.until("pool", lambda s: any(j.job == "job-b" and j.fault and not j.sessions for j in s.jobs))
    answer = await a.stub.Forget(pb.ForgetRequest(job="job-b"))
    assert (list(answer.groups), list(answer.nodes_away)) == (["pool"], [])
    await agent.wait_for(lambda: agent.forgotten == [("pool", "job-b")])
    again = await world.client("job-b")
    await again.acquire("pool")
    unknown = await refusal(a.stub.Forget(pb.ForgetRequest(job="nobody")))
    assert unknown.code() is grpc.StatusCode.NOT_FOUND


async def test_a_job_that_runs_in_one_group_is_forgotten_in_none(world: World) -> None:
    await world.start(groups=(GroupConfig(id="one"), GroupConfig(id="two")))
    await world.agent(groups=("one", "two"), behaviour=failing(times=1))
    z, a = await world.client("job-z"), await world.client("job-a")
    await z.yielded(await z.acquire("one"))
    await a.refused(await a.ask("one"))
    await a.yielded(await a.acquire("two"))
    await refusal(z.stub.Forget(pb.ForgetRequest(job="job-a")))
    status = await z.group("one")
    assert [j.job for j in status.jobs if j.fault] == ["job-a"], "nothing was cleared"


async def test_a_deleted_group_is_gone_for_everybody(world: World, tmp_path: object) -> None:
    await world.start(groups=(), store=f"{tmp_path}/state.db")
    agent = await world.agent()
    a, b, c = [await world.client(f"job-{name}") for name in "abc"]
    await a.acquire("pool")
    first = await b.ask("pool")
    await waiting(b, "job-b")
    second = await c.ask("pool")
    await waiting(b, "job-b", "job-c")
    answer = await a.stub.DeleteGroup(pb.DeleteGroupRequest(group="pool", reason="moved"))
    assert (answer.holder, list(answer.waiters)) == ("job-a", ["job-b", "job-c"])
    for client, request in ((b, first), (c, second)):
        said = await client.refused(request)
        assert said.code == pb.GROUP_GONE
        assert "moved" in said.message
    assert (await a.news.get()).lease_lost.group == "pool"
    assert (await b.refused(await b.ask("pool"))).code == pb.UNKNOWN_GROUP
    agent.push("pool")  # whoever still speaks of it does no harm
    a.kill()
    await world.restart()
    d = await world.client("job-d")
    await agent.wait_for(lambda: agent.welcomed == 2)
    granted = await d.acquire("pool")  # offered anew
    assert granted.leases[0].epoch > 1, "epochs go on above what the agent has seen"


async def test_a_node_that_joins_and_one_that_is_lost_while_a_job_holds(world: World) -> None:
    await world.start(node_loss=0.3)
    first = await world.agent(node="n0")
    a, b = await world.client("job-a"), await world.client("job-b")
    granted = await a.acquire("pool")
    second = await world.agent(node="n1")
    await a.until("pool", lambda s: [n.node for n in s.nodes] == ["n0", "n1"])
    request = await b.ask("pool")
    await waiting(b, "job-b")
    await second.stop()
    await a.until("pool", lambda s: [n.node for n in s.nodes] == ["n0"])
    await a.yielded(granted)
    await b.granted(request)
    assert [command.job for command in first.commands] == ["job-b"]
