"""One request for several groups: all or nothing, in the global order."""

import asyncio

import pytest
from orchestrator.raw_client import RawClient
from orchestrator.world import World

from coslice.core import effects as fx
from coslice.core.effects import Reason, ReasonCode
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, RequestId, SessionId
from coslice.orchestrator import convert
from coslice.orchestrator.config import GroupConfig
from coslice.orchestrator.outbox import Outbox
from coslice.orchestrator.sessions import Session
from coslice.testing.fake_agent import failing, gated
from coslice.wire.v1 import coslice_pb2 as pb

TWO = (GroupConfig(id="samplers", rank=1), GroupConfig(id="trainers", rank=0))
NAMES = ("samplers", "trainers")


def _free(group: pb.GroupStatus) -> bool:
    return group.state in ("empty", "resident") and not group.waiters


async def test_both_are_granted_in_one_answer_and_yielded_in_one(world: World) -> None:
    await world.start(groups=TWO)
    await world.agent(groups=NAMES)
    a = await world.client("job-a")
    granted = await a.acquire(*NAMES)
    assert [lease.group for lease in granted.leases] == ["trainers", "samplers"]
    await a.yielded(granted)
    for name in NAMES:
        await a.until(name, _free)


async def test_the_first_is_kept_while_the_second_is_waited_for(world: World) -> None:
    await world.start(groups=TWO)
    await world.agent(groups=NAMES)
    a, b = await world.client("job-a"), await world.client("job-b")
    held = await b.acquire("samplers")
    wants = await a.ask(*NAMES)
    await a.until("samplers", lambda group: len(group.waiters) == 1)
    assert (await a.group("trainers")).job == "job-a"
    assert not a.answered(wants)
    await b.yielded(held)
    assert len((await a.granted(wants)).leases) == 2


async def test_a_request_for_a_busy_group_holds_up_nothing_that_its_session_says_after_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coslice.runtime.driver.PATIENCE_S", 1000.0)
    await world.start(groups=TWO)
    await world.agent(groups=NAMES)
    a, b = await world.client("job-a"), await world.client("job-b")
    trains = await a.acquire("trainers")
    await b.acquire("samplers")
    await b.abandon(b.next_id())  # the group hears the confirmation with that
    await b.refused(await b.ask("nowhere"))
    await a.ask("samplers")
    await a.yielded(trains)


async def test_opposite_orders_do_not_deadlock(world: World) -> None:
    await world.start(groups=TWO)
    await world.agent(groups=NAMES)
    a, b = await world.client("job-a"), await world.client("job-b")

    async def take(client: RawClient, *names: str) -> None:
        for _ in range(10):
            await client.yielded(await client.acquire(*names))

    await asyncio.gather(take(a, *NAMES), take(b, *reversed(NAMES)))


async def test_abandoning_while_half_is_taken_gives_back_that_half(world: World) -> None:
    await world.start(groups=TWO)
    await world.agent(groups=NAMES)
    a, b = await world.client("job-a"), await world.client("job-b")
    held = await b.acquire("samplers")
    wants = await a.ask(*NAMES)
    await a.until("samplers", lambda group: len(group.waiters) == 1)
    await a.abandon(wants)
    await a.until("trainers", _free)
    await a.until("samplers", lambda group: not group.waiters)
    await b.yielded(held)
    await b.yielded(await b.acquire(*NAMES))
    assert not a.answered(wants)


async def test_a_refusal_of_one_gives_back_the_other(world: World) -> None:
    await world.start(groups=TWO)
    await world.agent(node="n0", groups=("trainers",))
    await world.agent(node="n1", groups=("samplers",), behaviour=failing(culprit="job-a"))
    a, b = await world.client("job-a"), await world.client("job-b")
    await b.yielded(await b.acquire("samplers"))
    refused = await a.refused(await a.ask(*NAMES))
    assert refused.code == pb.JOB_FAULTED
    for name in NAMES:
        await a.until(name, _free)


async def test_a_goodbye_gives_back_what_was_taken(world: World) -> None:
    await world.start(groups=TWO, session_grace=3600)
    await world.agent(groups=NAMES)
    a, b = await world.client("job-a"), await world.client("job-b")
    held = await b.acquire("samplers")
    await a.ask(*NAMES)
    await b.until("samplers", lambda group: len(group.waiters) == 1)
    await a.goodbye()
    await b.until("trainers", _free)
    await b.yielded(held)
    await b.until("samplers", _free)


async def test_the_answer_survives_a_lost_stream(world: World) -> None:
    await world.start(groups=TWO, session_grace=3600)
    await world.agent(groups=NAMES)
    a, b = await world.client("job-a"), await world.client("job-b")
    held = await b.acquire("samplers")
    wants = await a.ask(*NAMES)
    await b.until("samplers", lambda group: len(group.waiters) == 1)
    a.kill()
    await a.ended.wait()
    await b.yielded(held)
    await a.connect()
    await a.ask(*NAMES, request=wants)
    assert len((await a.granted(wants)).leases) == 2


