"""llm-d's standalone mode: processes and engines that registered nothing and are named in the request."""

import asyncio
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from agent.conftest import GROUP, MIB, Node, Process
from agent.cuda_world import libraries
from agent.test_upstream import Caller, code_of

from coslice.agent.config import GroupDevices
from coslice.agent.peer import Unidentified, process_of, user_of
from coslice.core.ids import GroupId
from coslice.testing import gpu_job
from coslice.testing.engines import FakeEngine
from coslice.testing.fake_cuda import FakeNode
from coslice.wire.upstream import snapshot_agent_pb2 as up

DEVICES = (GroupDevices(group=GroupId(GROUP), device_budget=0, accelerator="cuda"),)
CUDA = {"groups": DEVICES, "backend": "cuda", "backends": {"cuda": {"margin": "0"}}}


@pytest.fixture
def fake(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> FakeNode:
    if shutil.which("gcc") is None:
        pytest.skip("the fake driver is built with gcc")
    made = FakeNode(tmp_path / "gpu", libraries=libraries(tmp_path_factory), capacity=16 * MIB)
    for key, value in made.environment().items():
        monkeypatch.setenv(key, value)
    return made


async def gpu_process(node: Node, size: int) -> Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, gpu_job.__file__, "--bytes", str(size)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    node.processes.append(Process(process))
    await node.processes[-1].until("ready")
    return node.processes[-1]


def pids(*named: int) -> up.BackendConfig:
    return up.BackendConfig(cuda={"explicit_target": {"pids": named}})


@pytest.mark.cuda
async def test_named_processes_are_parked_and_known_to_the_next_agent(node: Node, fake: FakeNode) -> None:
    await node.start(**CUDA)
    job, caller = await gpu_process(node, 4 * MIB), Caller(node)
    out = await caller.ended(await caller.snapshot("alone", pids(job.pid)))
    assert (out.status, out.storage_bytes) == (up.OPERATION_STATUS_COMPLETE, 5 * MIB), out.error
    assert fake.slots()[job.pid].state == "checkpointed"
    assert await caller.states() == {"alone": "SAVED"}
    status = await caller.stub.Status(up.StatusRequest())
    assert [(a.memory_used_bytes, a.memory_total_bytes) for a in status.accelerator_statuses] == [
        (0, 16 * MIB)
    ]
    assert node.agent is not None
    address = node.agent.address
    await node.agent.stop()
    await node.run_again(listen=address)
    assert await caller.states() == {"alone": "SAVED"}
    back = await caller.ended(await caller.restore("alone"))
    assert (back.status, back.snapshot_device_bytes) == (up.OPERATION_STATUS_COMPLETE, 5 * MIB), back.error
    job.tell("check")
    assert (await job.until("checked"))["ok"]


@pytest.mark.cuda
async def test_of_two_named_jobs_only_the_one_on_the_device_can_be_saved(node: Node, fake: FakeNode) -> None:
    """Upstream looks whether any process uses any device."""
    await node.start(**CUDA)
    caller, using = Caller(node), await gpu_process(node, MIB)
    idle = await asyncio.create_subprocess_exec("sleep", "60")
    node.processes.append(Process(idle))
    assert await code_of(caller.snapshot("idle", pids(idle.pid))) is grpc.StatusCode.FAILED_PRECONDITION
    done = await caller.ended(await caller.snapshot("using", pids(using.pid)))
    assert done.status == up.OPERATION_STATUS_COMPLETE, done.error
    assert await caller.states() == {"idle": "IDLE", "using": "SAVED"}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine("vllm", weights=24 * MIB, kv=8 * MIB) as made:
        yield made


def endpoint(*urls: str) -> up.BackendConfig:
    return up.BackendConfig(app_endpoint={"app": up.APP_VLLM, "endpoints": urls})


async def test_an_engine_is_put_to_sleep_by_its_address(node: Node, engine: FakeEngine) -> None:
    await node.start(orchestrator=None)
    caller, before = Caller(node), await asyncio.to_thread(engine.generate)
    out = await caller.ended(await caller.snapshot("sampler", endpoint(engine.url)))
    assert out.status == up.OPERATION_STATUS_COMPLETE, out.error
    assert out.storage_bytes == pytest.approx(32 * MIB, rel=0.1)
    assert (await asyncio.to_thread(engine.state))["asleep"] == ["kv_cache", "weights"]
    back = await caller.ended(await caller.restore("sampler", endpoint(engine.url)))
    assert back.status == up.OPERATION_STATUS_COMPLETE, back.error
    assert await asyncio.to_thread(engine.generate) == before


async def test_an_engine_has_no_channel_and_that_is_said_at_once(node: Node, engine: FakeEngine) -> None:
    await node.start(orchestrator=None)
    caller = Caller(node)
    await caller.ended(await caller.restore("sampler", endpoint(engine.url)))
    failed = await caller.operation(await caller.snapshot("sampler", up.BackendConfig(app_channel={})))
    assert failed.status == up.OPERATION_STATUS_FAILED
    assert "no workload channel" in failed.error


@pytest.mark.parametrize("url", ["http://10.1.2.3:8000", "file:///etc/passwd", "http://127.0.0.1:1"])
async def test_addresses_of_others_are_not_called(node: Node, url: str) -> None:
    await node.start(orchestrator=None)
    caller = Caller(node)
    assert await code_of(caller.snapshot("sampler", endpoint(url))) is grpc.StatusCode.FAILED_PRECONDITION
    assert await caller.states() == {}


# ── who is at the other end ────────────────────────────────────────────────


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
async def test_the_process_behind_a_connection_is_found(family: socket.AddressFamily) -> None:
    host = "::1" if family is socket.AF_INET6 else "127.0.0.1"
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    port = listener.getsockname()[1]
    script = (
        "import os,socket,sys\n"
        f"s = socket.create_connection(({host!r}, {port}))\n"
        "os.set_inheritable(s.fileno(), True)\n"
        "child = os.fork()\n"  # shares the socket: its parent is who connected
        "print(s.getsockname()[1], os.getpid(), flush=True) if child else None\n"
        "sys.stdin.read()\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    with listener:
        connection, _ = await asyncio.to_thread(listener.accept)
        assert process.stdout is not None
        theirs, pid = map(int, (await process.stdout.readline()).split())
        peer = f"ipv6:%5B::1%5D:{theirs}" if family is socket.AF_INET6 else f"ipv4:127.0.0.1:{theirs}"
        found = process_of(peer, port)
        assert found.pid == pid == process.pid
        assert user_of(peer, port) == os.getuid()
        with pytest.raises(Unidentified, match="network namespace"):
            process_of(peer, port + 1 if port < 65535 else port - 1)
        connection.close()
        process.stdin.close()
        await process.wait()


@pytest.mark.parametrize("peer", ["unix:/run/x.sock", "ipv4:10.9.8.7:5", "ipv4:nonsense", ""])
def test_nobody_is_guessed(peer: str) -> None:
    with pytest.raises(Unidentified):
        process_of(peer, 9001)


async def test_a_tpu_slice_is_moved_by_the_tool_that_the_request_names(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, devices = node.folder / "tpu", node.folder / "vfio"
    monkeypatch.setenv("COSLICE_FAKE_TPU", str(world))
    for path in (world, devices):
        path.mkdir()
    (devices / "0").touch()
    fakes = Path(__file__).parents[1] / "fakes"
    job = await asyncio.create_subprocess_exec(
        *(sys.executable, str(fakes / "tpu_job.py"), str(world), str(devices / "0")),
        stdout=asyncio.subprocess.PIPE,
    )
    node.processes.append(Process(job))
    assert job.stdout is not None
    assert await job.stdout.readline() == b"ready\n"
    settings = {"devices": str(devices), "lock_file": str(world / "lock"), "gate_seconds": "0.2"}
    await node.start(
        orchestrator=None, backends={"tpu": {"program": str(fakes / "tpucheckpoint"), **settings}}
    )
    caller = Caller(node)
    config = up.BackendConfig(tpu={"explicit_target": {"pids": [job.pid]}})
    out = await caller.ended(await caller.snapshot("slice", config))
    assert out.status == up.OPERATION_STATUS_COMPLETE, out.error
    assert (world / str(job.pid)).read_text() == "parked"
    assert await caller.states() == {"slice": "SAVED"}
    back = await caller.ended(await caller.restore("slice", config))
    assert back.status == up.OPERATION_STATUS_COMPLETE, back.error
    assert (world / str(job.pid)).read_text() == "attached"
    assert await caller.states() == {"slice": "RUNNING"}
