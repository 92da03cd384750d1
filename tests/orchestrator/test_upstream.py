"""Callers of llm-d's wire, alone and beside native clients, on the same locks."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from orchestrator.world import World

from coslice.orchestrator import upstream
from coslice.orchestrator.config import GroupConfig
from coslice.store.memory import MemoryStore
from coslice.testing.fake_agent import failing, gated
from coslice.testing.stores import disk_full
from coslice.wire.upstream import timeslice_orchestrator_pb2 as up
from coslice.wire.upstream.timeslice_orchestrator_pb2_grpc import TimeSliceOrchestratorServiceStub
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1.coslice_pb2_grpc import OrchestratorStub

BOUND = 30.0
State = up.GroupStatus


class Caller:
    """What an unmodified client does: one insecure channel, unary calls, no metadata."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address)
        self._stub: Any = TimeSliceOrchestratorServiceStub(self.channel)

    async def acquire(
        self, job: str, group: str = "pool", timeout: float | None = BOUND
    ) -> up.AcquireResponse:
        request = up.AcquireRequest(job_id=job, group_id=group)
        return await self._stub.Acquire(request, timeout=timeout, wait_for_ready=True)

    async def give(self, job: str, group: str = "pool") -> up.YieldResponse:
        return await self._stub.Yield(up.YieldRequest(job_id=job, group_id=group), timeout=BOUND)

    async def groups(self) -> list[str]:
        return list((await self._stub.ListGroups(up.ListGroupsRequest(), timeout=BOUND)).group_ids)

    async def status(self, group: str = "pool") -> up.GetGroupStatusResponse:
        return await self._stub.GetGroupStatus(up.GetGroupStatusRequest(group_id=group), timeout=BOUND)


@pytest.fixture
async def callers() -> AsyncIterator[list[Caller]]:
    made: list[Caller] = []
    yield made
    for caller in made:
        await caller.channel.close()


async def started(world: World, callers: list[Caller], *, agent: dict[str, Any] | None = None, **config: Any):
    await world.start(**config)
    callers.append(Caller(world.app.address))
    return callers[0], await world.agent(**(agent or {}))


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


async def test_a_turn_and_what_the_status_says_of_it(world: World, callers: list[Caller]) -> None:
    up_, _ = await started(world, callers, agent={"states": {"job-a": 100}})
    assert await up_.groups() == ["pool"]
    assert (await up_.status()).group.group_state == State.STATE_IDLE
    granted = await up_.acquire("job-a")
    assert granted.success
    assert not granted.context_restored, "nothing was saved, so nothing was restored"
    held = (await up_.status()).group
    assert (held.group_state, held.locking_job, held.active_job, held.loaded_job) == (
        State.STATE_LOCKED,
        "job-a",
        "job-a",
        "job-a",
    )
    assert held.HasField("state_timestamp")
    given = await up_.give("job-a")
    assert (given.success, given.pending_waiters, given.snapshot_deferred) == (True, 0, True)
    rest = (await up_.status()).group
    assert (rest.group_state, rest.locking_job, rest.active_job) == (State.STATE_IDLE_YIELDED, "", "job-a")


async def test_context_restored_and_the_agents_states_are_true(world: World, callers: list[Caller]) -> None:
    up_, agent = await started(world, callers, agent={"states": {"job-a": 100, "job-b": 100}})
    for job in ("job-a", "job-b"):
        await up_.acquire(job)
        agent.load("pool", job, 100)
        await up_.give(job)
    back = await up_.acquire("job-a")
    assert back.context_restored
    states = {s.job_id: s.job_state for s in (await up_.status()).agent_job_states}
    names = up.SnapshotAgentJobState
    assert states == {"job-a": names.STATE_RUNNING, "job-b": names.STATE_SAVED}


async def test_both_kinds_of_client_wait_in_one_queue(world: World, callers: list[Caller]) -> None:
    up_, _ = await started(world, callers)
    native = await world.client("native")
    held = await native.acquire("pool")
    first = asyncio.create_task(up_.acquire("job-a"))
    await native.until("pool", lambda group: len(group.waiters) == 1)
    again = await world.client("other")
    wants = await again.ask("pool")
    await native.until("pool", lambda group: len(group.waiters) == 2)
    last = asyncio.create_task(up_.acquire("job-z"))
    await native.until("pool", lambda group: len(group.waiters) == 3)
    await native.yielded(held)
    assert (await first).success
    assert not again.answered(wants)
    given = await up_.give("job-a")
    assert (given.pending_waiters, given.snapshot_deferred) == (2, False)
    await again.yielded(await again.granted(wants))
    assert (await last).success


