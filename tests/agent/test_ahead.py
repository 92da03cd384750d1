"""When the next job is told to come, and how far: into room that is made, never into more than there is."""

import os
import random
from collections.abc import Callable, Iterator

import pytest
from agent.conftest import GROUP, MIB

from coslice.agent.ahead import Ahead
from coslice.agent.host import AnonymousMemory
from coslice.agent.members import Member, OpenChannel
from coslice.core.ids import GroupId, Incarnation, JobId, MemberId, OpId
from coslice.wire.v1 import coslice_pb2 as pb

OP = OpId("op-1")
Make = Callable[..., Member]


@pytest.fixture
def make() -> Iterator[Make]:
    made = list[Member]()

    def one(job: str, size: int, *, parked: bool = False) -> Member:
        member = Member(
            id=MemberId(f"{job}/{len(made)}"),
            job=JobId(job),
            incarnation=Incarnation("1"),
            group=GroupId(GROUP),
            pid=os.getpid(),
            started=0,
            memory=AnonymousMemory(os.getpid()),
            state_bytes=size,
            parked=parked,
            modes=("offload", "parts"),
        )
        member.attach(OpenChannel())
        made.append(member)
        return member

    yield one
    for member in made:
        member.close()


async def told(member: Member) -> list[int]:
    """Up to where it was told to come since last time."""
    channel, orders = member.channel, list[int]()
    assert channel is not None
    channel.end()
    while (command := await channel.next()) is not None:
        orders.append(command.bring_ahead.most_bytes)
    return orders


def gives(member: Member, size: int) -> None:
    member.given = size
    assert member.heard is not None
    member.heard()


def ahead_of(*members: Member, room: Callable[[], int]) -> Ahead:
    ahead = Ahead.for_job(members[0].job, members, op=OP, room=room)
    assert ahead is not None
    return ahead


async def test_the_next_job_takes_the_room_that_is_made_not_what_lay_idle(make: Make) -> None:
    leaves, comes = make("a", 400 * MIB), make("b", 400 * MIB, parked=True)
    ahead_of(comes, room=lambda: 500 * MIB).begin({leaves: 400 * MIB})
    assert await told(comes) == []
    gives(leaves, 25 * MIB)
    assert await told(comes) == [25 * MIB]
    gives(leaves, 50 * MIB)  # the first is not done yet: the next is there when it is
    gives(leaves, 51 * MIB)  # not worth a message
    assert await told(comes) == [50 * MIB]
    comes.came_ahead(pb.Ahead(op=OP, bytes=20 * MIB, ok=True))
    comes.came_ahead(pb.Ahead(op=OP, bytes=40 * MIB, ok=True))
    assert await told(comes) == [51 * MIB]  # its parts end elsewhere: what it left is asked for again
    leaves.given = 400 * MIB
    comes.came_ahead(pb.Ahead(op=OP, bytes=51 * MIB, ok=True))
    assert await told(comes) == [400 * MIB]
    leaves.given = 0  # its move is over
    comes.came_ahead(pb.Ahead(op=OP, bytes=400 * MIB, ok=True))
    assert await told(comes) == []


async def test_what_will_be_lacking_comes_at_once(make: Make) -> None:
    leaves, comes = make("a", 400 * MIB), make("b", 400 * MIB, parked=True)
    ahead_of(comes, room=lambda: 250 * MIB).begin({leaves: 160 * MIB})
    assert await told(comes) == [240 * MIB]


async def test_room_is_what_is_measured_whatever_a_process_says_it_gave(make: Make) -> None:
    room = 0
    leaves, comes = make("a", 400 * MIB), make("b", 400 * MIB, parked=True)
    ahead_of(comes, room=lambda: room).begin({leaves: 400 * MIB})
    gives(leaves, 200 * MIB)
    assert await told(comes) == []
    room = 100 * MIB
    gives(leaves, 201 * MIB)
    (most,) = await told(comes)
    assert 99 * MIB < most <= 100 * MIB


@pytest.mark.parametrize("seed", range(20))
async def test_the_device_never_holds_more_than_it_has_room_for(make: Make, seed: int) -> None:
    """Two ranks come while two leave and say more than they gave; commands are done late, in part or not."""
    rng = random.Random(seed)
    out = [make("a", rng.randrange(100, 200) * MIB) for _ in range(2)]
    budget = sum(member.state_bytes for member in out) + rng.randrange(50) * MIB
    back = [make("b", rng.randrange(100, 200) * MIB, parked=True) for _ in range(2)]
    on = {member: member.state_bytes for member in out} | dict.fromkeys(back, 0)
    queues: dict[Member, list[int]] = {member: [] for member in back}
    ahead_of(*back, room=lambda: budget - sum(on.values())).begin({m: m.state_bytes for m in out})
    peak = came = 0
    while any(on[member] for member in out) or any(queues.values()):
        for member in back:
            queues[member] += await told(member)
        member = rng.choice([*out, *(m for m in back if queues[m])])
        if member in out:
            on[member] -= min(on[member], rng.randrange(1, 40) * MIB)
            gives(member, 2 * (member.state_bytes - on[member]))
        elif rng.random() < 0.5 and on[member] < queues[member][0]:  # a part of it, not answered yet
            on[member] = rng.randrange(on[member], queues[member][0])
        elif rng.random() < 0.05:
            on[member] = 0
            queues[member].pop(0)
            member.came_ahead(pb.Ahead(op=OP, message="no room"))
        else:
            on[member] = max(on[member], queues[member].pop(0))
            member.came_ahead(pb.Ahead(op=OP, bytes=on[member], ok=True))
        for each in back:
            queues[each] += await told(each)
        # Whatever they were told, done at once:
        worst = sum(on[m] for m in out) + sum(max([on[m], *queues[m]]) for m in back)
        peak, came = max(peak, worst), max(came, sum(on[m] for m in back))
    assert peak <= budget
    assert came >= 64 * MIB
