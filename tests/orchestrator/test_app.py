"""Starting, stopping, and what a wrong configuration is told."""

import asyncio
import socket
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from orchestrator.raw_client import BOUND
from orchestrator.world import World

from coslice.errors import ConfigError
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import GroupConfig, OrchestratorConfig, check
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc


async def test_port_in_use_names_the_port_and_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        app = OrchestratorApp(OrchestratorConfig(listen=f"127.0.0.1:{port}"))
        with pytest.raises(ConfigError, match=f"port {port} is in use") as caught:
            await app.start()
    assert "listen elsewhere" in str(caught.value)


async def test_two_orchestrators_never_share_a_port(world: World) -> None:
    await world.start()
    with pytest.raises(ConfigError, match="is in use"):
        await OrchestratorApp(OrchestratorConfig(listen=world.app.address)).start()


async def test_a_failed_start_lets_go_of_the_store(tmp_path: Any) -> None:
    store = str(tmp_path / "state.db")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError):
            await OrchestratorApp(OrchestratorConfig(listen=listen, store=store)).start()
    app = OrchestratorApp(OrchestratorConfig(listen="127.0.0.1:0", store=store))
    await app.start()
    await app.stop()


@pytest.mark.parametrize("listen", ["0.0.0.0:50051", "[::]:50051", "10.1.2.3:50051", "example.org:50051"])
def test_an_address_that_others_can_reach_needs_a_word(listen: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        check(OrchestratorConfig(listen=listen))
    check(OrchestratorConfig(listen=listen, insecure=True))


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:50051", "[::1]:50051", "unix:/tmp/o.sock"])
def test_a_local_address_is_fine(listen: str) -> None:
    check(OrchestratorConfig(listen=listen))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"listen": "50051"}, "host:port"),
        ({"listen": "127.0.0.1:99999"}, "host:port"),
        ({"listen": "::1:50051"}, "in brackets"),
        ({"session_grace": 0}, "session_grace"),
        ({"groups": (GroupConfig(id="a b"),)}, "a b"),
        ({"groups": (GroupConfig(id="a"), GroupConfig(id="a"))}, "twice"),
        ({"groups": (GroupConfig(id="a", policy="random"),)}, "fewest_swaps"),
        ({"default_policy": "random"}, "fewest_swaps"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(OrchestratorConfig(**wrong))


async def test_stop_is_idempotent_and_frees_the_port(world: World) -> None:
    await world.start()
    await world.app.stop()
    await world.app.stop()
    host, port = world.app.address.split(":")
    with socket.create_server((host, int(port))):
        pass


async def test_health_and_reflection_answer(world: World) -> None:
    await world.start()
    async with grpc.aio.insecure_channel(world.app.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="coslice.v1.Orchestrator")
        answer = await health.Check(request, timeout=BOUND)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        mirror = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        async for listed in mirror.ServerReflectionInfo(iter([ask])):
            names = {service.name for service in listed.list_services_response.service}
            assert "coslice.v1.Orchestrator" in names


async def test_watch_tells_changes_and_is_quiet_otherwise(world: World) -> None:
    await world.start()
    await world.agent()
    a = await world.client("job-a")
    async with grpc.aio.insecure_channel(world.app.address) as channel:
        watch = pb_grpc.OrchestratorStub(channel).WatchStatus(pb.GetStatusRequest(group="pool"))
        first = await watch.read()
        assert first.groups[0].state == "empty"
        held = await a.acquire("pool")
        await a.yielded(held)
        async with asyncio.timeout(BOUND):
            while (await watch.read()).groups[0].state != "resident":
                pass
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await watch.read()