async def test_only_the_holder_may_yield_and_a_free_lock_may_be_yielded_by_anybody(
    world: World, callers: list[Caller]
) -> None:
    up_, _ = await started(world, callers)
    assert (await up_.give("nobody")).success
    await up_.acquire("job-a")
    assert await code_of(up_.give("job-b")) is grpc.StatusCode.PERMISSION_DENIED
    queued = asyncio.create_task(up_.acquire("job-b"))
    watcher = await world.client("watcher")
    await watcher.until("pool", lambda group: len(group.waiters) == 1)
    assert await code_of(up_.give("job-b")) is grpc.StatusCode.PERMISSION_DENIED
    now = (await up_.status()).group
    assert (now.locking_job, now.waiter_queue_depth) == ("job-a", 1)
    await up_.give("job-a")
    assert await code_of(up_.give("job-a")) is grpc.StatusCode.PERMISSION_DENIED, "job-b has it by now"
    assert (await queued).success
    await up_.give("job-b")
    assert (await up_.give("job-b")).success, "a retry of a yield whose answer was lost"


async def test_a_swap_is_told_and_a_call_that_ends_in_it_leaves_nothing(
    world: World, callers: list[Caller]
) -> None:
    gate = asyncio.Event()
    states = {"job-a": 100, "job-b": 100}
    up_, agent = await started(world, callers, agent={"states": states, "behaviour": gated(gate)})
    watcher = await world.client("watcher")
    await up_.acquire("job-a")
    agent.load("pool", "job-a", 100)
    await up_.give("job-a")
    call = asyncio.create_task(up_.acquire("job-b"))
    await watcher.until("pool", lambda group: group.state == "swapping")
    now = (await up_.status()).group
    assert (now.group_state, now.locking_job, now.active_job, now.loaded_job) == (
        State.STATE_SWITCHING,
        "job-b",
        "job-b",
        "",
    )
    assert (await up_.give("job-b")).success
    assert not call.done(), "it waits for what is moved, whoever yields meanwhile"
    call.cancel()
    await asyncio.wait([call])
    gate.set()
    await watcher.until("pool", lambda group: group.state in ("empty", "resident"))
    assert (await up_.acquire("job-a")).success


async def test_how_long_it_waited_is_told(world: World, callers: list[Caller]) -> None:
    up_, _ = await started(world, callers)
    await up_.acquire("job-a")
    waiting = asyncio.create_task(up_.acquire("job-b"))
    watcher = await world.client("watcher")
    await watcher.until("pool", lambda group: len(group.waiters) == 1)
    began = time.monotonic()
    while time.monotonic() < began + 0.05:  # this is what is to be told: time passes, and nothing tells of it
        await up_.status()
    await up_.give("job-a")
    assert (await waiting).waited_ms >= 50


async def test_a_group_without_nodes_and_one_that_goes_away(world: World, callers: list[Caller]) -> None:
    await world.start(groups=(GroupConfig(id="bare"),))
    callers.append(Caller(world.app.address))
    up_, watcher = callers[0], await world.client("watcher")
    assert await code_of(up_.acquire("job-a", "bare")) is grpc.StatusCode.UNAVAILABLE
    await world.agent()
    await up_.acquire("job-a")
    waiting = asyncio.create_task(up_.acquire("job-b"))
    await watcher.until("pool", lambda group: len(group.waiters) == 1)
    await watcher.stub.DeleteGroup(pb.DeleteGroupRequest(group="pool", reason="moved"))
    assert await code_of(waiting) is grpc.StatusCode.INTERNAL
    assert await code_of(up_.give("job-a")) is grpc.StatusCode.NOT_FOUND
    assert await up_.groups() == ["bare"]


async def test_a_grant_waits_for_no_confirmation(world: World, callers: list[Caller]) -> None:
    up_, _ = await started(world, callers, confirm_timeout=0.05)
    await up_.acquire("job-a")
    await asyncio.sleep(0.3)  # six times the time to confirm
    assert (await up_.status()).group.locking_job == "job-a"
    await up_.give("job-a")
    await up_.acquire("job-b")


