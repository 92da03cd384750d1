"""The workload channel of llm-d's protocol: its own rules, who takes it over, and what keeps it open."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from agent.conftest import MIB, PATIENCE, Node
from agent.test_upstream import Caller, registered, workload

from coslice.wire.upstream import snapshot_agent_pb2 as up
from coslice.wire.upstream.snapshot_agent_pb2_grpc import SnapshotAgentServiceStub


async def stream(node: Node, *messages: up.WorkloadMessage, half_close: bool = False) -> Any:
    channel = grpc.aio.insecure_channel(node.agent.address)
    call = SnapshotAgentServiceStub(channel).WorkloadChannel()
    for message in messages:
        await call.write(message)
    if half_close:
        await call.done_writing()
    return call


def register(job: str, group: str = "") -> up.WorkloadMessage:
    return up.WorkloadMessage(register=up.RegisterWorkload(job_id=job, group=group))


RESULT = up.WorkloadMessage(result=up.CommandResult(command_id="x", ok=True))


@pytest.mark.parametrize(
    "messages", [[RESULT], [register("")], [register("a"), register("a")], [register("a", "elsewhere")]]
)
async def test_a_channel_that_breaks_the_rules_is_invalid(node: Node, messages: list[Any]) -> None:
    await node.start()
    async with asyncio.timeout(PATIENCE):
        assert await (await stream(node, *messages)).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_silence_is_invalid(node: Node) -> None:
    await node.start(orchestrator=None, hello_timeout=0.2)
    async with asyncio.timeout(PATIENCE):
        assert await (await stream(node)).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await (await stream(node, half_close=True)).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_half_close_is_a_good_end(node: Node) -> None:
    await node.start(orchestrator=None)
    async with asyncio.timeout(PATIENCE):
        open_ = await stream(node, register("job-a"), RESULT)
        await registered(node, "job-a")
        await open_.done_writing()
        assert await open_.code() is grpc.StatusCode.OK


async def test_a_second_channel_of_a_process_takes_over_and_fails_what_was_under_way(node: Node) -> None:
    await node.start(orchestrator=None)
    caller, old = Caller(node), await stream(node, register("job-a"))
    await registered(node, "job-a")
    operation = await caller.snapshot("job-a")
    command = await old.read()
    assert command.HasField("snapshot")
    new = await stream(node, register("job-a"))
    async with asyncio.timeout(PATIENCE):
        assert await old.read() is grpc.aio.EOF
    assert (await caller.ended(operation)).status == up.OPERATION_STATUS_FAILED
    back = await new.read()  # nobody knows where its state is: that settles it
    assert back.HasField("restore")
    await new.write(RESULT)
    await new.write(up.WorkloadMessage(result=up.CommandResult(command_id=back.command_id, ok=True)))
    async with asyncio.timeout(PATIENCE):
        while await caller.states() != {"job-a": "RUNNING"}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # upstream tells nobody of a state


async def test_another_process_cannot_push_a_workload_off_its_channel(node: Node) -> None:
    await node.start(orchestrator=None)
    process = await workload(node, "job-a", size=MIB)
    await stream(node, register("job-a"))
    caller = Caller(node)
    async with asyncio.timeout(PATIENCE):
        while len((await node.status()).members) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # nor of a registration
    assert all(member.connected for member in (await node.status()).members)
    operation = await caller.snapshot("job-a")
    await process.until("told")
    assert (await caller.operation(operation)).status == up.OPERATION_STATUS_PENDING, "both have to answer"


async def test_a_client_that_pings_eagerly_keeps_its_connection(node: Node) -> None:
    """The stream of a workload breaks with it, and a move that is under way."""
    await node.start(orchestrator=None)
    assert node.agent is not None
    ping, settings, goaway = 6, 4, 7

    def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + bytes(4) + payload

    host, port = node.agent.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answered = 0
    async with asyncio.timeout(PATIENCE):
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings))
        while answered < 10:
            writer.write(frame(ping, answered.to_bytes(8, "big")))
            kind = -1
            while kind != ping:
                head = await reader.readexactly(9)
                kind, body = head[3], await reader.readexactly(int.from_bytes(head[:3], "big"))
                assert kind != goaway, body
            answered += 1
    writer.close()
