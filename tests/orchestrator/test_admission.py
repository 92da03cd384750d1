"""Admission over real gRPC: who is refused, who is warned of, who waits at the door, and that it is said."""

import json
import math
from pathlib import Path

import pytest
from orchestrator.raw_client import RawClient
from orchestrator.world import World

from coslice.admission.trail import KNOWN
from coslice.errors import ConfigError
from coslice.orchestrator.config import GroupConfig
from coslice.profile.given import given_profile
from coslice.profile.model import brief_profile, encode_profile
from coslice.profile.options import ReadOptions
from coslice.wire.v1 import coslice_pb2 as pb


def says(busy: float, period: float) -> str:
    """What a job declares: seconds of each cycle on the accelerators."""
    profile = given_profile("declared", busy=busy, period=period, options=ReadOptions())
    return encode_profile(brief_profile(profile)).decode()


async def start(world: World, mode: str, *, bound: float = 1.1, **config: object) -> None:
    group = GroupConfig(id="pool", admission=mode, max_slowdown=bound)
    await world.start(groups=(group,), **config)
    await world.agent()


def member(status: pb.GroupStatus, job: str) -> pb.AdmissionMember:
    return next(one for one in status.admission.members if one.job == job)


async def turns(client: RawClient, count: int) -> None:
    for _ in range(count):
        await client.yielded(await client.acquire("pool"))


