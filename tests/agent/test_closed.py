"""Processes that close their channel and live on, and who needs their room: real ones, of both protocols."""

import asyncio
import copy
import os
import signal
from collections.abc import Callable

import pytest
from agent.conftest import GROUP, MIB, PATIENCE, Node, Process, contexts
from agent.test_upstream import Caller, registered, workload

from coslice.agent import closed
from coslice.agent.closed import ClosedChannel, ClosedChannels
from coslice.agent.members import Member, MoveRefused
from coslice.agent.processes import stopped
from coslice.core.ids import GroupId
from coslice.wire.upstream import snapshot_agent_pb2 as up
from coslice.wire.v1 import coslice_pb2 as pb

SOON = 0.05
"""Of ``channel_grace``: nothing here dials again before it is told to."""
LIVES_ON = "it closed its channel to the agent and lives on, with"


async def seen(found: Callable[[], bool]) -> None:
    """For what the agent, or the kernel, tells nobody of."""
    async with asyncio.timeout(PATIENCE):
        while not found():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def member_of(node: Node, process: Process) -> Member:
    assert node.agent is not None
    (member,) = (m for m in node.agent.members if m.pid == process.pid)
    return member


async def loaded(node: Node, job: str, group: str = GROUP) -> Process:
    """Its state comes after it has registered: so it is told from what else the process has."""
    if group:
        await node.orchestrator.make_resident(group, job, 1)
    process = await workload(node, job, "--late", group=group)
    await process.do("fill")
    return process


async def close(node: Node, process: Process) -> None:
    """Returns when its grace is over."""
    member = member_of(node, process)
    await process.do("close")
    await seen(lambda: isinstance(member.channel, ClosedChannel))


async def test_who_stays_on_the_device_is_not_waited_for_but_ended(node: Node) -> None:
    await node.start(channel_grace=SOON, stuck_grace=0.1)
    process = await loaded(node, "theirs")
    await close(node, process)
    done = (await node.orchestrator.make_resident(GROUP, "ours", 2)).done
    assert await process.ended() == -signal.SIGKILL
    assert f"process {process.pid}: {LIVES_ON}" in done.residency.contexts[0].reason


async def test_who_gave_its_memory_back_lives_on_beside_the_next(node: Node) -> None:
    await node.start(channel_grace=SOON, on_stuck="wait")
    process = await loaded(node, "theirs")
    await close(node, process)
    failed = (await node.orchestrator.make_resident(GROUP, "ours", 2)).failed
    assert (failed.culprit, failed.stuck, failed.pid) == ("theirs", True, process.pid)
    assert LIVES_ON in failed.reason
    await process.do("free")
    done = (await node.orchestrator.make_resident(GROUP, "ours", 3)).done
    assert contexts(done.residency) == {"theirs": "SAVED"}
    back = (await node.orchestrator.make_resident(GROUP, "theirs", 4)).done
    assert contexts(back.residency) == {"theirs": "LIVE"}, "it took nothing out, so nothing is to come back"
    assert process.process.returncode is None


async def test_a_native_process_that_gave_its_memory_back_has_no_state_any_more(node: Node) -> None:
    await node.start(channel_grace=SOON, on_stuck="wait")
    process = await node.workload("ours")
    await node.orchestrator.make_resident(GROUP, "ours", 1)
    await close(node, process)
    failed = (await node.orchestrator.make_resident(GROUP, "theirs", 2)).failed
    assert LIVES_ON in failed.reason
    await process.do("free")
    done = (await node.orchestrator.make_resident(GROUP, "theirs", 3)).done
    assert contexts(done.residency) == {"ours": "SAVED"}
    (member,) = (await node.status()).members
    assert (member.state_bytes, member.connected) == (0, False)


@pytest.mark.parametrize("away", [0, MIB])
async def test_who_comes_back_with_new_state_while_the_device_is_anothers_is_set_aside(
    node: Node, away: int
) -> None:
    """As one that registers for the first time: nobody gets device memory by that or is ended for it."""
    await node.start(channel_grace=SOON, sample_interval=0.001)
    process = await node.workload("ours")
    await node.orchestrator.make_resident(GROUP, "ours", 1)
    await close(node, process)
    await process.do("free")
    await node.orchestrator.make_resident(GROUP, "theirs", 2)
    await node.workload("theirs")
    process.tell(f"open {away}")
    await process.until("admitted")
    states = contexts((await node.status()).groups[0])
    assert states == {"ours": "SAVED", "theirs": "LIVE"}
    back = (await node.orchestrator.make_resident(GROUP, "ours", 3)).done
    assert contexts(back.residency) == {"ours": "LIVE", "theirs": "SAVED"}
    assert (await process.until("moved_in"))["intact"]


