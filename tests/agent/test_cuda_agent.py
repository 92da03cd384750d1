"""A whole agent with the cuda backend: callbacks around a swap, restarts, what status says, who is killed."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from agent.conftest import GROUP, MIB, Node, Process, contexts
from agent.cuda_world import PATIENCE, libraries, look_again

from coslice.agent.config import GroupDevices
from coslice.cli.security import make_token
from coslice.core.ids import GroupId
from coslice.security import tokens
from coslice.testing import gpu_job
from coslice.testing.fake_cuda import FakeNode, uuid
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

pytestmark = pytest.mark.cuda

JOB = Path(__file__).with_name("cuda_hooks_job.py")
DEVICES = (GroupDevices(group=GroupId(GROUP), device_budget=0, accelerator="cuda"),)
CUDA = {"groups": DEVICES, "backend": "cuda", "backends": {"cuda": {"margin": "0"}}}


@pytest.fixture
def fake(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> FakeNode:
    made = FakeNode(tmp_path / "gpu", libraries=libraries(tmp_path_factory), capacity=16 * MIB)
    for key, value in made.environment().items():
        monkeypatch.setenv(key, value)
    return made


@pytest.fixture
def jobs(node: Node) -> "Jobs":
    return Jobs(node)


class Jobs:
    def __init__(self, node: Node) -> None:
        self._node = node

    async def start(self, job: str, *, size: int = 10 * MIB, wait: bool = True, **env: str) -> Process:
        assert self._node.agent is not None
        identity = {
            "COSLICE_AGENT": self._node.agent.address,
            "COSLICE_JOB": job,
            "COSLICE_GROUP": GROUP,
            "COSLICE_INCARNATION": f"{job}-token",
            "COSLICE_DEVICE": "cuda",
            **env,
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(JOB), str(size)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **identity},
        )
        made = Process(process)
        self._node.processes.append(made)
        if wait:
            await made.until("registered")
        return made


async def intact(process: Process) -> bool:
    process.tell("check")
    return bool((await process.until("checked"))["ok"])


def times(fake: FakeNode, op: str, pid: int) -> list[int]:
    return [call.at_us for call in fake.calls(op, pid)]


async def test_callbacks_run_before_the_lock_and_after_the_unlock(
    node: Node, fake: FakeNode, jobs: Jobs
) -> None:
    await node.start(**CUDA)
    a = await jobs.start("job-a")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    out = await node.orchestrator.make_resident(GROUP, "job-b", 2)
    assert out.done.bytes_out == 11 * MIB
    assert contexts(out.done.residency) == {"job-a": "SAVED"}
    left: dict[str, Any] = await a.until("out")
    assert left["at_us"] < times(fake, "begin-lock", a.pid)[0]
    back = await node.orchestrator.make_resident(GROUP, "job-a", 3)
    assert back.done.restored
    assert back.done.bytes_in == 11 * MIB
    came = await a.until("back")
    assert came["at_us"] > times(fake, "unlock", a.pid)[-1]
    assert await intact(a)


async def test_a_job_with_callbacks_of_its_own_is_not_said_to_be_frozen_at_any_time(
    node: Node, fake: FakeNode, jobs: Jobs
) -> None:
    """They run outside its accelerator sections only; the end-to-end test has a job without any."""
    await node.start(**CUDA)
    await jobs.start("job-a")
    report = await node.orchestrator.make_resident(GROUP, "job-a", 1)
    assert [context.whole for context in report.done.residency.contexts] == [False]


async def test_a_callback_that_fails_leaves_the_job_running(node: Node, fake: FakeNode, jobs: Jobs) -> None:
    await node.start(**CUDA, on_stuck="wait")
    a = await jobs.start("job-a")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    a.tell("refuse")
    await a.until("refusing")
    report = await node.orchestrator.make_resident(GROUP, "job-b", 2)
    assert report.failed.culprit == "job-a"
    assert "the communicator is in use" in report.failed.reason
    assert fake.calls("begin-lock") == []
    assert await intact(a)


async def test_the_next_agent_restores_what_the_last_one_parked(
    node: Node, fake: FakeNode, jobs: Jobs
) -> None:
    await node.start(**CUDA)
    a = await jobs.start("job-a")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    await node.orchestrator.make_resident(GROUP, "job-b", 2)
    assert node.agent is not None
    address = node.agent.address
    await node.agent.stop()
    await node.run_again(listen=address)
    await node.orchestrator.until(
        lambda m: contexts(m.residency) == {"job-a": "SAVED"} and bool(m.residency.contexts[0].pids)
    )
    back = await node.orchestrator.make_resident(GROUP, "job-a", 3)
    assert back.done.restored, back
    assert await intact(a)
    assert fake.poisonings == 0


async def test_status_has_the_devices_as_measured(node: Node, fake: FakeNode, jobs: Jobs) -> None:
    fake.configure(name="Fake H200", ecc_uncorrected=2)
    await node.start(**CUDA)
    a = await jobs.start("job-a", size=3 * MIB)
    status = await node.status()
    assert status.survey_error == ""
    (device,) = status.accelerators
    assert (device.uuid, device.name, device.total_bytes) == (uuid(0), "Fake H200", 16 * MIB)
    assert (device.used_bytes, device.ecc_uncorrected) == (4 * MIB, 2)
    assert [(each.pid, each.job, each.bytes) for each in device.occupants] == [(a.pid, "job-a", 4 * MIB)]
    (member,) = status.members
    assert (member.backend, member.parked, member.device_bytes) == ("cuda", False, 4 * MIB)
    assert status.devices[0].budget_bytes == 16 * MIB
    await node.orchestrator.make_resident(GROUP, "job-b", 1)
    status = await node.status()
    assert status.accelerators[0].used_bytes == 0
    assert (status.members[0].parked, status.members[0].device_bytes) == (True, 0)


async def test_a_job_that_asks_for_a_backend_that_is_not_there_is_refused(
    node: Node, fake: FakeNode, jobs: Jobs
) -> None:
    await node.start(**CUDA)
    a = await jobs.start("job-a", wait=False, COSLICE_BACKEND="magic")
    assert "no backend 'magic'" in (await a.until("refused"))["text"]


async def test_a_stuck_job_is_killed_and_the_next_comes_in(node: Node, fake: FakeNode, jobs: Jobs) -> None:
    await node.start(**CUDA, stuck_grace=0.1)
    a = await jobs.start("job-a")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    fake.fault("checkpoint", a.pid, "error", 801)
    report = await node.orchestrator.make_resident(GROUP, "job-b", 2)
    assert contexts(report.done.residency) == {"job-a": "LOST"}, report
    assert await a.ended() == -9


async def test_a_stray_process_is_named_and_nobody_is_destroyed(
    node: Node, fake: FakeNode, jobs: Jobs
) -> None:
    await node.start(**{**CUDA, "backends": {"cuda": {"margin": "0", "settle": "0.1"}}})
    a = await jobs.start("job-a")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    await node.orchestrator.make_resident(GROUP, "job-b", 2)
    stray = await asyncio.create_subprocess_exec(
        *(sys.executable, str(JOB), str(10 * MIB)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "COSLICE_AGENT": "", "COSLICE_JOB": ""},
    )
    try:
        async with asyncio.timeout(PATIENCE):
            while stray.pid not in fake.slots() or fake.slots()[stray.pid].bytes[0] < 10 * MIB:
                await look_again()
        report = await node.orchestrator.make_resident(GROUP, "job-a", 3)
        assert f"process {stray.pid}" in report.failed.reason
        assert fake.poisonings == 0
    finally:
        stray.kill()
        await stray.wait()
    report = await node.orchestrator.make_resident(GROUP, "job-a", 4)
    assert report.done.restored, report
    assert await intact(a)


async def test_an_administrator_may_name_processes_that_registered_nothing(
    node: Node, fake: FakeNode, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    tokens.create_secret(secret)
    token = make_token("", secret=secret, role="admin", ttl="1h")
    agent = await node.start(**CUDA, token_secret=str(secret))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, gpu_job.__file__, "--bytes", str(4 * MIB)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    job = Process(process)
    node.processes.append(job)
    await job.until("ready")
    named = pb.SnapshotRequest(job="alone", pids=[process.pid])
    async with grpc.aio.insecure_channel(agent.address) as channel:
        stub, shown = rpc.AgentStub(channel), [("authorization", f"Bearer {token}")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Snapshot(pb.SnapshotRequest(job="x", pids=[2**22 + 1]), metadata=shown)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        out = await stub.Snapshot(named, metadata=shown, timeout=PATIENCE)
        assert out.bytes == 5 * MIB
        assert fake.slots()[process.pid].state == "checkpointed"
        back = await stub.Restore(pb.RestoreRequest(job="alone"), metadata=shown, timeout=PATIENCE)
        assert back.bytes == 5 * MIB
    assert await intact(job)