async def test_a_newcomer_that_would_slow_others_down_is_refused_at_the_door(
    world: World, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.jsonl"
    await start(world, "enforce", journal=str(journal))
    a = await world.client("job-a", profile=says(60.0, 100.0))
    await turns(a, 1)
    b = await world.client("job-b", profile=says(60.0, 100.0))
    refused = await b.refused(await b.ask("pool"))
    assert refused.code == pb.NOT_ADMITTED
    assert "job-b is not admitted beside job-a" in refused.message
    assert "the bound is 1.10" in refused.message
    assert "Use another group" in refused.message  # the next step
    assert dict(refused.data) == {"group": "pool", "job": "job-b", "max_slowdown": "1.1"}
    again = await b.refused(await b.ask("pool"))  # remembered for this start of the job
    assert again.message == refused.message
    told = [line for line in await a.explain("pool", "job-b") if "Admission refuses job-b" in line]
    assert "another is judged anew" in told[0]
    status = await a.group("pool")
    assert [one.job for one in status.admission.members] == ["job-a"]
    await turns(a, 2)  # nobody else noticed
    small = await world.client("job-c", profile=says(5.0, 200.0))
    await turns(small, 1)
    assert member(await a.group("pool"), "job-c").state == "seated"
    await world.app.stop()
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    said = [line["admission"]["code"] for line in lines if "admission" in line]
    assert said == ["refused", "admitted"]
    refusals = [line for line in lines if line.get("event", {}).get("job") == "job-b"]
    assert not refusals  # the lock never heard of it


async def test_another_start_of_a_refused_job_is_judged_anew(world: World) -> None:
    await start(world, "enforce")
    a = await world.client("job-a", profile=says(60.0, 100.0))
    await turns(a, 1)
    b = await world.client("job-b", profile=says(60.0, 100.0))
    assert (await b.refused(await b.ask("pool"))).code == pb.NOT_ADMITTED
    await b.goodbye()
    b = await world.client("job-b", incarnation="two", profile=says(2.0, 100.0))
    await turns(b, 2)


async def test_with_warn_it_is_let_in_and_said(world: World) -> None:
    await start(world, "warn")
    a = await world.client("job-a", profile=says(60.0, 100.0))
    await turns(a, 1)
    b = await world.client("job-b", profile=says(60.0, 100.0))
    await turns(b, 1)
    status = await a.until(
        "pool", lambda group: len(group.admission.members) == 2 and group.admission.decisions
    )
    judged = member(status, "job-b")
    assert judged.state == "judged"
    assert "would be refused" in judged.reason
    assert any("Admission warns of job-b" in line for line in await a.explain("pool"))
    await turns(a, 1)
    await turns(b, 1)


@pytest.mark.parametrize("mode", ["off", "warn"])
async def test_nobody_is_kept_out_without_enforce(world: World, mode: str) -> None:
    await start(world, mode)
    clients = [await world.client(f"job-{name}", profile=says(90.0, 100.0)) for name in "abc"]
    for client in clients:
        await turns(client, 2)
    status = await clients[0].group("pool")
    assert status.admission.mode == mode
    assert {one.job for one in status.admission.members} == {"job-a", "job-b", "job-c"}


async def test_who_declares_nothing_is_on_probation_and_then_judged_by_what_it_did(world: World) -> None:
    """With a bound of 1 not even the hand-overs may be felt: whatever the clock says, it is refused."""
    await start(world, "enforce", bound=1.0)
    a, b = await world.client("job-a"), await world.client("job-b")
    await turns(a, 6)
    wanted = await b.ask("pool")
    status = await a.until("pool", lambda group: len(group.admission.members) == 2)
    assert member(status, "job-b").state == "probation"
    granted = await b.granted(wanted)
    while True:
        next_a = await a.ask("pool")
        await a.until("pool", lambda group: len(group.waiters) == 1)  # so that b holds while a waits
        await b.yielded(granted)
        held = await a.granted(next_a)
        status = await a.group("pool")
        if min(one.cycles for one in status.admission.members) >= KNOWN:
            break  # it is being judged, in a thread, or was already
        wanted = await b.ask("pool")
        await a.yielded(held)
        granted = await b.granted(wanted)
    await a.until("pool", lambda group: any("job-b is not admitted" in d for d in group.admission.decisions))
    await a.yielded(held)
    refused = await b.refused(await b.ask("pool"))
    assert refused.code == pb.NOT_ADMITTED
    assert "job-b" in refused.message
    await turns(a, 1)


async def test_a_malformed_profile_is_refused_with_the_hello(world: World) -> None:
    await start(world, "enforce")
    client = await world.client("job-a", profile='{"coslice_profile": 1, "pools": 3}')
    assert client.hello_refused is not None
    assert client.hello_refused.code == pb.INVALID
    assert "profile" in client.hello_refused.message
    client = await world.client("job-b", profile=" " * 100_000)
    assert client.hello_refused is not None
    assert "at most" in client.hello_refused.message


async def test_a_client_that_gives_up_at_the_door_leaves_nothing_behind(world: World) -> None:
    """Its verdict may come before, after or never: in any case others are judged without it."""
    await start(world, "enforce")
    a = await world.client("job-a", profile=says(60.0, 100.0))
    await turns(a, 1)
    b = await world.client("job-b", profile=says(5.0, 100.0))
    wanted = await b.ask("pool")
    await b.abandon(wanted)
    await b.goodbye()
    status = await a.until("pool", lambda group: [m.job for m in group.admission.members] == ["job-a"])
    assert not status.waiters
    c = await world.client("job-c", profile=says(5.0, 200.0))
    await turns(c, 1)


async def test_a_request_for_several_groups_waits_at_no_door_with_a_lease_in_hand(world: World) -> None:
    groups = tuple(GroupConfig(id=name, admission="enforce", max_slowdown=1.1) for name in ("one", "two"))
    await world.start(groups=groups)
    await world.agent(groups=("one", "two"))
    a = await world.client("job-a", profile=says(60.0, 100.0))
    await a.yielded(await a.acquire("two"))
    b = await world.client("job-b", profile=says(60.0, 100.0))
    refused = await b.refused(await b.ask("one", "two"))
    assert refused.code == pb.NOT_ADMITTED
    assert refused.data["group"] == "two"
    status = await a.group("one")
    assert status.state == "empty"
    assert not status.waiters
    await b.yielded(await b.acquire("one"))  # where it is alone


async def test_the_status_says_what_was_measured(world: World) -> None:
    await start(world, "off")
    a = await world.client("job-a")
    await turns(a, 6)
    status = await a.group("pool")
    told = member(status, "job-a")
    assert told.cycles >= 3
    assert 0 < told.on_s < math.inf
    assert told.off_s > 0
    assert any("in a cycle alone" in line for line in await a.explain("pool", "job-a"))


async def test_who_waits_at_the_door_of_a_group_that_is_deleted_is_told_so(world: World) -> None:
    """Whether the verdict or the end of the group is there first."""
    await start(world, "enforce")
    a = await world.client("job-a", profile=says(60.0, 100.0))
    await turns(a, 1)
    b = await world.client("job-b", profile=says(5.0, 100.0))
    wanted = await b.ask("pool")
    await a.stub.DeleteGroup(pb.DeleteGroupRequest(group="pool"), timeout=20)
    answer = await b.answer(wanted)
    assert answer.HasField("granted") or answer.refused.code in (pb.GROUP_GONE, pb.UNKNOWN_GROUP)


async def test_other_rules_hold_at_once_and_without_any_the_door_is_open(world: World) -> None:
    await start(world, "enforce")
    a = await world.client("job-a", profile=says(60.0, 100.0))
    await turns(a, 1)
    b = await world.client("job-b", profile=says(60.0, 100.0))
    assert (await b.refused(await b.ask("pool"))).code == pb.NOT_ADMITTED
    wider = GroupConfig(id="pool", admission="enforce", max_slowdown=3.0, policy="fair_share")
    done = world.app.regroup([wider])
    assert done == ["group pool: policy is fair_share, max_slowdown is 3.0"]
    assert world.app.regroup([wider]) == []
    await turns(b, 1)
    status = await a.group("pool")
    assert (status.policy, status.admission.max_slowdown) == ("fair_share", 3.0)
    world.app.regroup([GroupConfig(id="pool", admission="enforce")])
    c = await world.client("job-c", profile=says(90.0, 100.0))
    assert (await c.refused(await c.ask("pool"))).code == pb.NOT_ADMITTED
    world.app.regroup([GroupConfig(id="pool", admission="off")])
    await turns(c, 1)
    assert (await a.group("pool")).admission.mode == "off"
    with pytest.raises(ConfigError, match="is none of"):
        world.app.regroup([GroupConfig(id="pool", admission="perhaps")])


async def test_members_are_judged_when_admission_is_switched_on_by_what_they_did_before(
    world: World,
) -> None:
    await start(world, "off")
    clients = [await world.client(f"job-{name}") for name in "ab"]
    for _ in range(2 * KNOWN):
        for client in clients:
            await turns(client, 1)
    world.app.regroup([GroupConfig(id="pool", admission="warn", max_slowdown=100.0)])
    status = await clients[0].until("pool", lambda group: group.admission.decisions)
    assert [one.state for one in status.admission.members] == ["seated"] * 2
