"""Callers and workloads of llm-d's agent protocol, alone and beside native ones."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from agent.conftest import GROUP, MIB, PATIENCE, Node, Process, contexts
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coslice.agent.client import AsyncAgentClient
from coslice.agent.upstream import UpstreamService
from coslice.agent.upstream_ledger import Entry, Place, judged
from coslice.agent.upstream_operations import Operation, Operations, Order
from coslice.wire.upstream import snapshot_agent_pb2 as up
from coslice.wire.upstream.snapshot_agent_pb2_grpc import SnapshotAgentServiceStub

SIZE = 64 * MIB


class Caller:
    """What an unmodified client does: one insecure channel, no metadata, and it polls for the end."""

    def __init__(self, node: Node) -> None:
        assert node.agent is not None
        self.channel = grpc.aio.insecure_channel(node.agent.address)
        self.stub: Any = SnapshotAgentServiceStub(self.channel)

    async def snapshot(self, job: str, config: up.BackendConfig | None = None) -> str:
        request = up.SnapshotRequest(job_id=job, backend_config=config)
        return str((await self.stub.Snapshot(request, timeout=PATIENCE)).operation_id)

    async def restore(self, job: str, config: up.BackendConfig | None = None) -> str:
        request = up.RestoreRequest(job_id=job, backend_config=config)
        return str((await self.stub.Restore(request, timeout=PATIENCE)).operation_id)

    async def operation(self, name: str) -> up.GetOperationResponse:
        return await self.stub.GetOperation(up.GetOperationRequest(operation_id=name), timeout=PATIENCE)

    async def ended(self, name: str) -> up.GetOperationResponse:
        async with asyncio.timeout(PATIENCE):
            while (found := await self.operation(name)).status == up.OPERATION_STATUS_PENDING:  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # the protocol has no notification
        return found

    async def states(self) -> dict[str, str]:
        status = await self.stub.Status(up.StatusRequest(), timeout=PATIENCE)
        return {s.job_id: up.JobState.Name(s.state).removeprefix("JOB_STATE_") for s in status.job_statuses}


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


async def workload(node: Node, job: str, *flags: str, group: str = "", size: int = SIZE) -> Process:
    assert node.agent is not None
    before = {s.job for s in (await node.status()).members}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("upstream_workload.py")),
        *("--agent", node.agent.address, "--job", job, "--group", group, "--bytes", str(size), *flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    node.processes.append(Process(process))
    await node.processes[-1].until("connected")
    if job not in before:
        await registered(node, job)
    return node.processes[-1]


async def registered(node: Node, job: str) -> None:
    """The upstream channel does not say when a registration is complete, so this looks."""
    async with asyncio.timeout(PATIENCE):
        while not any(m.job == job and m.connected for m in (await node.status()).members):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def app_channel(**fields: Any) -> up.BackendConfig:
    return up.BackendConfig(app_channel=up.AppChannelConfig(**fields))


async def test_a_workload_goes_out_and_comes_back_with_true_figures(node: Node) -> None:
    await node.start(orchestrator=None)
    process, caller = await workload(node, "job-a"), Caller(node)
    assert await caller.states() == {"job-a": "RUNNING"}
    out = await caller.ended(await caller.snapshot("job-a"))
    assert out.status == up.OPERATION_STATUS_COMPLETE
    assert out.storage_bytes == pytest.approx(SIZE, rel=0.01)
    assert out.HasField("snapshot_device_bytes")
    assert out.snapshot_device_bytes < MIB
    assert await caller.states() == {"job-a": "SAVED"}
    back = await caller.ended(await caller.restore("job-a"))
    assert (back.status, back.storage_bytes) == (up.OPERATION_STATUS_COMPLETE, 0)
    assert back.snapshot_device_bytes == pytest.approx(SIZE, rel=0.01)
    assert (await process.until("restored"))["intact"]
    assert await caller.states() == {"job-a": "RUNNING"}


async def test_the_state_of_a_job_decides_what_may_be_asked(node: Node) -> None:
    await node.start(orchestrator=None)
    process, caller = await workload(node, "job-a", "--hold"), Caller(node)
    running = await caller.ended(await caller.restore("job-a"))
    assert running.status == up.OPERATION_STATUS_COMPLETE, (
        "an operation like any other, not `already-running`"
    )
    first = await caller.snapshot("job-a")
    await process.until("told")
    assert (await caller.operation(first)).status == up.OPERATION_STATUS_PENDING
    assert await caller.states() == {"job-a": "TRANSITIONING"}
    assert await code_of(caller.snapshot("job-a")) is grpc.StatusCode.ABORTED
    assert await code_of(caller.restore("job-a")) is grpc.StatusCode.ABORTED
    process.tell("go")
    ended = await caller.ended(first)
    assert ended.status == up.OPERATION_STATUS_COMPLETE
    assert (await caller.operation(first)).elapsed_ms == ended.elapsed_ms
    assert await code_of(caller.snapshot("job-a")) is grpc.StatusCode.FAILED_PRECONDITION
    assert (await caller.ended(await caller.restore("job-a"))).status == up.OPERATION_STATUS_COMPLETE


CALL_FAILS: list[tuple[str, Any, grpc.StatusCode]] = [
    ("nobody", None, grpc.StatusCode.FAILED_PRECONDITION),
    ("", None, grpc.StatusCode.INVALID_ARGUMENT),
    ("job-a", up.BackendConfig(direct_memory={}), grpc.StatusCode.FAILED_PRECONDITION),
    ("job-a", up.BackendConfig(memory_regions={}), grpc.StatusCode.FAILED_PRECONDITION),
    ("job-a", app_channel(mode=7), grpc.StatusCode.INVALID_ARGUMENT),
    (
        "job-a",
        up.BackendConfig.FromString(b"\x9a\x06\x00"),
        grpc.StatusCode.NOT_FOUND,
    ),  # a field of its future
    ("shared", None, grpc.StatusCode.FAILED_PRECONDITION),
]


async def test_what_fails_the_call(node: Node) -> None:
    await node.start()
    await workload(node, "job-a", size=MIB)
    await node.workload("shared", group=GROUP, size=MIB)
    caller = Caller(node)
    for job, config, code in CALL_FAILS:
        assert await code_of(caller.snapshot(job, config)) is code, (job, config)
        assert await code_of(caller.restore(job, config)) is code, (job, config)
    assert await code_of(caller.operation("already-running")) is grpc.StatusCode.NOT_FOUND
    assert await caller.states() == {"job-a": "RUNNING", "shared": "RUNNING"}


OPERATION_FAILS: list[tuple[Any, str]] = [
    (app_channel(mode=up.SUSPEND_MODE_DISCARD), "discard"),
    (up.BackendConfig(app_endpoint={}), "app is not set"),
    (up.BackendConfig(app_endpoint={"app": up.APP_VLLM}), "no endpoints"),
]


@pytest.mark.parametrize(
    ("flag", "fails"),
    [
        ("--fail", [(None, "RuntimeError: no")]),
        ("--lie", [(None, "memory fell by")]),
        ("--late", OPERATION_FAILS),
    ],
)
async def test_what_fails_the_operation_leaves_the_job_running(
    node: Node, flag: str, fails: list[tuple[Any, str]]
) -> None:
    await node.start(orchestrator=None)
    process, caller = await workload(node, "job-a", "--late", "--modes", "1", flag), Caller(node)
    await process.do("fill")
    for config, words in fails:
        failed = await caller.ended(await caller.snapshot("job-a", config))
        assert failed.status == up.OPERATION_STATUS_FAILED
        assert words in failed.error
        assert not failed.HasField("storage_bytes")
        assert await caller.states() == {"job-a": "RUNNING"}
    process.tell("check")
    assert (await process.until("checked"))["intact"]


async def test_modes_and_tags_are_passed_on_and_defaults_resolved(node: Node) -> None:
    await node.start(orchestrator=None)
    flags = ("--modes", "1", "2", "--default-mode", "2")
    process, caller = await workload(node, "job-a", *flags, size=MIB), Caller(node)
    await caller.ended(await caller.snapshot("job-a"))
    assert (await process.until("told"))["mode"] == up.SUSPEND_MODE_DISCARD
    await caller.ended(await caller.restore("job-a", app_channel(tags=["weights"])))
    assert (await process.until("restored"))["tags"] == ["weights"]
    config = app_channel(mode=up.SUSPEND_MODE_OFFLOAD, tags=["kv_cache"])
    await caller.ended(await caller.snapshot("job-a", config))
    told = await process.until("told")
    assert (told["mode"], told["tags"]) == (up.SUSPEND_MODE_OFFLOAD, ["kv_cache"])


async def test_a_broken_stream_fails_the_operation_and_what_had_left_goes_back(node: Node) -> None:
    await node.start(orchestrator=None)
    process, caller = await workload(node, "job-a", "--hold"), Caller(node)
    operation = await caller.snapshot("job-a")
    await process.until("told")
    process.tell("drop")
    failed = await caller.ended(operation)
    assert failed.status == up.OPERATION_STATUS_FAILED
    assert "stream broke" in failed.error
    assert await caller.states() == {"job-a": "TRANSITIONING"}
    process.tell("go")
    assert (await process.until("restored"))["intact"]
    async with asyncio.timeout(PATIENCE):
        while await caller.states() != {"job-a": "RUNNING"}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # upstream tells nobody of a state


async def test_an_operation_whose_caller_went_away_as_it_began_is_carried_out(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was saved and not begun: the next agent would have moved the job, long after."""
    made: list[UpstreamService] = []
    begun, go_on, save = asyncio.Event(), asyncio.Event(), Operations.save

    class Kept(UpstreamService):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    async def slow(operations: Operations, operation: Operation) -> None:
        begun.set()
        await go_on.wait()
        await save(operations, operation)

    monkeypatch.setattr("coslice.agent.app.UpstreamService", Kept)
    monkeypatch.setattr(Operations, "save", slow)
    await node.start(orchestrator=None)
    await workload(node, "job-a")
    (service,) = made
    call = asyncio.create_task(service.moves.start(Order(kind="snapshot", job="job-a"), fault=""))
    await begun.wait()
    call.cancel()
    await asyncio.wait((call,))
    go_on.set()
    caller = Caller(node)
    async with asyncio.timeout(PATIENCE):
        while await caller.states() != {"job-a": "SAVED"}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # upstream tells nobody of a state


