"""Jobs take turns on one node: what moves, what is measured, what is reported."""

import pytest
from agent.conftest import GROUP, MIB, Node, contexts

from coslice.wire.v1 import coslice_pb2 as pb


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
    assert {m.job: m.host_bytes for m in status.members} == {"job-a": 100 * MIB, "job-b": 90 * MIB}
    assert agent.peak_device_bytes[GROUP] <= 160 * MIB


async def test_jobs_that_fit_together_stay_and_the_reason_has_the_figures(node: Node) -> None:
    await node.start(budget=260 * MIB)
    for job in ("job-a", "job-b"):
        await node.workload(job, "--need", str(110 * MIB), size=100 * MIB)
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    done = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).done
    assert (done.bytes_in, done.bytes_out, done.restored) == (0, 0, False)
    assert "both fit: " in done.reason
    assert "260 MiB" in done.reason
    assert contexts(done.residency) == {"job-a": "LIVE", "job-b": "LIVE"}


async def test_a_peak_between_two_reports_counts_as_need(node: Node) -> None:
    await node.start(budget=260 * MIB)
    first = await node.workload("job-a", size=60 * MIB)
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    await first.do(f"use {100 * MIB}")
    await node.sampled(GROUP, at_least=150 * MIB)
    await first.do("drop")
    await node.workload("job-b", size=120 * MIB)
    done = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).done
    assert done.bytes_out == 60 * MIB, done.reason


async def test_a_newcomer_of_unknown_need_is_set_aside_though_its_state_would_fit(node: Node) -> None:
    await node.start(budget=260 * MIB)
    await node.workload("job-a", size=100 * MIB)
    newcomer = await node.workload("job-b", size=100 * MIB)
    await newcomer.until("moved_out")
    await node.orchestrator.until(lambda m: contexts(m.residency) == {"job-a": "LIVE", "job-b": "SAVED"})


async def test_a_grant_waits_for_a_newcomer_that_is_being_set_aside(node: Node) -> None:
    """Registered and commanded at once: granted while its state leaves, it would run without it."""
    await node.start()
    await node.workload("job-a", size=100 * MIB)
    await node.workload("job-b", "--slow", "0.5", size=20 * MIB)
    report = await node.orchestrator.make_resident(GROUP, "job-b", 1)
    assert report.done.restored
    assert contexts(report.done.residency) == {"job-a": "SAVED", "job-b": "LIVE"}


async def test_a_newcomer_is_admitted_once_the_orchestrator_knows_that_it_was_set_aside(node: Node) -> None:
    """It may acquire next: by then a grant must not be given on older facts."""
    await node.start()
    resident = await node.workload("job-a", size=100 * MIB)
    await resident.until("admitted")
    node.orchestrator.deaf, before = True, len(node.orchestrator.reports)
    newcomer = await node.workload("job-b", size=20 * MIB)
    asked = await node.orchestrator.until(lambda m: m.HasField("echo"), since=before)
    told = node.orchestrator.reports[: node.orchestrator.reports.index(asked)]
    assert contexts(told[-1].residency) == {"job-a": "LIVE", "job-b": "SAVED"}
    assert all(said["event"] != "admitted" for said in newcomer.said)
    node.orchestrator.send(pb.AgentCommand(echo=asked.echo))
    await newcomer.until("admitted")


async def test_a_registration_does_not_wait_for_an_orchestrator_that_is_gone(node: Node) -> None:
    await node.start()
    node.orchestrator.deaf = True
    newcomer = await node.workload("job-a", size=20 * MIB)
    await node.orchestrator.until(lambda m: m.HasField("echo"))
    await node.orchestrator.stop()
    await newcomer.until("admitted")


async def test_a_newcomer_without_room_is_set_aside_and_restored_for_its_turn(node: Node) -> None:
    agent = await node.start(budget=160 * MIB)
    await node.workload("job-a", size=100 * MIB)
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    newcomer = await node.workload("job-b", size=100 * MIB)
    await newcomer.until("moved_out")
    done = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).done
    assert done.restored
    assert (done.bytes_in, done.bytes_out) == (100 * MIB, 100 * MIB)
    assert (await newcomer.until("moved_in"))["intact"]
    assert agent.peak_device_bytes[GROUP] <= 160 * MIB


async def test_a_job_of_two_processes_moves_as_one(node: Node) -> None:
    await node.start(budget=160 * MIB)
    ranks = [await node.workload("job-a", "--rank", str(rank), size=60 * MIB) for rank in range(2)]
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    out = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).done
    assert out.bytes_out == 120 * MIB
    back = (await node.orchestrator.make_resident(GROUP, "job-a", 3)).done
    assert back.bytes_in == 120 * MIB
    for rank in ranks:
        assert (await rank.until("moved_in"))["intact"]


async def test_a_repeated_command_is_answered_again_without_moving(node: Node) -> None:
    await node.start()
    await node.workload("job-a")
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    first = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).done
    again = (await node.orchestrator.make_resident(GROUP, "job-b", 2)).done
    assert (again.op, again.bytes_out) == (first.op, first.bytes_out)
    assert contexts(again.residency) == {"job-a": "SAVED"}


async def test_a_command_of_an_older_epoch_fails_and_changes_nothing(node: Node) -> None:
    await node.start()
    await node.workload("job-a")
    await node.orchestrator.make_resident(GROUP, "job-a", 7)
    stale = (await node.orchestrator.make_resident(GROUP, "job-b", 3)).failed
    assert "epoch 3" in stale.reason
    assert contexts(stale.residency) == {"job-a": "LIVE"}