async def test_a_store_that_fails_ends_the_call_and_grants_nothing(
    world: World, callers: list[Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    up_, _ = await started(world, callers)

    async def fail(self: MemoryStore, key: str, value: bytes, *, expect: int) -> int:
        raise disk_full()

    monkeypatch.setattr(MemoryStore, "save", fail)
    assert await code_of(up_.acquire("job-a")) is grpc.StatusCode.INTERNAL


async def test_ids_that_are_empty_or_unknown(world: World, callers: list[Caller]) -> None:
    up_, _ = await started(world, callers)
    assert await code_of(up_.acquire("", "pool")) is grpc.StatusCode.INVALID_ARGUMENT
    assert await code_of(up_.acquire("job-a", "")) is grpc.StatusCode.INVALID_ARGUMENT
    assert await code_of(up_.acquire("job-a", "nowhere")) is grpc.StatusCode.NOT_FOUND
    assert await code_of(up_.give("job-a", "nowhere")) is grpc.StatusCode.NOT_FOUND
    assert await code_of(up_.status("nowhere")) is grpc.StatusCode.NOT_FOUND
    assert (await up_.status()).group.group_state == State.STATE_IDLE


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
async def test_a_call_that_ends_early_leaves_no_ghost(world: World, callers: list[Caller], how: str) -> None:
    up_, _ = await started(world, callers)
    watcher = await world.client("watcher")
    await up_.acquire("job-a")
    call = asyncio.create_task(up_.acquire("job-b", timeout=BOUND if how == "cancelled" else 1.0))
    await watcher.until("pool", lambda group: [w.job for w in group.waiters] == ["job-b"])
    if how == "cancelled":
        call.cancel()
    await asyncio.wait([call])
    await watcher.until("pool", lambda group: not group.waiters)
    await up_.give("job-a")
    assert (await up_.acquire("job-c")).success
    status = await watcher.group("pool")
    assert {job.job for job in status.jobs} == {"job-c"}, "nothing of the others is kept"


async def test_a_grant_whose_answer_would_come_too_late_is_taken_back(
    world: World, callers: list[Caller], store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    up_, _ = await started(world, callers, store=store)
    await up_.acquire("job-b")
    monkeypatch.setattr(upstream, "NEAR", BOUND)  # every grant is so near to its deadline
    monkeypatch.setattr(upstream, "SHARE", 1.0)
    assert await code_of(up_.acquire("job-b")) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await up_.status()).group.locking_job == "job-b", "it has it by an earlier call"
    late = asyncio.create_task(up_.acquire("job-a"))
    watcher = await world.client("watcher")
    await watcher.until("pool", lambda group: len(group.waiters) == 1)
    await up_.give("job-b")
    assert await code_of(late) is grpc.StatusCode.DEADLINE_EXCEEDED
    await watcher.until("pool", lambda group: not group.jobs)  # its name is free for a client with a session
    assert (await up_.status()).group.locking_job == ""
    assert (await up_.acquire("job-a", timeout=None)).success


async def test_two_processes_of_a_job_are_one_entry_and_one_yield_ends_it(
    world: World, callers: list[Caller]
) -> None:
    up_, _ = await started(world, callers)
    watcher = await world.client("watcher")
    await up_.acquire("job-a")
    calls = [asyncio.create_task(up_.acquire("job-b")) for _ in range(2)]
    await watcher.until("pool", lambda group: len(group.waiters) == 1)
    await up_.give("job-a")
    assert all(answer.success for answer in await asyncio.gather(*calls))
    assert (await up_.acquire("job-b")).success, "a holder that asks again has it"
    await up_.give("job-b")
    assert (await up_.status()).group.locking_job == ""


async def test_a_name_that_was_claimed_with_a_token_is_not_for_those_without(
    world: World, callers: list[Caller]
) -> None:
    up_, _ = await started(world, callers)
    native = await world.client("job-a")
    held = await native.acquire("pool")
    assert await code_of(up_.acquire("job-a")) is grpc.StatusCode.PERMISSION_DENIED
    assert await code_of(up_.give("job-a")) is grpc.StatusCode.PERMISSION_DENIED
    await native.yielded(held)


async def test_a_job_whose_swap_failed_is_unavailable_and_the_next_is_served(
    world: World, callers: list[Caller]
) -> None:
    up_, _ = await started(world, callers, agent={"behaviour": failing(culprit="job-b", times=1)})
    await up_.acquire("job-a")
    await up_.give("job-a")
    assert await code_of(up_.acquire("job-b")) is grpc.StatusCode.UNAVAILABLE
    assert (await up_.acquire("job-a")).success


async def test_a_lease_outlives_a_restart_and_is_yielded_to_the_successor(
    world: World, callers: list[Caller], store: str
) -> None:
    up_, _ = await started(world, callers, store=store, session_grace=0.2)
    await up_.acquire("job-a")
    waiting = asyncio.create_task(up_.acquire("job-b"))
    watcher = await world.client("watcher")
    await watcher.until("pool", lambda group: len(group.waiters) == 1)
    await world.restart()
    assert await code_of(waiting) is grpc.StatusCode.UNAVAILABLE
    await world.agent(node="n1", groups=("other",))  # somebody is served: the successor is up
    again = asyncio.create_task(up_.acquire("job-b"))
    await watcher.ended.wait()
    await watcher.connect()
    await watcher.until("pool", lambda group: len(group.waiters) == 1)
    await asyncio.sleep(0.5)  # longer than the grace, which is not for callers without a stream
    assert (await watcher.group("pool")).job == "job-a"
    assert not again.done()
    assert (await up_.give("job-a")).pending_waiters == 1
    assert (await again).success


async def test_who_calls_again_after_a_restart_has_its_place(
    world: World, callers: list[Caller], store: str
) -> None:
    up_, _ = await started(world, callers, store=store)
    await up_.acquire("job-a")
    watcher = await world.client("watcher")
    waiting = []
    for number, job in enumerate(("job-b", "job-c"), start=1):
        waiting.append(asyncio.create_task(up_.acquire(job)))
        await watcher.until("pool", lambda group, number=number: len(group.waiters) == number)
    await world.restart()
    for call in waiting:
        assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
    await world.agent(node="n1", groups=("other",))  # somebody is served: the successor is up
    last = asyncio.create_task(up_.acquire("job-c"))
    assert (await up_.status()).group.waiter_queue_depth == 2
    first = asyncio.create_task(up_.acquire("job-b"))
    assert (await up_.status()).group.waiter_queue_depth == 2
    await up_.give("job-a")
    assert (await first).success
    assert not last.done()
    await up_.give("job-b")
    assert (await last).success


async def test_the_end_of_a_jobs_last_process_ends_its_lease(world: World, callers: list[Caller]) -> None:
    await world.start()
    up_ = Caller(world.app.address)
    callers.append(up_)
    async with grpc.aio.insecure_channel(world.app.address) as channel:
        stream = OrchestratorStub(channel).Attach(wait_for_ready=True)
        offer = pb.GroupOffer(group="pool", residency=pb.Residency(group="pool", version=1))
        await stream.write(pb.AgentMessage(hello=pb.AgentHello(node="n0", groups=[offer], instance="one")))
        assert (await stream.read()).HasField("welcome")
        await up_.acquire("job-a")
        alive = pb.Context(job="job-a", state=pb.LIVE, bytes=1, pids=[41])
        for version, contexts in ((2, [alive]), (3, [])):
            residency = pb.Residency(group="pool", version=version, contexts=contexts)
            await stream.write(pb.AgentMessage(residency=residency))
        await stream.write(pb.AgentMessage(echo=pb.Echo(number=1)))
        while not (await stream.read()).HasField("echo"):
            pass
        watcher = await world.client("watcher")
        await watcher.until("pool", lambda group: group.state != "held")
        stream.cancel()


async def test_groups_may_be_taken_in_any_order_as_upstream_allows(
    world: World, callers: list[Caller]
) -> None:
    await world.start()
    await world.agent(groups=("pool", "alpha"))
    up_ = Caller(world.app.address)
    callers.append(up_)
    await up_.acquire("job-a", "pool")
    assert (await up_.acquire("job-a", "alpha")).success


async def test_a_holder_that_asks_again_and_hangs_up_keeps_what_it_has(
    world: World, callers: list[Caller], monkeypatch: pytest.MonkeyPatch
) -> None:
    up_, _ = await started(world, callers)
    await up_.acquire("job-a")
    saving, gate, save = asyncio.Event(), asyncio.Event(), MemoryStore.save

    async def wait(self: MemoryStore, key: str, value: bytes, *, expect: int) -> int:
        saving.set()
        await gate.wait()
        return await save(self, key, value, expect=expect)

    monkeypatch.setattr(MemoryStore, "save", wait)
    call = asyncio.create_task(up_.acquire("job-a"))
    await saving.wait()
    call.cancel()
    await asyncio.wait([call])
    gate.set()
    other = asyncio.create_task(up_.acquire("job-b"))
    watcher = await world.client("watcher")
    await watcher.until("pool", lambda group: [w.job for w in group.waiters] == ["job-b"])
    assert (await up_.status()).group.locking_job == "job-a"
    await up_.give("job-a")
    assert (await other).success
