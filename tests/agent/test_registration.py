"""Who may register, and what happens to those who leave and come back."""

import asyncio

import pytest
from agent.conftest import GROUP, MIB, PATIENCE, Node, contexts

from coslice.core.ids import GroupId


async def refusal(node: Node, *arguments: str, **options) -> dict:
    process = await node.workload(*arguments, wait=False, size=MIB, **options)
    return await process.until("refused")


async def test_an_unknown_group_is_refused_with_the_known_ones(node: Node) -> None:
    await node.start()
    said = await refusal(node, "job-a", group="nope")
    assert said["code"] == "UNKNOWN_GROUP"
    assert GROUP in said["message"]


async def test_a_malformed_name_is_refused(node: Node) -> None:
    await node.start()
    assert (await refusal(node, "job/a"))["code"] == "INVALID"


async def test_a_pid_with_another_start_time_is_refused(node: Node) -> None:
    await node.start()
    said = await refusal(node, "job-a", "--start-time", "1")
    assert said["code"] == "DENIED"
    assert "start time 1" in said["message"]


async def test_a_second_incarnation_of_a_running_job_is_refused_with_the_pid(node: Node) -> None:
    await node.start()
    first = await node.workload("job-a", "--incarnation", "one", size=MIB)
    said = await refusal(node, "job-a", "--incarnation", "two")
    assert said["code"] == "JOB_RUNNING"
    assert str(first.pid) in said["message"]
    first.process.kill()
    await first.ended()
    await node.workload("job-a", "--incarnation", "two", size=MIB)


async def test_more_state_than_the_device_has_is_refused(node: Node) -> None:
    await node.start(budget=40 * MIB)
    process = await node.workload("job-a", size=50 * MIB, wait=False)
    assert (await process.until("refused"))["code"] == "NO_ROOM"


async def test_a_process_that_lost_its_stream_comes_back_as_the_same_member(node: Node) -> None:
    await node.start()
    process = await node.workload("job-a")
    member = process.said[-1]["member"]
    await process.do("reconnect")
    assert (await process.until("registered"))["member"] == member
    assert (await node.orchestrator.make_resident(GROUP, "job-b", 1)).done.bytes_out == 100 * MIB


async def test_a_resized_state_is_measured_by_its_new_size(node: Node) -> None:
    await node.start(budget=200 * MIB)
    process = await node.workload("job-a", size=60 * MIB)
    await process.do(f"grow {40 * MIB}")
    await node.orchestrator.until(
        lambda m: m.HasField("residency") and [c.bytes for c in m.residency.contexts] == [100 * MIB]
    )
    assert (await node.orchestrator.make_resident(GROUP, "job-b", 1)).done.bytes_out == 100 * MIB


async def test_a_saved_job_survives_the_restart_of_the_agent(node: Node) -> None:
    first = await node.start()
    process = await node.workload("job-a")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    await node.orchestrator.make_resident(GROUP, "job-b", 2)
    assert node.config is not None
    listen = first.address
    await first.stop()
    await node.run_again(listen=listen)
    hello = await node.orchestrator.attached(times=2)
    assert hello.groups[0].epoch == 2
    assert contexts(hello.groups[0].residency) == {"job-a": "SAVED"}
    assert (await process.until("gave_back"))["ok"]
    back = (await node.orchestrator.make_resident(GROUP, "job-a", 3)).done
    assert (back.restored, back.bytes_in) == (True, 100 * MIB)
    assert (await process.until("moved_in"))["intact"]
    used = (await node.status()).members[0].device_bytes
    assert used == pytest.approx(100 * MIB, rel=0.05)


async def test_a_saved_job_whose_process_ended_meanwhile_is_gone_after_the_restart(node: Node) -> None:
    first = await node.start()
    process = await node.workload("job-a")
    await node.orchestrator.make_resident(GROUP, "job-b", 1)
    await first.stop()
    process.process.kill()
    await process.ended()
    await node.run_again(listen=first.address)
    assert (await node.orchestrator.make_resident(GROUP, "job-a", 2)).done.op
    assert not (await node.status()).members


async def test_the_agent_finds_its_orchestrator_again(node: Node) -> None:
    agent = await node.start()
    await node.workload("job-a")
    port = int(node.orchestrator.address.rpartition(":")[2])
    await node.orchestrator.stop()
    await node.orchestrator.start(port)
    hello = await node.orchestrator.attached(times=2)
    assert hello.instance == agent.instance
    assert contexts(hello.groups[0].residency) == {"job-a": "LIVE"}
    assert (await node.orchestrator.make_resident(GROUP, "job-a", 1)).done.op


async def test_two_groups_of_one_node_do_not_touch_each_other(node: Node) -> None:
    from coslice.agent.config import GroupDevices

    groups = tuple(
        GroupDevices(group=GroupId(name), device_budget=160 * MIB, cpus=(cpu,))
        for cpu, name in enumerate(("train", "sample"))
    )
    await node.start(groups=groups)
    trainer = await node.workload("job-a", group="train")
    sampler = await node.workload("job-a", group="sample")
    async with asyncio.timeout(PATIENCE):
        reports = await asyncio.gather(
            node.orchestrator.make_resident("train", "job-b", 1),
            node.orchestrator.make_resident("sample", "job-a", 1),
        )
    assert reports[0].done.bytes_out == 100 * MIB
    assert reports[1].done.bytes_out == 0
    await trainer.until("moved_out")
    await sampler.do("drop")
    assert not any(said["event"] == "moved_out" for said in sampler.said)