async def test_who_closed_it_with_its_state_saved_gets_that_back_once_it_opens_another(node: Node) -> None:
    await node.start(channel_grace=SOON)
    process = await loaded(node, "theirs")
    await node.orchestrator.make_resident(GROUP, "ours", 2)
    await close(node, process)
    failed = (await node.orchestrator.make_resident(GROUP, "theirs", 3)).failed
    assert failed.culprit == "theirs"
    assert "while its state was saved" in failed.reason
    await process.do("open")
    await registered(node, "theirs")
    assert (await node.orchestrator.make_resident(GROUP, "theirs", 4)).done.restored
    assert (await process.until("restored"))["intact"]


async def test_who_is_waited_for_is_named_while_it_may_come_back(node: Node) -> None:
    await node.start()
    process = await loaded(node, "theirs")
    await process.do("close")
    await seen(lambda: member_of(node, process).lost)
    swap = asyncio.create_task(node.orchestrator.make_resident(GROUP, "ours", 2))
    told = await node.orchestrator.until(
        lambda m: any(c.job == "theirs" and c.reason for c in m.residency.contexts)
    )
    assert told.residency.contexts[0].reason == (
        f"process {process.pid} has closed its channel to the agent, or is to come back"
    )
    assert not swap.done()
    await process.do("open")
    assert contexts((await swap).done.residency) == {"theirs": "SAVED"}, "it was asked again, and did it"


async def test_an_operation_on_it_says_at_once_why_not(node: Node) -> None:
    await node.start(orchestrator=None, channel_grace=SOON)
    process, caller = await loaded(node, "theirs", group=""), Caller(node)
    await close(node, process)
    failed = await caller.ended(await caller.snapshot("theirs"))
    assert failed.status == up.OPERATION_STATUS_FAILED
    assert LIVES_ON in failed.error
    assert await caller.states() == {"theirs": "RUNNING"}


async def test_what_the_driver_does_not_tell_is_not_taken_for_nothing(node: Node) -> None:
    await node.start(orchestrator=None, channel_grace=SOON)
    process, caller = await node.workload("ours", "--device", "cuda", group=""), Caller(node)
    await close(node, process)
    failed = await caller.ended(await caller.snapshot("ours"))
    assert failed.status == up.OPERATION_STATUS_FAILED
    assert f"{LIVES_ON} nobody knows how much on the device" in failed.error


async def test_a_part_that_was_saved_is_not_said_to_be_back(node: Node) -> None:
    await node.start(orchestrator=None, channel_grace=SOON)
    process = await node.workload("ours", group="")
    await close(node, process)
    await process.do("free")
    member = member_of(node, process)
    member.away = MIB
    out, back = pb.MoveOut(op="o/out"), pb.MoveIn(op="o/in")
    await member.move(out.op, pb.WorkloadCommand(move_out=out), timeout=PATIENCE)
    assert member.parked
    assert member.state_bytes
    with pytest.raises(MoveRefused, match="while its state was saved"):
        await member.move(back.op, pb.WorkloadCommand(move_in=back), timeout=PATIENCE)


@pytest.mark.parametrize("at_it", [True, False])
async def test_who_may_be_at_an_order_still_has_not_closed_it(node: Node, at_it: bool) -> None:
    await node.start(orchestrator=None)
    process = await workload(node, "theirs", "--hold", size=MIB)
    if at_it:
        await Caller(node).snapshot("theirs")
        await process.until("told")
    await process.do("close")
    await seen(lambda: member_of(node, process).lost)
    assert node.agent is not None
    assert bool(node.agent.closed._timers) is not at_it