async def test_a_restart_in_the_middle_takes_it_up_again(world: World, store: str) -> None:
    await world.start(groups=TWO, session_grace=3600, store=store)
    await world.agent(groups=NAMES)
    a, b = await world.client("job-a"), await world.client("job-b")
    held = await b.acquire("samplers")
    wants = await a.ask(*NAMES)
    await b.until("samplers", lambda group: len(group.waiters) == 1)
    await world.restart()
    await a.connect()
    await b.connect()
    await a.ask(*NAMES, request=wants)
    await b.yielded(held)
    assert len((await a.granted(wants)).leases) == 2


async def test_a_lease_lost_while_waiting_for_the_other_ends_the_request(world: World) -> None:
    await world.start(groups=TWO, max_hold=0.1)
    await world.agent(node="n0", groups=("trainers",))
    never = await world.agent(node="n1", groups=("samplers",), behaviour=gated(asyncio.Event()))
    a, b, c = [await world.client(job) for job in ("job-a", "job-b", "job-c")]
    await b.yielded(await b.acquire("samplers"))
    wants = await a.ask(*NAMES)
    await never.wait_commands(1)  # trainers are taken, samplers are on their way and will not come
    theirs = await c.granted(await c.ask("trainers"))
    assert theirs.leases[0].group == "trainers"
    refused = await a.refused(wants)
    assert "trainers was lost" in refused.message
    await b.until("samplers", lambda group: not group.waiters)


async def test_explain_names_a_circle_of_two_jobs_processes(world: World) -> None:
    await world.start(groups=TWO)
    await world.agent(groups=NAMES)
    trainer_a, sampler_a = await world.client("job-a"), await world.client("job-a")
    trainer_b, sampler_b = await world.client("job-b"), await world.client("job-b")
    held_a, held_b = await trainer_a.acquire("trainers"), await sampler_b.acquire("samplers")
    wants_a, wants_b = await sampler_a.ask("samplers"), await trainer_b.ask("trainers")
    for name in NAMES:
        await trainer_a.until(name, lambda group: len(group.waiters) == 1)
    lines = await trainer_a.explain("trainers", "job-b")
    assert any(
        "circle" in line
        and "job-b waits for trainers, which job-a holds" in line
        and "job-a waits for samplers, which job-b holds" in line
        for line in lines
    ), lines
    await trainer_a.yielded(held_a)
    await sampler_b.yielded(held_b)
    await sampler_a.granted(wants_a)
    await trainer_b.granted(wants_b)
    assert not any("circle" in line for line in await trainer_a.explain("trainers", "job-b"))


async def test_a_repeated_request_is_no_breach_of_the_order(world: World) -> None:
    """Both groups were asked for in order; after a reconnect the first request is sent again."""
    await world.start(groups=TWO)
    await world.agent(groups=NAMES)
    a = await world.client("job-a")
    first = await a.ask("trainers", request="r1")
    await a.granted(first)
    await a.granted(await a.ask("samplers", request="r2"))
    again = await a.granted(await a.ask("trainers", request="r1"))
    assert [lease.group for lease in again.leases] == ["trainers"]


def test_a_part_that_is_granted_before_the_client_repeats_its_request_is_not_taken_for_the_answer() -> None:
    """After a restart a swap may end before the client, back already, has said again what it asked for."""
    who = convert.Identity(
        job=JobId("job-a"),
        incarnation=Incarnation("i"),
        session=SessionId("s"),
        node="n0",
        pid=1,
        start_time=1,
        rank=0,
    )
    session, said = Session(who), []
    session.outbox = Outbox()
    session.outbox.put = said.append  # type: ignore[method-assign]
    grant = fx.Grant(
        request=RequestId("s/1"),
        session=who.session,
        job=who.job,
        epoch=Epoch(3),
        restored=False,
        waited=0.0,
        bytes_in=0,
        bytes_out=0,
        reason=Reason(ReasonCode.GRANTED_SWAPPED, ""),
        more=True,
    )
    session.perform(GroupId("trainers"), grant)
    assert said == []


async def test_a_late_confirmation_is_not_taken_for_that_of_the_same_request_asked_again(
    world: World,
) -> None:
    """The first grant was lost before it. The second must still be given, not forgotten with its lease."""
    await world.start(groups=TWO)
    await world.agent(groups=NAMES)
    a, b = await world.client("job-a"), await world.client("job-b")
    request = await a.ask(*NAMES)
    await a.answer(request)
    await a.stub.Evict(pb.EvictRequest(job="job-a"))
    in_the_way = await b.acquire("trainers")
    a.forget(request)
    await a.ask(*NAMES, request=request)
    await a.send(confirm=pb.Confirm(request=request))
    await a.until("trainers", lambda s: [w.job for w in s.waiters] == ["job-a"])
    await b.yielded(in_the_way)
    await a.yielded(await a.granted(request))
