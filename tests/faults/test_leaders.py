"""Several orchestrators on one store: the leader is killed, paused, cut off. Nobody loses place or lock.

On a real etcd, and (the first two) on a Kubernetes API with behaviour.
"""

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from faults.cluster import BOUND, Process
from faults.leaders import Crowd, Orchestrators, asked
from orchestrator.raw_client import RawClient
from store.etcd_server import EtcdServer

from coslice.wire.leader import LEADER
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

ETCD = pytest.param("etcd", marks=pytest.mark.etcd)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd").start()
    yield server
    server.kill()


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[str]:
    server = Process(
        [sys.executable, "-m", "coslice.testing.fake_kubernetes_http"], tmp_path / "kubernetes.log"
    )
    yield f"kubernetes://here?api={server.hear()['url']}"
    server.end()


@pytest.fixture
def location(request: pytest.FixtureRequest) -> str:
    if request.param == "kubernetes":
        return str(request.getfixturevalue("kubernetes"))
    server: EtcdServer = request.getfixturevalue("etcd")
    return server.location()


@pytest.fixture
def orchestrators(tmp_path: Path, location: str) -> Iterator[Orchestrators]:
    """``takeover_grace``: what has to be back by then a busy machine may miss."""
    several = Orchestrators(tmp_path, location, ttl=2, takeover_grace=120.0)
    for _ in range(3):
        several.start()
    yield several
    several.close()


on_both = pytest.mark.parametrize("location", [ETCD, "kubernetes"], indirect=True)
on_etcd = pytest.mark.parametrize("location", [ETCD], indirect=True)


@on_both
async def test_the_leader_is_killed(orchestrators: Orchestrators) -> None:
    leader = await orchestrators.leader()
    crowd = Crowd(orchestrators.addresses, groups=6, waiters=5)
    queues = await crowd.arrive()
    orchestrators.signal(leader, signal.SIGKILL)
    await crowd.go_on()
    crowd.check(queues)
    second = await orchestrators.leader(other_than=leader)
    orchestrators.signal(second, signal.SIGKILL)  # and the next one too
    assert await orchestrators.leader(other_than=second)
    await crowd.close()


async def whom_it_names(standby: str) -> str:
    """The leader, once a standby knows it."""
    async with asyncio.timeout(BOUND), grpc.aio.insecure_channel(standby) as channel:
        while True:
            with pytest.raises(grpc.aio.AioRpcError) as told:
                await rpc.OrchestratorStub(channel).GetStatus(pb.GetStatusRequest())
            found = dict(told.value.trailing_metadata())
            if LEADER in found:
                return str(found[LEADER])
            await asyncio.sleep(0.05)  # it does not announce what it learns


@on_both
async def test_a_paused_leader_that_wakes_up_changes_nothing(orchestrators: Orchestrators) -> None:
    old = await orchestrators.leader()
    crowd = Crowd(orchestrators.addresses, groups=3, waiters=3)
    queues = await crowd.arrive()
    late = await RawClient(old, "latecomer").connect()
    orchestrators.signal(old, signal.SIGSTOP)
    for group in crowd.groups:  # what it finds when it wakes up
        await late.ask(group)
    new = await orchestrators.leader(other_than=old)
    before = await asked(new)
    orchestrators.signal(old, signal.SIGCONT)
    async with asyncio.timeout(BOUND):
        await late.ended.wait()
    assert late.status is grpc.StatusCode.UNAVAILABLE
    assert not any(late.answered(f"{late.session}/{n}") for n in range(1, len(crowd.groups) + 1))
    after = await asked(new)
    assert before is not None
    assert after is not None
    assert not any(one.job == "latecomer" for group in after.groups for one in group.waiters)
    assert [group.epoch for group in after.groups] == [group.epoch for group in before.groups]
    assert await whom_it_names(old) == new
    await crowd.go_on()
    crowd.check(queues)
    async with asyncio.timeout(2 * BOUND):
        for closing in (crowd, late):
            await closing.close()


@on_etcd
@pytest.mark.parametrize("away_s", [0.0, 4.0], ids=["shorter", "longer"])
async def test_etcd_is_killed_and_comes_back(
    orchestrators: Orchestrators, etcd: EtcdServer, away_s: float
) -> None:
    """For less, and for more, than the leader's lease lives."""
    await orchestrators.leader()
    crowd = Crowd(orchestrators.addresses, groups=3, waiters=3)
    queues = await crowd.arrive()
    etcd.kill()
    going_on = asyncio.create_task(crowd.go_on())
    await asyncio.sleep(away_s)  # how long the store is away is what is tested
    assert not crowd.turns  # nothing is decided that cannot be saved
    await asyncio.to_thread(etcd.start)
    await going_on
    crowd.check(queues)
    await crowd.close()


async def until_its_status_names(leader: str, others: set[str]) -> None:
    """As those who stand by."""
    async with asyncio.timeout(BOUND):
        while True:
            found = await asked(leader)
            if found is not None and {one.address for one in found.orchestrators if not one.leads} == others:
                break
            await asyncio.sleep(0.05)  # it is announced to nobody
    (first,) = (one for one in found.orchestrators if one.leads)
    assert first.address == leader
    assert first.lease_left_s > 0


@on_etcd
async def test_one_that_is_stopped_in_order_hands_over_at_once(orchestrators: Orchestrators) -> None:
    leader = await orchestrators.leader()
    crowd = Crowd(orchestrators.addresses, groups=3, waiters=3)
    queues = await crowd.arrive()
    others = set(orchestrators.processes) - {leader}
    await until_its_status_names(leader, others)
    orchestrators.signal(leader, signal.SIGTERM)
    await crowd.go_on()
    crowd.check(queues)
    second = await orchestrators.leader(other_than=leader)
    await until_its_status_names(second, others - {second})
    await crowd.close()
