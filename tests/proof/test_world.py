"""The imagined world judges: it notices what must not be. A judge that never convicts proves nothing."""

import pytest

from coslice.core import events as ev
from coslice.core.context import NodeRules
from coslice.core.group import GroupRules
from coslice.core.ids import GroupId, Incarnation, JobId, NodeId
from coslice.proof import wire
from coslice.proof.device import MIB, Device, Violation
from coslice.proof.joint import Setup, World
from coslice.proof.story import Story

G, N = GroupId("g"), NodeId("n0")
A, B = JobId("a"), JobId("b")


def world() -> World:
    setup = Setup(
        groups=(G,),
        nodes=(N,),
        jobs=(A, B),
        rules=GroupRules(),
        node_rules=NodeRules(),
        capacity=100 * MIB,
        instant=True,
    )
    made = World(setup, Story())
    made.attach(made.nodes[N])
    for job in (A, B):
        made.start(job)
    for client in made.clients.values():
        made.dial(client)
    return made


def take_turn(made: World, job: JobId, size: int = 60) -> None:
    """The job acquires, is granted, and fills the device."""
    (client,) = made.of_job(job)
    made.client_says(client, client.acquire((G,)))
    settle(made)
    assert client.inside
    node = made.nodes[N]
    if not node.served[G].device.of(job):
        made.begin(client, node, G, size * MIB)
    settle(made)


def settle(made: World) -> None:
    node = made.nodes[N]
    while True:
        if node.stream.down:
            made.tell_node(node)
        elif node.stream.back:
            made.hear_node(node)
        elif node.served[G].asked is not None:
            node.served[G].finish()
            made.after_node(node, G)
        elif waiting := [c for c in made.clients.values() if c.stream.down]:
            made.tell_client(waiting[0])
        else:
            return


def leave(made: World, job: JobId) -> None:
    made.leave(made.of_job(job)[0])
    settle(made)


def test_two_jobs_take_turns_and_their_state_comes_back_as_it_was() -> None:
    made = world()
    for job in (A, B, A, B):
        take_turn(made, job)
        made.compute(made.of_job(job)[0])
        leave(made, job)
    (process,) = made.nodes[N].served[G].device.of(A)
    assert process.parked
    assert process.kept == process.content == 3
    assert all(c.served == 2 for c in made.clients.values())


def test_a_holder_whose_state_is_taken_away_is_noticed() -> None:
    made = world()
    take_turn(made, A)
    device = made.nodes[N].served[G].device
    device.move_out(device.of(A)[0])
    with pytest.raises(Violation, match="2: a"):
        made.check()


def test_computing_under_a_lease_that_is_over_is_noticed_unless_the_news_is_on_its_way() -> None:
    made = world()
    take_turn(made, A)
    (client,) = made.of_job(A)
    made.shell.hear(client.session, wire.Yield(client.holds[G][0], ((G, client.holds[G][1]),)))
    with pytest.raises(Violation, match="1: a"):
        made.check()
    client.stream.down.append(wire.LeaseLost(G, client.holds[G][1]))
    made.check()


def test_a_restore_without_room_poisons() -> None:
    device = Device(100 * MIB)
    made = world()
    served = made.nodes[N].served[G]
    served.begin(A, 60 * MIB, parked=True, start=Incarnation("a-1"))
    served.begin(B, 60 * MIB, parked=False, start=Incarnation("b-1"))
    with pytest.raises(Violation, match="poisons"):
        served.device.check_room(A, "n0")
    device.check_room(A, "n0")


def test_state_that_is_restored_from_an_old_copy_is_noticed() -> None:
    made = world()
    take_turn(made, A)
    device = made.nodes[N].served[G].device
    (process,) = device.of(A)
    device.move_out(process)
    process.kept -= 1
    with pytest.raises(Violation, match="gets back content"):
        device.move_in(process, "n0")


def test_saved_state_whose_buffer_is_gone_is_noticed_unless_it_is_reported_lost() -> None:
    made = world()
    take_turn(made, A)
    leave(made, A)
    take_turn(made, B)
    served = made.nodes[N].served[G]
    (process,) = served.device.of(A)
    served.device.free_buffers((process.member,))
    with pytest.raises(Violation, match="nowhere"):
        served.check()
    process.lost = True
    served.check()


def test_a_lease_that_a_stranger_can_end_is_noticed() -> None:
    made = world()
    take_turn(made, A)
    (client,) = made.of_job(A)
    epoch = client.holds[G][1]
    made.shell.stranger_yields(G, B, made.of_job(B)[0].session, epoch)
    with pytest.raises(Violation, match="not its own"):
        made.shell.stranger_yields(G, A, client.session, epoch)


def test_a_broken_stream_loses_what_is_on_it_and_both_ends_notice_for_themselves() -> None:
    made = world()
    (client,) = made.of_job(A)
    made.client_says(client, client.acquire((G,)))
    assert client.stream.down
    client.stream.cut()
    assert not client.stream.down
    assert made.unnoticed() == [client.session]
    made.dial(client)
    settle(made)
    assert client.inside
    assert made.unnoticed() == []


def test_a_copy_of_a_world_goes_its_own_way() -> None:
    made = world()
    take_turn(made, A)
    other = made.copy()
    leave(other, A)
    take_turn(other, B)
    assert made.of_job(A)[0].inside
    assert not other.of_job(A)[0].inside
    assert not made.nodes[N].served[G].device.of(B)
    made.check()


def test_a_client_that_is_killed_is_not_waited_for_once_its_agent_has_seen_it() -> None:
    made = world()
    take_turn(made, A)
    (client,) = made.of_job(A)
    node = made.nodes[N]
    assert [p.pid for p in node.served[G].own()] == [client.pid]
    made.process_ends(node, node.served[G], client.pid)
    assert made.of_job(A) == [], "the client is that process"
    made.notice_client(client.session)
    assert made.shell.locks[G].lost, "until its agent has seen it"
    node.served[G].learn()
    made.after_node(node, G)
    settle(made)
    assert not made.shell.locks[G].lost
    take_turn(made, B)


def test_an_agent_that_takes_a_living_process_for_dead_is_noticed() -> None:
    made = world()
    take_turn(made, A)
    node = made.nodes[N]
    process = node.served[G].device.of(A)[0]
    gone = ev.MemberGone(at=0.0, job=A, member=process.member, reason="so it believes")
    with pytest.raises(Violation, match="it lives"):
        node.served[G].hear(gone)