async def test_a_stream_that_breaks_in_a_restore_is_settled_by_the_memory_of_its_process(node: Node) -> None:
    await node.start(orchestrator=None)
    process, caller = await workload(node, "job-a", "--hold-back"), Caller(node)
    await caller.ended(await caller.snapshot("job-a"))
    operation = await caller.restore("job-a")
    await process.until("back")
    process.tell("drop")
    assert (await caller.ended(operation)).status == up.OPERATION_STATUS_FAILED
    process.tell("go")
    async with asyncio.timeout(PATIENCE):
        while await caller.states() != {"job-a": "RUNNING"}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # upstream tells nobody of a state
    process.tell("check")
    assert (await process.until("checked"))["intact"], "it ends itself at a second restore"


@pytest.mark.parametrize(
    ("freed", "rose", "place"),
    [
        (SIZE, SIZE, Place.HERE),
        (SIZE, SIZE // 2, Place.HERE),
        (SIZE, 0, Place.AWAY),
        (SIZE, SIZE // 4, Place.UNSURE),
        (MIB, MIB, Place.UNSURE),
    ],
)
def test_memory_tells_of_a_restore_what_it_can(freed: int, rose: int, place: Place) -> None:
    entry = Entry(group="", job="a", pid=1, started=1, place=Place.RETURNING, before=5 * MIB, freed=freed)
    assert judged(entry, 5 * MIB + rose) is place


async def test_an_answer_that_comes_too_late_brings_the_state_back(node: Node) -> None:
    """The operation has failed by then: the job runs on as it was."""
    await node.start(orchestrator=None, move_timeout=0.5)
    process, caller = await workload(node, "job-a", "--hold"), Caller(node)
    failed = await caller.ended(await caller.snapshot("job-a"))
    assert failed.status == up.OPERATION_STATUS_FAILED
    assert "did not answer within" in failed.error
    assert await caller.states() == {"job-a": "FAULTED"}
    process.tell("go")
    assert (await process.until("restored"))["intact"]
    async with asyncio.timeout(PATIENCE):
        while await caller.states() != {"job-a": "RUNNING"}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # upstream tells nobody of a state


async def test_the_process_is_known_and_its_end_ends_the_job(node: Node) -> None:
    await node.start(orchestrator=None)
    process, caller = await workload(node, "job-a", size=MIB), Caller(node)
    (member,) = (await node.status()).members
    assert member.pid == process.pid
    process.process.kill()
    await process.ended()
    async with asyncio.timeout(PATIENCE):
        while await caller.states():  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # upstream tells nobody of a state
    await workload(node, "job-a", size=MIB)
    assert await caller.states() == {"job-a": "RUNNING"}, "the same name starts afresh"


async def test_native_and_upstream_callers_move_the_same_jobs(node: Node) -> None:
    await node.start(orchestrator=None)
    await workload(node, "theirs")
    await node.workload("ours", group="", size=SIZE)
    caller = Caller(node)
    async with AsyncAgentClient(node.agent.address) as client:
        out = await client.snapshot_and_wait("theirs")
        assert out.bytes == pytest.approx(SIZE, rel=0.01)
        assert (await caller.ended(await caller.snapshot("ours"))).storage_bytes == SIZE
        assert await caller.states() == {"ours": "SAVED", "theirs": "SAVED"}
        await client.restore_and_wait("ours")
        assert (await caller.ended(await caller.restore("theirs"))).status == up.OPERATION_STATUS_COMPLETE
        assert {job.state for job in (await client.status()).jobs.values()} == {"live"}


async def test_both_kinds_at_once_on_one_job_never_move_it_twice(node: Node) -> None:
    """The workload ends itself at a snapshot of what is away already."""
    await node.start(orchestrator=None)
    await workload(node, "job-a", size=MIB)
    callers = [Caller(node) for _ in range(3)]
    refused = set[grpc.StatusCode]()

    async def upstream(caller: Caller, turn: int) -> None:
        call = caller.snapshot if turn % 2 else caller.restore
        try:
            await caller.ended(await call("job-a"))
        except grpc.aio.AioRpcError as error:
            refused.add(error.code())

    async with AsyncAgentClient(node.agent.address) as client:

        async def native(turn: int) -> None:
            await (client.snapshot_and_wait if turn % 2 else client.restore_and_wait)("job-a")

        for turn in range(10):
            await asyncio.gather(*(upstream(c, turn + i) for i, c in enumerate(callers)), native(turn))
        await client.restore_and_wait("job-a")
    assert refused <= {grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION}
    assert await callers[0].states() == {"job-a": "RUNNING"}
    assert node.processes[-1].process.returncode is None


async def test_a_workload_of_an_orchestrated_group_is_moved_when_the_lock_changes_hands(node: Node) -> None:
    await node.start()
    process = await workload(node, "theirs", group=GROUP)
    await node.orchestrator.make_resident(GROUP, "theirs", 1)
    out = (await node.orchestrator.make_resident(GROUP, "ours", 2)).done
    assert contexts(out.residency) == {"theirs": "SAVED"}
    back = (await node.orchestrator.make_resident(GROUP, "theirs", 3)).done
    assert back.restored
    assert back.bytes_in == pytest.approx(SIZE, rel=0.01)
    assert (await process.until("restored"))["intact"]


async def test_a_saved_workload_of_a_group_is_restored_after_a_restart_of_the_agent(node: Node) -> None:
    await node.start()
    process = await workload(node, "job-a", group=GROUP)
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    await node.orchestrator.make_resident(GROUP, "job-b", 2)
    address = node.agent.address
    await node.agent.stop()
    await node.run_again(listen=address)
    assert (await node.orchestrator.make_resident(GROUP, "job-a", 3)).done.restored
    assert (await process.until("restored"))["intact"]


async def test_health_knows_the_backends_by_upstreams_names(node: Node) -> None:
    await node.start(orchestrator=None)
    async with grpc.aio.insecure_channel(node.agent.address) as channel:
        check: Any = health_pb2_grpc.HealthStub(channel).Check
        found = {
            name: (await check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE)).status
            for name in ("", "app-channel", "app-endpoint", "cuda", "noop", "tpu")
        }
        unknown = check(health_pb2.HealthCheckRequest(service="memory-regions"), timeout=PATIENCE)
        assert await code_of(unknown) is grpc.StatusCode.NOT_FOUND
    yes, no = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert found == {"": yes, "app-channel": yes, "app-endpoint": yes, "cuda": no, "noop": no, "tpu": no}


# ── processes that are named ───────────────────────────────────────────────


@pytest.mark.parametrize("pid", [1, os.getpid(), os.getppid()], ids=["first", "own", "parent"])
async def test_processes_of_the_machine_and_of_the_agent_are_never_moved(node: Node, pid: int) -> None:
    await node.start(orchestrator=None)
    config = up.BackendConfig(cuda={"explicit_target": {"pids": [pid]}})
    assert await code_of(Caller(node).snapshot("job-a", config)) is grpc.StatusCode.PERMISSION_DENIED
    assert not (await node.status()).members


async def test_processes_of_an_orchestrated_job_cannot_be_named(node: Node) -> None:
    await node.start()
    process = await node.workload("shared", group=GROUP, size=MIB)
    config = up.BackendConfig(cuda={"explicit_target": {"pids": [process.pid]}})
    caller = Caller(node)
    for job in ("shared", "other"):
        assert await code_of(caller.snapshot(job, config)) is grpc.StatusCode.FAILED_PRECONDITION
    assert [member.job for member in (await node.status()).members] == ["shared"]
