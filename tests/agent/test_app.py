"""Starting and stopping: what is refused, what is left behind, what is served."""

import asyncio
import hashlib
import os
from pathlib import Path

import grpc.aio
import pytest
from agent.conftest import GROUP, MIB, PATIENCE, Node
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from msgspec.structs import replace

from coslice.agent.app import AgentApp
from coslice.agent.config import AgentConfig, GroupDevices, validate
from coslice.core.ids import GroupId, NodeId
from coslice.errors import ConfigError

GOOD = AgentConfig(
    node=NodeId("node-0"),
    state_dir="/nonexistent/state",
    runtime_dir="/nonexistent/run",
    host_budget=MIB,
    groups=(GroupDevices(group=GroupId("g"), device_budget=MIB, cpus=(0,)),),
)


def group(name: str, **settings) -> GroupDevices:
    return GroupDevices(**{"group": GroupId(name), "device_budget": MIB, **settings})


def mode(path: Path) -> int | None:
    """Permission bits; None: it is not there."""
    return path.stat().st_mode & 0o777 if path.exists() else None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"listen": "0.0.0.0:9001"}, "--token-secret"),
        ({"listen": "9001"}, "host:port"),
        ({"orchestrator": "somewhere"}, "host:port"),
        ({"runtime_dir": "/" + "x" * 120}, "at most 107 bytes"),
        ({"host_budget": 0}, "host_budget"),
        ({"host_per_job": 2 * MIB}, "--host-per-job"),
        ({"state_dir": ":memory:", "disk_budget": MIB}, "folder on a disk"),
        ({"node": NodeId("a b")}, "node name"),
        ({"node": NodeId("n" * 254)}, "use 1 to 253"),
        ({"groups": (group("g" * 64),)}, "use 1 to 63"),
        ({"on_stuck": "shrug"}, "'kill' or 'wait'"),
        ({"groups": (group("g"), group("g"))}, "twice"),
        ({"groups": (group("g", cpus=(1,)), group("h", cpus=(0, 1)))}, "disjoint"),
        ({"groups": (group("g", device_budget=0),)}, "device_budget"),
        ({"groups": (group("g", accelerator="tpu"),)}, "'host' or 'cuda'"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_anything_starts(change: dict, words: str) -> None:
    validate(GOOD)
    with pytest.raises(ConfigError, match=words):
        validate(replace(GOOD, **change))


def test_a_remote_listener_needs_an_explicit_word() -> None:
    validate(replace(GOOD, listen="0.0.0.0:9001", allow_remote=True))


async def test_a_disk_budget_beyond_what_the_disk_has_is_refused(tmp_path: Path) -> None:
    config = replace(GOOD, state_dir=str(tmp_path / "state"), runtime_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"free: give less \(coslice up --disk\)"):
        await AgentApp(replace(config, disk_budget=1 << 60, disk_dir=str(tmp_path))).start()


async def test_a_node_may_have_a_name_as_long_as_kubernetes_allows(node: Node, tmp_path: Path) -> None:
    await node.start(node=NodeId("n" * 253), disk_budget=MIB, disk_dir=str(tmp_path))
    assert (await node.status()).node == "n" * 253
    assert mode(tmp_path / f"coslice-{hashlib.sha256(b'n' * 253).hexdigest()}") == 0o700


async def test_a_port_in_use_is_a_clear_error_and_leaves_nothing(node: Node) -> None:
    first = await node.start()
    assert node.config is not None
    other = replace(
        node.config,
        listen=first.address,
        state_dir=str(node.folder / "state-2"),
        runtime_dir=str(node.folder / "run-2"),
    )
    before = {task for task in asyncio.all_tasks() if "agent" in task.get_name()}
    with pytest.raises(ConfigError, match="another process"):
        await AgentApp(other).start()
    assert {task for task in asyncio.all_tasks() if "agent" in task.get_name()} == before
    assert mode(node.folder / "run-2" / "buffers.sock") is None


async def test_a_state_directory_in_use_names_the_owner(node: Node) -> None:
    await node.start()
    assert node.config is not None
    with pytest.raises(ConfigError, match=str(os.getpid())):
        await AgentApp(replace(node.config, runtime_dir=str(node.folder / "run-2"))).start()


async def test_state_and_socket_are_the_users_alone_and_the_socket_goes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "umask")  # it would be that of every thread, whatever they make meanwhile
    agent = await node.start()
    assert mode(node.folder / "state") == mode(node.folder / "run") == 0o700
    assert mode(node.folder / "run" / "buffers.sock") == 0o600
    await agent.stop()
    assert mode(node.folder / "run" / "buffers.sock") is None


async def test_health_and_reflection_are_served(node: Node) -> None:
    agent = await node.start()
    async with grpc.aio.insecure_channel(agent.address) as channel:
        check = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="coslice.v1.Agent"), timeout=PATIENCE
        )
        assert check.status == health_pb2.HealthCheckResponse.SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=PATIENCE
        )
        answer = await call.read()
    assert "coslice.v1.Agent" in {service.name for service in answer.list_services_response.service}


async def test_the_hello_offers_the_groups_with_budgets(node: Node) -> None:
    await node.start(budget=160 * MIB)
    hello = await node.orchestrator.attached()
    assert (hello.node, hello.accelerator) == ("node-0", "host")
    offer = hello.groups[0]
    assert (offer.group, offer.epoch) == (GROUP, 0)
    assert offer.residency.device_budget_bytes == 160 * MIB
    device = (await node.status()).devices[0]
    assert (device.group, list(device.cpus), device.budget_bytes) == (GROUP, [0], 160 * MIB)
