"""The client for services that schedule themselves, both kinds of it."""

import asyncio
from typing import Any

import pytest
from agent.conftest import GROUP, MIB, Node

from coslice import errors
from coslice.agent.client import AgentClient, AgentUnreachable, AsyncAgentClient

SIZE = 8 * MIB


class Either:
    """Both clients behind one face: the blocking one in a thread."""

    def __init__(self, kind: str, address: str) -> None:
        self.client: Any = AsyncAgentClient(address) if kind == "async" else AgentClient(address)

    async def do(self, method: str, *args: Any, **named: Any) -> Any:
        call = getattr(self.client, method)
        if isinstance(self.client, AsyncAgentClient):
            return await call(*args, **named)
        return await asyncio.to_thread(call, *args, **named)


@pytest.fixture(params=["blocking", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_state_goes_out_and_comes_back_and_the_status_says_where_it_is(node: Node, kind: str) -> None:
    agent = await node.start(orchestrator=None)
    await node.workload("tenant", group="", size=SIZE)
    either = Either(kind, agent.address)
    out = await either.do("snapshot_and_wait", "tenant")
    assert (out.bytes, out.reason) == (SIZE, "")
    assert out.seconds > 0
    job = (await either.do("status")).jobs["tenant"]
    assert (job.state, job.bytes, job.pids) == ("saved", SIZE, (node.processes[0].pid,))
    back = await either.do("restore_and_wait", "tenant")
    assert (back.bytes, back.reason) == (SIZE, "")
    status = await either.do("status")
    assert (status.node, status.jobs["tenant"].state) == ("node-0", "live")
    await either.do("close")


async def test_of_several_callers_one_moves_and_the_others_hear_that_it_is_done(
    node: Node, kind: str
) -> None:
    agent = await node.start(orchestrator=None)
    await node.workload("tenant", "--slow", "0.2", group="", size=SIZE)
    either = [Either(kind, agent.address) for _ in range(3)]
    done = await asyncio.gather(*(each.do("snapshot_and_wait", "tenant") for each in either))
    assert sorted(moved.bytes for moved in done) == [0, 0, SIZE]
    assert [bool(moved.reason) for moved in done].count(True) == 2
    for each in either:
        await each.do("close")


@pytest.mark.parametrize(
    ("job", "named", "error"),
    [
        ("nobody", {}, errors.Refused),
        ("shared", {}, errors.Refused),
        ("", {}, errors.ConfigError),
        ("tenant", {"mode": "discard"}, errors.ConfigError),
        ("tenant", {"backend": "none-such"}, errors.ConfigError),
        ("tenant", {"pids": [1]}, errors.Denied),
        ("busy", {}, errors.StateBusy),
        ("large", {}, errors.NoRoom),
        ("liar", {}, errors.OperationFailed),
    ],
)
async def test_every_failure_is_an_error_of_ours(
    node: Node, kind: str, job: str, named: dict[str, Any], error: type[Exception]
) -> None:
    agent = await node.start(host=4 * SIZE)
    flags = {"busy": ("--busy", "9"), "liar": ("--lie",)}.get(job, ())
    group, size = GROUP if job == "shared" else "", 5 * SIZE if job == "large" else SIZE
    if job not in ("nobody", ""):
        await node.workload(job, *flags, group=group, size=size)
    either = Either(kind, agent.address)
    with pytest.raises(error) as raised:
        await either.do("snapshot_and_wait", job, **named)
    assert type(raised.value) is error
    await either.do("close")


async def test_an_agent_that_is_not_there_is_named(kind: str) -> None:
    either = Either(kind, "127.0.0.1:1")
    with pytest.raises(AgentUnreachable, match=r"127\.0\.0\.1:1: start one with"):
        await either.do("status")
    await either.do("close")
