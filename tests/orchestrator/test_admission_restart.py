"""An orchestrator's process is killed; its successor knows who was admitted and refused, and what was
measured."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest
from faults.cluster import Cluster
from grpc_health.v1 import health_pb2, health_pb2_grpc
from orchestrator.raw_client import RawClient
from orchestrator.test_admission import member, says, turns
from orchestrator.world import World

from coslice.orchestrator.config import GroupConfig
from coslice.testing.fake_agent import FakeAgent
from coslice.testing.fake_kubernetes_http import FakeKubernetes
from coslice.wire.v1 import coslice_pb2 as pb


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def test_a_kill_loses_neither_verdicts_nor_what_was_measured(
    cluster: Cluster, stack: AsyncExitStack
) -> None:
    """A verdict was durable, with all that was measured before it, when anybody heard of it: the kill may
    come at any time after. Whatever the clock says, who declares turns of 5,000 s is refused."""
    group = {"id": "pool", "admission": "enforce", "max_slowdown": 1.1}
    settings = {"groups": [group], "session_grace": 3600.0}
    orchestrator = cluster.orchestrator(**settings)
    agent = await stack.enter_async_context(FakeAgent(cluster.address, groups=("pool",)))

    async def client(job: str, profile: str = "") -> RawClient:
        client = RawClient(cluster.address, job, profile=profile)
        stack.push_async_callback(client.close)
        return await client.connect()

    a = await client("job-a")
    await turns(a, 6)
    b = await client("job-b", says(5000.0, 10_000.0))
    refused = await b.refused(await b.ask("pool"))
    assert refused.code == pb.NOT_ADMITTED
    before = member(await a.group("pool"), "job-a")
    assert before.cycles == 4
    orchestrator.kill()
    for one in (a, b):
        await one.ended.wait()
    welcomed = agent.welcomed
    cluster.orchestrator(**settings)
    await agent.wait_for(lambda: agent.welcomed > welcomed)
    for one in (a, b):
        await one.connect()
    after = await a.group("pool")
    assert [one.job for one in after.admission.members] == ["job-a"]
    assert member(after, "job-a").state == "seated"
    assert member(after, "job-a").cycles == before.cycles
    assert (member(after, "job-a").on_s, member(after, "job-a").off_s) == (before.on_s, before.off_s)
    assert list(after.admission.decisions) == [f"refused: {refused.message}"]
    assert (await b.refused(await b.ask("pool"))).message == refused.message
    (told,) = [
        line for line in await a.explain("pool", "job-b") if line.startswith("Admission refuses job-b")
    ]
    assert told.endswith(f": {refused.message}")
    await turns(a, 3)  # the cycle that the kill cut off does not count, nor the first after it
    assert member(await a.group("pool"), "job-a").cycles == before.cycles + 1


async def test_whoever_leads_next_knows_the_verdicts(world: World) -> None:
    """Two orchestrators on one store; the one that refused a job leaves."""
    group = GroupConfig(id="pool", admission="enforce", max_slowdown=1.1)
    with FakeKubernetes() as api:
        settings = {"store": f"kubernetes://here/t?api={api.url}", "groups": (group,), "leader_ttl": 2.0}

        async def leading() -> None:
            service = health_pb2.HealthCheckRequest(service="coslice.v1.Orchestrator")
            async with grpc.aio.insecure_channel(world.app.address) as channel:
                async for answer in health_pb2_grpc.HealthStub(channel).Watch(service):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return

        first = await world.start(**settings)
        await leading()
        await world.agent()
        a = await world.client("job-a", profile=says(60.0, 100.0))
        await turns(a, 1)
        b = await world.client("job-b", profile=says(60.0, 100.0))
        refused = await b.refused(await b.ask("pool"))
        assert refused.code == pb.NOT_ADMITTED
        await first.stop()
        await world.start(**settings)
        await leading()
        b = await world.client("job-b")
        assert (await b.refused(await b.ask("pool"))).message == refused.message
