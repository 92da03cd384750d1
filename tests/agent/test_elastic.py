"""Real torch jobs exchange only what lacks, come in while the other leaves, and are the same afterwards."""

import asyncio
import os
from pathlib import Path

import pytest
from agent.conftest import GROUP, MIB, Node, Process, contexts
from forked import AsyncForked

from coslice.agent.members import Member
from coslice.wire.v1 import coslice_pb2 as pb

SCRIPT = Path(__file__).with_name("torch_workload.py")


async def torch_job(node: Node, name: str, size: int, *, need: int = 0) -> Process:
    assert node.agent is not None
    process = await AsyncForked.start(
        SCRIPT,
        *(name, GROUP, str(size), str(need)),
        env={**os.environ, "COSLICE_AGENT": node.agent.address, "COSLICE_INCARNATION": f"run-of-{name}"},
    )
    node.processes.append(Process(process))
    said = await node.processes[-1].until("registered")
    assert said["error"] == ""
    return node.processes[-1]


async def digest(job: Process) -> str:
    job.tell("digest")
    return str((await job.until("did", word="digest"))["digest"])


async def test_two_jobs_of_60_percent_exchange_what_lacks_and_keep_every_bit(node: Node) -> None:
    agent = await node.start(budget=200 * MIB)
    a = await torch_job(node, "job-a", 110, need=120)
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    before = {"job-a": await digest(a)}
    b = await torch_job(node, "job-b", 110, need=120)
    jobs = {"job-a": a, "job-b": b}
    first = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).done
    assert 40 * MIB <= first.bytes_out <= 42 * MIB, first.reason
    before["job-b"] = await digest(b)
    for epoch, name in enumerate(("job-a", "job-b") * 2, start=3):
        done = (await node.orchestrator.make_resident(GROUP, name, epoch)).done
        assert 40 * MIB <= done.bytes_out <= 42 * MIB, done.reason
        assert done.bytes_in <= 42 * MIB, done.reason
        assert done.restored
        other = "job-b" if name == "job-a" else "job-a"
        assert contexts(done.residency) == {name: "LIVE", other: "LEAVING"}
        assert await digest(jobs[name]) == before[name]
        await jobs[name].do("step")
        before[name] = await digest(jobs[name])
    assert agent.peak_device_bytes[GROUP] <= 200 * MIB

    c = await node.workload("job-c", size=MIB)  # of unknown need: what is left of the others leaves too
    assert c.said[-1].get("error", "") == ""
    done = (await node.orchestrator.make_resident(GROUP, "job-c", 20)).done
    assert contexts(done.residency) == {"job-a": "SAVED", "job-b": "SAVED", "job-c": "LIVE"}
    assert (await node.orchestrator.make_resident(GROUP, "job-a", 21)).done.restored
    assert await digest(a) == before["job-a"]


async def test_a_job_that_is_partly_there_outlives_the_agent(node: Node) -> None:
    agent = await node.start(budget=200 * MIB)
    a = await torch_job(node, "job-a", 110, need=120)
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    before = await digest(a)
    await torch_job(node, "job-b", 110, need=120)
    await node.orchestrator.make_resident(GROUP, "job-b", 2)
    await agent.stop()
    agent = await node.run_again(listen=agent.address)
    done = (await node.orchestrator.make_resident(GROUP, "job-a", 3)).done
    assert done.restored
    assert done.bytes_in <= 42 * MIB, done.reason
    assert await digest(a) == before


@pytest.fixture
def came_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes, as processes said."""
    seen = list[int]()
    came = Member.came_ahead

    def note(self: Member, said: pb.Ahead) -> None:
        seen.append(said.bytes)
        came(self, said)

    monkeypatch.setattr(Member, "came_ahead", note)
    return seen


async def test_the_next_job_comes_in_while_the_other_leaves(node: Node, came_ahead: list[int]) -> None:
    agent = await node.start(budget=160 * MIB)
    a = await torch_job(node, "job-a", 130)
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    before = await digest(a)
    b = await torch_job(node, "job-b", 130)  # set aside: the device is another's
    done = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).done
    assert (done.bytes_out, done.bytes_in) == (130 * MIB, 130 * MIB)
    assert max(came_ahead) >= 32 * MIB
    await b.do("step")
    back = (await node.orchestrator.make_resident(GROUP, "job-a", 3)).done
    assert back.restored
    assert await digest(a) == before
    assert agent.peak_device_bytes[GROUP] <= 160 * MIB


async def test_when_the_other_does_not_leave_what_came_goes_and_what_left_comes_back(
    node: Node, came_ahead: list[int]
) -> None:
    agent = await node.start(budget=160 * MIB, on_stuck="wait")
    a = await torch_job(node, "job-a", 130)
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    before = await digest(a)
    await torch_job(node, "job-b", 130)
    await a.do("break 6")
    failed = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).failed
    assert failed.culprit == "job-a"
    assert "broken by the test" in failed.reason
    assert max(came_ahead) > 0
    assert came_ahead[-1] == 0
    status = await node.status()
    held = {member.job: member.device_bytes for member in status.members}
    assert held["job-a"] >= 125 * MIB
    assert held["job-b"] <= 5 * MIB
    await a.do("mend")
    assert await digest(a) == before
    again = (await node.orchestrator.make_resident(GROUP, "job-b", 3)).done
    assert again.bytes_in == 130 * MIB
    assert agent.peak_device_bytes[GROUP] <= 160 * MIB


async def test_host_memory_is_ready_before_a_job_must_leave(node: Node) -> None:
    agent = await node.start(budget=100 * MIB)
    await torch_job(node, "job-a", 60)
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    assert [member.host_bytes for member in (await node.status()).members] == [0]
    await node.workload("job-b", size=60 * MIB)

    async def ready() -> bool:
        status = await node.status()
        mapped = next(member.host_bytes for member in status.members if member.job == "job-a")
        # Held is what job-b left, which was set aside; a file that grows counts too, and can be lent after.
        return mapped >= 60 * MIB and status.groups[0].host_held_bytes == 60 * MIB

    async with asyncio.timeout(30):
        while not await ready():  # noqa: ASYNC110  # nobody is told when a process has mapped it
            await asyncio.sleep(0.02)
    assert agent.peak_device_bytes[GROUP] <= 100 * MIB