async def test_who_is_stopped_has_not_closed_it_and_who_is_moved_without_it_need_not_have_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of one that is stopped breaks: it answers no pings. Once it goes on it dials again."""
    await node.start(orchestrator=None, channel_grace=3600.0)
    process = await workload(node, "theirs", size=MIB)
    assert node.agent is not None
    member, agents = member_of(node, process), node.agent.closed
    await process.do("close")
    await seen(lambda: member.lost)
    os.kill(process.pid, signal.SIGSTOP)
    await seen(lambda: stopped(process.pid))
    agents.over(member)
    assert member.channel is None
    os.kill(process.pid, signal.SIGCONT)
    await seen(lambda: not stopped(process.pid))
    with monkeypatch.context() as freezer:
        freezer.setattr(closed.cgroups, "frozen", lambda _: True)
        agents.over(member)
    assert member.channel is None
    ClosedChannels(grace=0.0, asked=lambda _: False, measure=lambda _: None, resized=lambda _: None).over(
        member
    )
    assert member.channel is None
    another = copy.copy(member)  # as of a registration that was refused
    agents.over(another)
    assert another.channel is None
    agents.over(member)
    assert isinstance(member.channel, ClosedChannel)
    assert not member.connected


async def test_one_that_comes_back_with_state_it_does_not_tell_of_is_set_aside_too(node: Node) -> None:
    """Of upstream's channel, which has no words for sizes."""
    await node.start(channel_grace=SOON, sample_interval=0.001)
    process = await loaded(node, "theirs")
    await close(node, process)
    await process.do("free")
    await node.orchestrator.make_resident(GROUP, "ours", 2)
    holder = await node.workload("ours")
    await process.do("fill")
    await process.do("open")
    await process.until("told")
    await registered(node, "theirs")
    back = (await node.orchestrator.make_resident(GROUP, "theirs", 3)).done
    assert contexts(back.residency) == {"ours": "SAVED", "theirs": "LIVE"}
    assert (await process.until("restored"))["intact"]
    assert holder.process.returncode is None


async def test_who_takes_device_memory_without_a_turn_pays_for_it_and_not_who_holds_it(node: Node) -> None:
    await node.start(channel_grace=SOON)
    process = await loaded(node, "theirs")
    await close(node, process)
    await process.do("free")
    await node.orchestrator.make_resident(GROUP, "ours", 2)
    holder = await node.workload("ours")
    assert node.agent is not None
    sampler, member = node.agent.groups[GroupId(GROUP)].sampler, member_of(node, process)
    await seen(lambda: sampler.used >= 100 * MIB)
    member.gauge, member.device = lambda _: 100 * MIB, "cuda"
    assert await process.ended() == -signal.SIGKILL
    assert holder.process.returncode is None


async def test_what_it_had_when_it_registered_is_not_taken_for_no_state(node: Node) -> None:
    await node.start(orchestrator=None, channel_grace=SOON)
    process, caller = await workload(node, "theirs"), Caller(node)
    await close(node, process)
    failed = await caller.ended(await caller.snapshot("theirs"))
    assert failed.status == up.OPERATION_STATUS_FAILED
    assert f"{LIVES_ON} nobody knows how much" in failed.error


async def test_nothing_is_brought_ahead_of_it(node: Node) -> None:
    """Were it refused in its place, room for it would be looked for again at once, without an end."""
    await node.start(orchestrator=None, channel_grace=SOON)
    process = await node.workload("ours", group="")
    await close(node, process)
    with pytest.raises(MoveRefused, match="has no channel to the agent"):
        member_of(node, process).bring_ahead("o", MIB)


async def test_an_order_whose_asker_went_away_may_be_carried_out_still(node: Node) -> None:
    await node.start(orchestrator=None)
    process = await node.workload("ours", "--hold", group="")
    member = member_of(node, process)
    out = pb.MoveOut(op="o/out")
    command = pb.WorkloadCommand(move_out=out)
    move = asyncio.create_task(member.move(out.op, command, timeout=PATIENCE))
    await seen(lambda: member.moving)
    move.cancel()
    with pytest.raises(asyncio.CancelledError):
        await move
    assert member.unsure


async def test_who_is_wanted_while_it_is_set_aside_comes_back_with_its_state(node: Node) -> None:
    """It was wanted when another's turn was not over yet, and nobody is granted without its state."""
    await node.start(channel_grace=SOON, sample_interval=0.001)
    process = await node.workload("ours", "--hold")
    await node.orchestrator.make_resident(GROUP, "ours", 1)
    await close(node, process)
    await process.do("free")
    await node.orchestrator.make_resident(GROUP, "theirs", 2)
    holder = await node.workload("theirs", "--hold")
    other = asyncio.create_task(node.orchestrator.make_resident(GROUP, "others", 3))
    await holder.until("moved_out")
    wanted = asyncio.create_task(node.orchestrator.make_resident(GROUP, "ours", 4))
    assert node.agent is not None
    driver = node.agent.groups[GroupId(GROUP)].driver
    await seen(lambda: driver.state.queued is not None)
    process.tell("open")
    await process.until("moved_out")
    await holder.do("go")
    await other
    await seen(lambda: driver.state.queued is None)
    await process.do("go")
    assert contexts((await wanted).done.residency) == {"ours": "LIVE", "theirs": "SAVED"}
    assert (await process.until("moved_in"))["intact"]
