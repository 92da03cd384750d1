"""Jobs take turns on one node: what moves, what is measured, what is reported."""

import pytest
from agent.conftest import GROUP, MIB, Node

from coslice.wire.v1 import coslice_pb2 as pb


def contexts(residency: pb.Residency) -> dict[str, str]:
    return {context.job: pb.ContextState.Name(context.state) for context in residency.contexts}


async def test_the_first_job_leaves_when_the_second_is_wanted_and_comes_back_intact(node: Node) -> None:
    agent = await node.start(budget=160 * MIB)
    first = await node.workload("job-a", size=100 * MIB)
    assert (await node.orchestrator.make_resident(GROUP, "job-a", 1)).done.op
    second = await node.orchestrator.make_resident(GROUP, "job-b", 2)
    assert second.done.bytes_out == 100 * MIB
    assert not second.done.restored
    assert contexts(second.done.residency) == {"job-a": "SAVED"}
    await node.workload("job-b", size=90 * MIB)
    back = await node.orchestrator.make_resident(GROUP, "job-a", 3)
    assert back.done.restored
    assert (back.done.bytes_in, back.done.bytes_out) == (100 * MIB, 90 * MIB)
    assert (await first.until("moved_in"))["intact"]
    status = await node.status()
    used = {member.job: member.device_bytes for member in status.members}
    assert used["job-a"] == pytest.approx(100 * MIB, rel=0.05)
    assert used["job-b"] < 5 * MIB
    assert {member.job: member.host_bytes for member in status.members} == {
        "job-a": 100 * MIB,
        "job-b": 90 * MIB,
    }
    assert agent.peak_device_bytes[GROUP] <= 160 * MIB
