"""Callers of llm-d's agent protocol: with tokens, as other users, and as processes that they are not."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from agent.conftest import MIB, PATIENCE, Node
from agent.test_upstream import code_of, registered, workload
from agent.test_upstream_serving import register, stream

from coslice.cli.security import make_token
from coslice.security import tokens
from coslice.wire.upstream import snapshot_agent_pb2 as up
from coslice.wire.upstream.snapshot_agent_pb2_grpc import SnapshotAgentServiceStub

NAMED = up.BackendConfig(cuda={"explicit_target": {"pids": [2**22 - 3]}})


def shown(secret: Path, name: str, role: str = "job") -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {make_token(name, secret=secret, role=role, ttl='1h')}"),)


async def test_with_tokens_a_job_is_its_owners_and_processes_are_an_administrators(
    node: Node, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    tokens.create_secret(secret)
    agent = await node.start(orchestrator=None, token_secret=str(secret))
    async with grpc.aio.insecure_channel(agent.address) as channel:
        stub: Any = SnapshotAgentServiceStub(channel)

        async def refused(request: up.SnapshotRequest, *token: tuple[str, str]) -> grpc.StatusCode:
            return await code_of(stub.Snapshot(request, metadata=token, timeout=PATIENCE))

        plain, named = up.SnapshotRequest(job_id="a"), up.SnapshotRequest(job_id="a", backend_config=NAMED)
        assert await refused(plain) is grpc.StatusCode.UNAUTHENTICATED
        assert await refused(plain, *shown(secret, "b")) is grpc.StatusCode.PERMISSION_DENIED
        own = await refused(plain, *shown(secret, "a"))
        assert own is grpc.StatusCode.FAILED_PRECONDITION, "it is let in; nobody has registered"
        assert await refused(named, *shown(secret, "a")) is grpc.StatusCode.PERMISSION_DENIED
        admin = await refused(named, *shown(secret, "", role="admin"))
        assert admin is not grpc.StatusCode.PERMISSION_DENIED
        call = stub.WorkloadChannel(metadata=shown(secret, "b"))
        await call.write(register("a"))
        async with asyncio.timeout(PATIENCE):
            assert await call.code() is grpc.StatusCode.PERMISSION_DENIED
        assert await code_of(stub.Status(up.StatusRequest())) is grpc.StatusCode.UNAUTHENTICATED


AS_NOBODY = """
import os, queue, sys
import grpc
from coslice.wire.upstream import snapshot_agent_pb2 as up
from coslice.wire.upstream.snapshot_agent_pb2_grpc import SnapshotAgentServiceStub
os.setuid(65534)
stub = SnapshotAgentServiceStub(grpc.insecure_channel(sys.argv[1]))
target = up.BackendConfig(cuda={"explicit_target": {"pids": [int(sys.argv[2])]}})
messages = queue.SimpleQueue()  # not closed: it stays a channel
messages.put(up.WorkloadMessage(register=up.RegisterWorkload(job_id="a")))
calls = [
    lambda: stub.Snapshot(up.SnapshotRequest(job_id="a", backend_config=target), timeout=30),
    lambda: list(stub.WorkloadChannel(iter(messages.get, None), timeout=30)),
]
for call in calls:
    try:
        call()
        print("OK")
    except grpc.RpcError as error:
        print(error.code().name, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_can_neither_name_processes_nor_register_as_one_of_ours(node: Node) -> None:
    agent = await node.start(orchestrator=None)
    target = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", AS_NOBODY, agent.address, str(target.pid)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            said = (await process.stdout.read()).decode().split()
        await process.wait()
    finally:
        target.kill()
        await target.wait()
    assert said == ["PERMISSION_DENIED", "PERMISSION_DENIED"]
    assert not (await node.status()).members


async def test_a_job_that_runs_under_a_token_is_not_joined_without_it(node: Node) -> None:
    await node.start(orchestrator=None)
    await node.workload("job-a", group="", size=MIB)
    call = await stream(node, register("job-a"))
    async with asyncio.timeout(PATIENCE):
        assert await call.code() is grpc.StatusCode.ALREADY_EXISTS
    assert len((await node.status()).members) == 1


async def test_a_process_that_coslice_run_started_is_known_by_its_environment(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both protocols in one start of a job, from two processes."""
    await node.start(orchestrator=None)
    await node.workload("job-a", group="", size=MIB)
    monkeypatch.setenv("COSLICE_INCARNATION", "run-1")  # what the fake workload registers with
    await workload(node, "job-a", size=MIB)
    await registered(node, "job-a")
    async with asyncio.timeout(PATIENCE):
        while len((await node.status()).members) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # upstream tells nobody of a registration
