"""Each edge of the group's lock, one by one. Random histories: test_group_properties."""

import pytest
from core.group_world import LIVE, RULES, SAVED, Client, World
from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.effects import ReasonCode, RefuseCode
from coslice.core.events import ContextFact, ContextState, NodeFacts
from coslice.core.group import Empty, Held, Rejected, Resident, Swapping, next_deadline, stalled, told_late
from coslice.core.ids import Epoch, Incarnation, JobId, NodeId, OpId, RequestId, SessionId
from coslice.core.policy import FewestSwaps


def world(*nodes: str, **rules: object) -> World:
    made = World(*(nodes or ("n0",)), rules=replace(RULES, **rules))
    for name in made.nodes:
        made.attach(name)
    return made


def effects(w: World, kind: type) -> list:
    return [e for e in w.last.effects if isinstance(e, kind)]


def codes(w: World) -> list[ReasonCode]:
    return [r.code for r in w.last.reasons]


def hold(w: World, session: str, job: str, **more: object) -> Client:
    """The client asks, is granted, confirms and uses the device."""
    client = w.client(session, job=job, **more)
    w.ask(client)
    w.settle()
    assert client.holding, w.group
    w.confirm(client)
    w.use_device(client)
    w.settle()
    return client


def wait_behind(w: World, session: str, job: str, **more: object) -> Client:
    client = w.client(session, job=job, **more)
    w.ask(client)
    assert client.asking
    return client


# ── granting ──


def test_a_cold_job_is_granted_at_once() -> None:
    w = world("n0", "n1")
    w.ask(w.client("a1", job="a"))
    (grant,) = effects(w, fx.Grant)
    assert (grant.epoch, grant.restored, grant.reason.code) == (1, False, ReasonCode.GRANTED_EMPTY)
    assert not effects(w, fx.MakeResident)


def test_two_cold_jobs_take_turns() -> None:
    """C1: neither ever touched the device."""
    w = world()
    a = w.client("a1", job="a")
    w.ask(a)
    b = wait_behind(w, "b1", "b")
    w.yield_(a)
    w.settle()
    assert b.holding


def test_a_returning_resident_pays_nothing_and_is_told_so() -> None:
    w = world()
    a = hold(w, "a1", "a")
    w.yield_(a)
    assert codes(w) == [ReasonCode.YIELDED, ReasonCode.SNAPSHOT_DEFERRED]
    assert w.group.occupancy == Resident(job=JobId("a"))
    w.ask(a)
    (grant,) = effects(w, fx.Grant)
    assert (grant.restored, grant.bytes_in, grant.reason.code) == (False, 0, ReasonCode.GRANTED_RESIDENT)
    assert w.group.swaps == 0


def test_a_swap_grants_only_when_every_node_has_reported() -> None:
    w = world("n0", "n1")
    a = hold(w, "a1", "a")
    b = wait_behind(w, "b1", "b")
    w.yield_(a)
    commands = effects(w, fx.MakeResident)
    assert [c.op for c in commands] == ["g/2/n0", "g/2/n1"]
    w.nodes["n0"].work("none")
    w.deliver(w.nodes["n0"])
    assert not b.holding
    w.nodes["n1"].work("none")
    w.deliver(w.nodes["n1"])
    (grant,) = effects(w, fx.Grant)
    assert (grant.reason.code, grant.bytes_out, grant.restored) == (ReasonCode.GRANTED_SWAPPED, 200, False)
    assert (w.group.swaps, w.group.bytes_moved) == (1, 200)


def test_the_one_who_comes_back_is_restored_and_told_so() -> None:
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.settle()
    w.confirm(b)
    w.ask(a)
    w.yield_(b)
    w.settle()
    (grant,) = effects(w, fx.Grant)
    assert (grant.job, grant.restored, grant.bytes_in) == ("a", True, 100)


def test_jobs_that_fit_together_move_nothing_and_the_grant_has_the_figures() -> None:
    w = world()
    a = hold(w, "a1", "a")
    both = tuple(ContextFact(job=JobId(j), state=LIVE, bytes=60 << 20) for j in "ab")
    facts = NodeFacts(version=99, contexts=both, device_budget=512 << 20)
    w.nodes["n0"].contexts = {}  # our judge of one-job devices is not asked here
    w.apply(ev.NodeReported(at=0.0, node=NodeId("n0"), facts=facts))
    wait_behind(w, "b1", "b")
    w.yield_(a)
    assert not effects(w, fx.Grant), "a may have grown since its agent said that both fit"
    (command,) = effects(w, fx.MakeResident)
    w.apply(ev.OpSucceeded(at=w.now, op=command.op, node=command.node, facts=facts))
    (grant,) = effects(w, fx.Grant)
    assert grant.reason.code is ReasonCode.GRANTED_BOTH_FIT
    assert "a 60 MiB + b 60 MiB fit in 512 MiB on n0" in grant.reason.text
    assert w.group.swaps == 0


def test_the_need_goes_with_the_command() -> None:
    w = world()
    a = hold(w, "a1", "a")
    w.apply(
        ev.AcquireRequested(
            at=0.0,
            job=JobId("b"),
            incarnation=Incarnation("i"),
            session=w.client("b1", job="b").session,
            request="b1/1",
            need=77,
        )
    )
    w.yield_(a)
    assert [c.need for c in effects(w, fx.MakeResident)] == [77]


def test_the_last_holder_may_have_used_the_device_before_its_agent_says_so() -> None:
    """C2: a yields before the agent's word of its allocation arrives; b must not be put beside it."""
    w = world()
    a = w.client("a1", job="a")
    w.ask(a)
    w.confirm(a)
    w.use_device(a)  # the facts are still on their way
    b = wait_behind(w, "b1", "b")
    w.yield_(a)
    assert effects(w, fx.MakeResident)
    w.settle()
    assert b.holding
    assert w.nodes["n0"].contexts["a"] is SAVED


# ── queue and requests ──


def test_a_repeated_request_keeps_its_place() -> None:
    w = world()
    hold(w, "a1", "a")
    b, c = wait_behind(w, "b1", "b"), wait_behind(w, "c1", "c")
    w.ask(b)
    assert codes(w) == [ReasonCode.REPEATED]
    assert w.open_requests() == [b.asking, c.asking]


def test_a_repeated_request_gets_its_grant_again() -> None:
    w = world()
    a = w.client("a1", job="a")
    w.ask(a)
    assert a.holding
    a.asking = a.holding[0]
    w.ask(a)
    (grant,) = effects(w, fx.Grant)
    assert grant.epoch == 1
    assert w.group.epoch == 1


def test_a_full_queue_refuses() -> None:
    w = world(max_waiters=1)
    hold(w, "a1", "a")
    wait_behind(w, "b1", "b")
    c = w.client("c1", job="c")
    w.ask(c)
    assert c.refused == [RefuseCode.LIMIT]


def test_a_group_of_no_nodes_refuses_and_says_what_to_do() -> None:
    w = World()
    a = w.client("a1", job="a")
    w.ask(a)
    assert a.refused == [RefuseCode.GROUP_EMPTY]
    assert "start an agent" in effects(w, fx.Refuse)[0].reason


@pytest.mark.parametrize("moment", ["queued", "swapping", "granted", "confirmed"])
def test_an_abandoned_request_leaves_nothing_behind(moment: str) -> None:
    w = world()
    a = hold(w, "a1", "a")
    b = wait_behind(w, "b1", "b")
    c = wait_behind(w, "c1", "c")
    if moment != "queued":
        w.yield_(a)
    if moment in ("granted", "confirmed"):
        w.settle()
    if moment == "confirmed":
        w.confirm(b)
    w.abandon(b)
    if moment == "queued":
        w.yield_(a)
    w.settle()
    assert c.holding
    assert w.group.waiters == ()


def test_a_swap_whose_caller_left_makes_its_job_resident() -> None:
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.abandon(b)
    w.settle()
    assert w.group.occupancy == Resident(job=JobId("b"))
    w.ask(b)
    assert b.holding or isinstance(w.group.occupancy, Swapping)
    w.settle()
    assert b.holding


def test_an_unconfirmed_grant_is_taken_back() -> None:
    w = world()
    a = w.client("a1", job="a")
    w.ask(a)
    b = wait_behind(w, "b1", "b")
    w.wait(4.9)
    assert a.holding
    w.wait(0.2)
    w.settle()
    assert not a.holding
    assert b.holding
    assert ReasonCode.UNCONFIRMED in [r.code for r in w.reasons]


def test_the_clock_of_a_grant_stands_still_while_its_client_is_away() -> None:
    w = world()
    a = w.client("a1", job="a")
    w.ask(a)
    b = wait_behind(w, "b1", "b")
    w.drop(a)
    w.wait(8)
    w.reconnect(a)
    w.wait(4.9)
    assert a.holding
    w.wait(0.2)
    w.settle()
    assert not a.holding
    assert b.holding


def test_a_part_of_a_larger_request_is_confirmed_when_that_is_complete() -> None:
    w = world()
    a = w.client("a1", job="a")
    w.ask(a, more=True)
    assert a.holding
    assert [grant.more for grant in effects(w, fx.Grant)] == [True]
    w.wait(60)
    assert isinstance(w.group.occupancy, Held)
    w.apply(ev.AcquireCompleted(at=w.now, request=a.holding[0]))
    assert next_deadline(w.group) == w.now + 5
    w.wait(5)
    assert isinstance(w.group.occupancy, Resident)


def test_a_late_confirmation_changes_nothing() -> None:
    w = world()
    before = w.group
    w.apply(ev.GrantConfirmed(at=0.0, request="ghost"))
    assert w.group == before
    assert codes(w) == [ReasonCode.STALE]


# ── many processes ──


def test_processes_of_one_start_share_the_lease() -> None:
    w = world()
    one = hold(w, "a1", "a")
    two = w.client("a2", job="a")
    w.ask(two)
    assert two.holding == ("a2/1", 1)
    assert codes(w) == [ReasonCode.JOINED]
    wait_behind(w, "b1", "b")
    w.yield_(one)
    assert codes(w) == [ReasonCode.PARTLY_YIELDED]
    w.yield_(two)
    assert isinstance(w.group.occupancy, Swapping)


def test_a_process_that_yielded_queues_again_behind_the_others() -> None:
    w = world()
    one = hold(w, "a1", "a")
    hold(w, "a2", "a")
    b = wait_behind(w, "b1", "b")
    w.yield_(one)
    w.ask(one)
    assert not one.holding
    assert w.open_requests() == [b.asking, one.asking]


def test_waiting_processes_of_one_start_share_one_place() -> None:
    w = world()
    a = hold(w, "a1", "a")
    one, two = wait_behind(w, "b1", "b"), wait_behind(w, "b2", "b")
    assert len(w.group.waiters) == 1
    w.yield_(a)
    w.settle()
    assert one.holding
    assert two.holding
    assert one.holding[1] == two.holding[1]


def test_with_a_world_of_n_the_lease_ends_when_n_have_yielded() -> None:
    w = world()
    one = hold(w, "a1", "a", world=2)
    b = wait_behind(w, "b1", "b")
    w.yield_(one)
    assert isinstance(w.group.occupancy, Held)
    two = w.client("a2", job="a", world=2)
    w.ask(two)
    assert two.holding
    w.yield_(two)
    w.settle()
    assert b.holding


def test_a_world_whose_processes_are_all_gone_is_over() -> None:
    w = world()
    one = hold(w, "a1", "a", world=2)
    b = wait_behind(w, "b1", "b")
    w.yield_(one)
    w.close(one)
    w.settle()
    assert b.holding


def test_a_world_that_lost_a_process_on_the_way_ends_with_the_rest() -> None:
    w = world()
    one = hold(w, "a1", "a", world=2)
    two = hold(w, "a2", "a", world=2)
    b = wait_behind(w, "b1", "b")
    w.abandon(two)
    w.yield_(one)
    w.settle()
    assert b.holding


def test_another_start_of_a_running_job_is_refused_naming_the_first() -> None:
    w = world()
    hold(w, "a1", "a", incarnation="first")
    again = w.client("a2", job="a", incarnation="second")
    w.ask(again)
    assert again.refused == [RefuseCode.JOB_RUNNING]
    assert "first" in effects(w, fx.Refuse)[0].reason


def test_another_start_takes_over_from_one_that_ended() -> None:
    w = world()
    old = hold(w, "a1", "a", incarnation="first")
    w.close(old)
    w.settle()
    again = w.client("a2", job="a", incarnation="second")
    w.ask(again)
    assert again.holding


# ── yielding ──


def test_a_yield_counts_once_and_its_repeat_succeeds() -> None:
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.settle()
    before = w.group
    w.apply(ev.LeaseYielded(at=0.0, job=a.job, session=a.session, epoch=Epoch(1)))
    assert w.group == before
    assert b.holding


@pytest.mark.parametrize(
    ("session", "epoch", "code"),
    [("b1", 1, "stale_lease"), ("ghost", 2, "not_held"), ("ghost", 9, "not_held"), ("ghost", 0, "not_held")],
)
def test_a_yield_of_no_lease_of_ones_own_is_rejected(session: str, epoch: int, code: str) -> None:
    w = world()
    a = hold(w, "a1", "a")
    wait_behind(w, "b1", "b")
    w.yield_(a)
    w.settle()
    before = w.group
    with pytest.raises(Rejected) as refusal:
        w.apply(ev.LeaseYielded(at=0.0, job=JobId("b"), session=SessionId(session), epoch=Epoch(epoch)))
    assert refusal.value.code == code
    assert refusal.value.data["current_epoch"] == "2"
    assert w.group == before


# ── sessions ──


def test_a_lost_holder_keeps_its_lease_for_the_grace() -> None:
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.drop(a)
    w.wait(9)
    w.reconnect(a)
    w.wait(60)
    assert a.holding
    w.drop(a)
    w.wait(10)
    w.settle()
    assert b.holding
    assert [e.session for e in w.effects if isinstance(e, fx.LoseLease)] == [a.session]
    with pytest.raises(Rejected, match="epoch is 2"):
        w.apply(ev.LeaseYielded(at=w.now, job=a.job, session=a.session, epoch=Epoch(1)))


def test_a_lost_waiter_keeps_its_place_but_is_passed_over() -> None:
    w = world()
    a = hold(w, "a1", "a")
    b, c = wait_behind(w, "b1", "b"), wait_behind(w, "c1", "c")
    w.drop(b)
    w.yield_(a)
    w.settle()
    assert c.holding
    w.reconnect(b)
    w.ask(a)
    assert w.open_requests() == [b.asking, a.asking]
    w.confirm(c)
    w.drop(b)
    w.wait(10)
    assert w.open_requests() == [a.asking]


def test_a_goodbye_ends_everything_at_once() -> None:
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    c = wait_behind(w, "c1", "c")
    w.close(b)
    w.close(a)
    w.settle()
    assert c.holding


def test_jobs_that_are_over_leave_no_record() -> None:
    """C15."""
    w = world()
    for n in range(3):
        w.close(hold(w, f"a{n}", "a", incarnation=f"{n}"))
    assert w.group.jobs == ()
    assert w.group.lost == ()


def test_a_session_that_nobody_knows_changes_nothing() -> None:
    w = world()
    before = w.group
    for event in (ev.SessionLost, ev.SessionResumed, ev.SessionClosed):
        w.apply(event(at=0.0, session=SessionId("ghost")))
    assert w.group == before


# ── faults ──


def test_a_job_that_cannot_be_restored_is_faulted_and_the_next_goes_on() -> None:
    """C10."""
    w = world("n0", "n1")
    a = hold(w, "a1", "a")
    b, c = wait_behind(w, "b1", "b"), wait_behind(w, "c1", "c")
    w.yield_(a)
    w.nodes["n0"].work("incoming")
    w.deliver(w.nodes["n0"])
    assert b.refused == [RefuseCode.JOB_FAULTED]
    assert [e.op for e in effects(w, fx.MakeResident)] == ["g/3/n0", "g/3/n1"]
    w.settle()  # the late report of epoch 2 from n1 is heard as well
    assert c.holding
    w.ask(b)
    assert b.refused == [RefuseCode.JOB_FAULTED] * 2
    w.close(b)
    again = wait_behind(w, "b2", "b", incarnation="b-2")
    w.yield_(c)
    w.settle()
    assert again.holding


def test_a_fault_is_over_when_the_agent_sees_a_new_start() -> None:
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.nodes["n0"].work("incoming")
    w.settle()
    assert w.group.jobs[-1].fault
    w.nodes["n0"].contexts["b"] = LIVE
    w.nodes["n0"].incarnations["b"] = Incarnation("b-2")
    w.close(b)
    w.nodes["n0"].push()
    w.settle()
    assert all(r.fault is None for r in w.group.jobs)


def test_an_evictee_at_fault_does_not_cost_the_incoming_job_its_turn() -> None:
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    wait_behind(w, "c1", "c")
    w.yield_(a)
    w.ask(a)
    w.nodes["n0"].work("evictee")
    w.deliver(w.nodes["n0"])
    assert a.refused == [RefuseCode.JOB_FAULTED]
    assert ReasonCode.RETRY in codes(w)
    w.settle()
    assert b.holding
    assert b.holding[1] == 3


def test_the_retries_for_a_waiter_are_bounded() -> None:
    w = world(max_attempts=2)
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    c = wait_behind(w, "c1", "c")
    w.yield_(a)
    for _ in range(2):
        epoch = w.group.epoch
        w.apply(
            ev.OpFailed(
                at=0.0, op=OpId(f"g/{epoch}/n0"), node=NodeId("n0"), culprit=JobId("z"), reason="again"
            )
        )
    assert b.refused == [RefuseCode.FAILED]
    w.settle()
    assert c.holding


def test_a_stuck_evictee_blocks_only_until_it_left_and_may_go_on_itself() -> None:
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.nodes["n0"].work("stuck")
    w.deliver(w.nodes["n0"])
    assert ReasonCode.BLOCKED in codes(w)
    assert w.open_requests() == [b.asking]
    assert w.group.occupancy == Resident(job=JobId("a"))
    c = wait_behind(w, "c1", "c")
    w.ask(a)
    assert a.holding  # it is there: nothing moves
    w.nodes["n0"].stuck = None
    w.yield_(a)  # it left its section: worth another try
    w.settle()
    assert b.holding
    assert c.asking


def test_a_stuck_evictee_that_is_gone_blocks_nobody() -> None:
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.nodes["n0"].work("stuck")
    w.deliver(w.nodes["n0"])
    del w.nodes["n0"].contexts["a"]
    w.nodes["n0"].push()
    w.settle()
    assert b.holding
    assert w.group.stuck == ()


def test_a_stuck_evictee_is_tried_again_after_a_while() -> None:
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.nodes["n0"].work("stuck")
    w.deliver(w.nodes["n0"])
    w.nodes["n0"].stuck = None
    w.wait(15)
    w.settle()
    assert b.holding


def test_a_stray_process_is_named_and_nobody_is_faulted() -> None:
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.apply(
        ev.OpFailed(
            at=0.0,
            op=OpId("g/2/n0"),
            node=NodeId("n0"),
            culprit=JobId(""),
            reason="vim",
            stuck=True,
            pid=4711,
        )
    )
    assert any("pid 4711" in r.text for r in w.last.reasons)
    assert all(r.fault is None for r in w.group.jobs)
    w.nodes["n0"].ops.clear()
    w.wait(15)
    w.settle()
    assert b.holding


def test_after_a_failure_elsewhere_no_node_is_trusted_before_it_reports() -> None:
    """C6: n0 may be moving a out at this moment although its last word says that a is loaded."""
    w = world("n0", "n1")
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.ask(a)
    w.nodes["n1"].work("incoming")
    w.deliver(w.nodes["n1"])
    assert b.refused
    assert not a.holding
    assert "g/3/n0" in [e.op for e in effects(w, fx.MakeResident)]
    w.settle()
    assert a.holding
    assert w.nodes["n0"].contexts["a"] is LIVE


def test_an_answer_to_an_older_command_does_not_stand_for_the_newer_one() -> None:
    w = world("n0", "n1")
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    c = wait_behind(w, "c1", "c")
    w.yield_(a)
    w.ask(a)
    first, second = w.nodes["n0"], w.nodes["n1"]
    second.work("incoming")
    w.deliver(second)
    assert b.refused  # c is next, under epoch 3, while n0 still works for b
    first.contexts["b"] = LIVE
    first.incarnations["b"] = Incarnation("b-1")
    w.apply(
        ev.OpSucceeded(
            at=0.0,
            op=OpId("g/2/n0"),
            node=NodeId("n0"),
            facts=NodeFacts(version=first.version + 1, contexts=(ContextFact(job=JobId("a"), state=LIVE),)),
        )
    )
    second.work("incoming")
    w.deliver(second)
    assert c.refused
    assert not a.holding
    assert "g/4/n0" in [e.op for e in effects(w, fx.MakeResident)]


def test_a_report_without_facts_is_believed_as_little_as_possible() -> None:
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.nodes["n0"].work("none")
    done = w.nodes["n0"].mail.pop()
    w.apply(replace(done, facts=None))
    assert b.holding
    w.ask(a)
    w.yield_(b)
    assert [e.op for e in effects(w, fx.MakeResident)] == ["g/3/n0"]


# ── nodes ──


def test_a_node_that_comes_back_is_told_the_same_again() -> None:
    w = world("n0", "n1")
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.detach("n1")
    w.attach("n1")
    assert [(e.op, e.node) for e in effects(w, fx.MakeResident)] == [("g/2/n1", "n1")]
    w.settle()
    assert b.holding
    assert b.holding[1] == 2


def test_a_node_that_lost_its_work_in_the_middle_of_a_swap_does_it_again() -> None:
    w = world("n0", "n1")
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.settle()
    w.confirm(b)
    w.use_device(b)
    w.settle()
    w.ask(a)
    w.yield_(b)
    first = w.nodes["n0"]
    first.work("none")
    w.deliver(first)
    w.detach("n0")
    first.contexts = {JobId("a"): SAVED, JobId("b"): LIVE}
    first.answers.clear()
    first.epoch = 2
    w.attach("n0")
    w.nodes["n1"].work("none")
    w.deliver(w.nodes["n1"])
    assert not a.holding
    w.settle()
    assert a.holding
    assert first.contexts["a"] is LIVE


def test_an_old_report_said_again_does_not_count_if_the_job_is_not_loaded_any_more() -> None:
    w = world()
    a = hold(w, "a1", "a")
    b = wait_behind(w, "b1", "b")
    w.yield_(a)
    (command,) = effects(w, fx.MakeResident)
    fact = ContextFact(job=JobId("b"), state=ContextState.LEAVING, reason="beside c, without room")
    facts = NodeFacts(version=50, contexts=(fact,))
    w.apply(ev.OpSucceeded(at=w.now, op=command.op, node=command.node, facts=facts))
    assert b.asking
    (again,) = effects(w, fx.MakeResident)
    assert (again.node, again.job) == (command.node, command.job)
    assert again.epoch > command.epoch


def test_without_an_agent_nothing_is_granted_and_after_a_while_the_node_is_left_out() -> None:
    w = world("n0", "n1")
    w.detach("n1")
    a = wait_behind(w, "a1", "a")
    w.settle()
    assert a.asking
    w.wait(60)
    w.settle()
    assert a.holding
    assert w.group.nodes == ("n0",)


def test_state_on_a_lost_node_is_reported_and_welcome_back() -> None:
    w = world("n0", "n1")
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.settle()
    w.confirm(b)
    w.detach("n1")
    w.wait(60)
    w.ask(a)
    assert a.refused == [RefuseCode.NODE_LOST]
    w.attach("n1")
    w.ask(a)
    w.yield_(b)
    w.settle()
    assert a.holding


def test_the_last_node_takes_the_queue_with_it() -> None:
    w = world()
    hold(w, "a1", "a")
    b = wait_behind(w, "b1", "b")
    a = w.clients[SessionId("a1")]
    w.apply(ev.NodesChanged(at=0.0, nodes=()))
    w.yield_(a)
    assert b.refused == [RefuseCode.GROUP_EMPTY]
    assert isinstance(w.group.occupancy, Resident | Empty)


def test_epochs_go_on_above_what_any_agent_has_seen() -> None:
    """A restored backup of the store must not fence the living."""
    w = World("n0")
    w.nodes["n0"].epoch = 41
    w.attach("n0")
    a = w.client("a1", job="a")
    w.ask(a)
    assert effects(w, fx.MakeResident)  # the agent may still be at work for somebody whom the store forgot
    w.settle()
    assert a.holding
    assert a.holding[1] == 42


def test_a_node_that_joins_again_may_still_be_at_work_for_a_swap_that_is_over() -> None:
    w = world("n0", "n1")
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.abandon(b)
    w.detach("n1")  # with the command for b not begun
    w.wait(60)
    w.settle_only("n0")
    w.attach("n1")  # it says that a is loaded, and is about to move a out
    w.ask(a)
    assert not a.holding
    w.settle()
    assert a.holding
    assert w.nodes["n1"].contexts["a"] is LIVE


def test_a_request_that_waits_for_another_group_keeps_its_share_when_its_process_yields() -> None:
    """Threads of one process: one has the lock alone; one asks for two groups, and has this one so far."""
    w = world()
    a = hold(w, "a1", "a")
    alone = a.holding
    w.ask(a, more=True)
    b = wait_behind(w, "b1", "b")
    assert alone
    first = ev.LeaseYielded(at=w.now, job=a.job, session=a.session, epoch=alone[1])
    w.apply(first)
    assert isinstance(w.group.occupancy, Held), "else the request, once complete, would run without the lock"
    w.apply(ev.AcquireCompleted(at=w.now, request=RequestId("a1/2")))
    w.apply(ev.GrantConfirmed(at=w.now, request=RequestId("a1/2")))
    a.holding = None
    w.apply(first)
    w.settle()
    assert b.holding


def test_an_overrun_world_of_which_nobody_holds_any_more_ends() -> None:
    w = world()
    one = hold(w, "a1", "a", world=2)
    b = wait_behind(w, "b1", "b")
    w.yield_(one)
    w.wait(301)
    w.settle()
    assert b.holding


def test_a_swap_begins_again_above_the_epoch_of_an_agent_that_knows_better() -> None:
    w = World("n0", "n1")
    w.attach("n0")
    b = wait_behind(w, "b1", "b")
    w.nodes["n1"].epoch = 41
    w.attach("n1")
    assert w.group.epoch == 42
    w.settle()
    assert b.holding
    assert b.holding[1] == 42


def test_a_backup_of_the_middle_of_a_lease_faults_nobody() -> None:
    """What it says is held was over long ago: the agent has seen later leases."""
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    backup = w.group
    w.yield_(a)
    w.settle()
    assert b.holding
    w.confirm(b)
    w.use_device(b)
    w.settle()
    w.yield_(b)
    w.group = backup
    w.restart()
    w.attach("n0")
    w.settle()
    for client in (a, b):
        w.reconnect(client)
    w.settle()
    w.apply(ev.AcquireAbandoned(at=w.now, request=RequestId("b1/1")))  # what the backup has of it is over
    w.ask(a)
    w.settle()
    assert a.holding
    assert a.holding[1] > 2
    w.confirm(a)
    w.yield_(a)
    w.ask(b)
    w.settle()
    assert b.holding
    assert (a.refused, b.refused) == ([], [])


@pytest.mark.parametrize("declared", [False, True])
def test_a_node_that_served_others_joins_in_the_middle_of_a_lease(declared: bool) -> None:
    w = World("n0", "n1")
    w.nodes["n1"].epoch = 41
    w.group = replace(w.group, views=tuple(v for v in w.group.views if v.node == "n0"))
    w.attach("n0")
    a = hold(w, "a1", "a")
    if declared:
        w.apply(ev.NodesChanged(at=w.now, nodes=(NodeId("n0"), NodeId("n1"))))
    for _ in range(2):
        w.attach("n1")
        w.settle()
        assert a.holding
        assert a.refused == []
        w.detach("n1")
    w.attach("n1")
    w.yield_(a)
    b = wait_behind(w, "b1", "b")
    w.settle()
    assert b.holding
    assert b.holding[1] == 42


def test_a_node_whose_word_is_older_changes_nothing() -> None:
    w = world()
    hold(w, "a1", "a")
    before = w.group
    w.apply(ev.NodeReported(at=0.0, node=NodeId("n0"), facts=NodeFacts(version=0)))
    assert w.group == before
    w.apply(ev.NodeReported(at=0.0, node=NodeId("elsewhere"), facts=NodeFacts(version=9)))
    assert w.group == before


# ── time ──


def test_a_long_holder_is_asked_once_to_give_way() -> None:
    w = world()
    a = hold(w, "a1", "a")
    w.wait(30)
    wait_behind(w, "b1", "b")
    w.wait(19.9)
    assert ReasonCode.ASKED_TO_YIELD not in [r.code for r in w.reasons]
    w.wait(0.2)
    (asked,) = effects(w, fx.AskYield)
    assert (asked.session, asked.waiting, asked.longest_wait) == (a.session, 1, pytest.approx(20))
    w.wait(100)
    assert [r.code for r in w.reasons].count(ReasonCode.ASKED_TO_YIELD) == 1


def test_the_longest_hold_counts_only_while_somebody_waits() -> None:
    w = world()
    a = hold(w, "a1", "a")
    w.wait(1000)
    b = wait_behind(w, "b1", "b")
    w.wait(200)
    w.abandon(b)
    w.wait(1000)
    w.ask(b)
    w.wait(99)
    assert a.holding
    w.wait(2)
    w.settle()
    assert not a.holding
    assert b.holding
    assert ReasonCode.OVERRAN in [r.code for r in w.reasons]


def test_on_overrun_warn_only_warns() -> None:
    w = world(on_overrun="warn")
    a = hold(w, "a1", "a")
    wait_behind(w, "b1", "b")
    w.wait(1000)
    assert a.holding
    assert [r.code for r in w.reasons].count(ReasonCode.OVERRAN) == 1


def test_a_restart_keeps_leases_places_and_gives_everybody_a_full_grace() -> None:
    """C11."""
    w = world("n0")
    a = hold(w, "a1", "a")
    queue = [wait_behind(w, f"{j}1", j) for j in "bcd"]
    w.wait(9)
    w.restart()
    for client in [*queue[::-1], a]:
        w.reconnect(client)
    w.attach("n0")
    assert a.holding
    assert w.open_requests() == [c.asking for c in queue]
    w.yield_(a)
    for client in queue:
        w.settle()
        assert client.holding
        w.yield_(client)


def test_who_does_not_return_after_a_restart_is_given_up() -> None:
    w = world()
    hold(w, "a1", "a")
    b = wait_behind(w, "b1", "b")
    w.restart()
    w.attach("n0")
    w.reconnect(b)
    w.wait(9.9)
    assert b.asking
    w.wait(0.2)
    w.settle()
    assert b.holding


def test_after_a_restart_grants_are_confirmed_and_holders_asked_anew() -> None:
    w = world(quantum=2.0)
    a = w.client("a1", job="a")
    w.ask(a)
    b = wait_behind(w, "b1", "b")
    w.wait(3)
    assert effects(w, fx.AskYield)
    w.restart()
    w.attach("n0")
    w.wait(6)  # longer than the time to confirm, within the grace
    w.reconnect(a)
    w.reconnect(b)
    assert a.holding
    w.confirm(a)
    w.wait(3)
    assert [type(e) for e in w.effects].count(fx.AskYield) == 2


def test_a_restart_in_the_middle_of_a_swap_names_the_same_operation() -> None:
    w = world()
    a, b = hold(w, "a1", "a"), wait_behind(w, "b1", "b")
    w.yield_(a)
    w.restart()
    w.reconnect(b)
    w.attach("n0")
    assert [e.op for e in effects(w, fx.MakeResident)] == ["g/2/n0"]
    w.settle()
    assert b.holding


def test_after_a_stall_every_deadline_has_its_full_time() -> None:
    w = world("n0", "n1")
    a = hold(w, "a1", "a")
    wait_behind(w, "b1", "b")
    w.drop(a)
    w.detach("n1")
    later = stalled(w.group, 500.0)
    assert [s.deadline for s in later.lost] == [510.0]
    assert {v.detached_at for v in later.views if not v.attached} == {500.0}


def test_what_was_saved_late_leaves_the_time_to_confirm_it_and_puts_nothing_else_off() -> None:
    w = world("n0", "n1")
    hold(w, "a1", "a")
    w.detach("n1")
    before = w.group
    w.ask(w.client("a2", job="a"))
    wait_behind(w, "b1", "b")
    late = told_late(before, w.group, 507.0)
    assert isinstance(late.occupancy, Held)
    assert [h.confirm_by for h in late.occupancy.holders] == [None, 507.0 + RULES.confirm_timeout]
    assert late == replace(w.group, occupancy=replace(w.group.occupancy, holders=late.occupancy.holders))
    assert told_late(w.group, w.group, 507.0) is w.group, "it was told before"


def test_fewest_swaps_serves_the_resident_first() -> None:
    w = World("n0", policy=FewestSwaps(max_wait=1000))
    w.attach("n0")
    a = hold(w, "a1", "a")
    two = hold(w, "a2", "a")
    wait_behind(w, "b1", "b")
    w.yield_(a)
    w.ask(a)
    w.yield_(two)
    assert a.holding
    assert w.group.swaps == 0


def test_two_loaded_jobs_at_the_start_do_not_confuse_the_lock() -> None:
    """C3: nobody holds, yet two jobs are on the device."""
    w = World("n0")
    node = w.nodes[NodeId("n0")]
    node.contexts = {JobId("a"): LIVE, JobId("b"): LIVE}
    node.incarnations = {JobId("a"): Incarnation("a-1"), JobId("b"): Incarnation("b-1")}
    w.attach("n0")
    assert w.group.occupancy == Resident(job=JobId("a"))
    c = w.client("c1", job="c")
    w.ask(c)
    w.settle()
    assert c.holding


def test_after_a_restart_nobody_goes_before_one_who_may_be_about_to_return() -> None:
    """C11, with the lock free: the yield of the holder is the first thing that the new process hears."""
    w = world()
    a = hold(w, "a1", "a")
    queue = [wait_behind(w, f"{j}1", j) for j in "bcd"]
    w.restart()
    w.attach("n0")
    w.reconnect(a)
    w.yield_(a)
    for client in queue[::-1]:  # the last of the queue returns first
        assert not [e for e in w.effects if isinstance(e, fx.MakeResident)]
        w.reconnect(client)
    for client in queue:
        w.settle()
        assert client.holding
        w.yield_(client)


def test_after_a_restart_those_ahead_are_waited_for_only_a_moment() -> None:
    w = world(resettle=2.0)
    a = hold(w, "a1", "a")
    b, c, d = (wait_behind(w, f"{j}1", j) for j in "bcd")
    w.restart()
    w.attach("n0")
    for client in (a, d, b):
        w.reconnect(client)
    w.yield_(a)
    w.settle()
    assert b.holding, "nobody lost is ahead of it"
    w.yield_(b)
    w.settle()
    assert not d.holding, "c may be about to return"
    w.wait(2.1)
    w.settle()
    assert d.holding
    w.reconnect(c)
    assert w.open_requests() == [c.asking]


def test_a_client_that_is_lost_long_after_a_restart_is_passed_over_at_once() -> None:
    w = world()
    a = hold(w, "a1", "a")
    b, c = wait_behind(w, "b1", "b"), wait_behind(w, "c1", "c")
    w.restart()
    w.attach("n0")
    for client in (a, b, c):
        w.reconnect(client)
    w.drop(b)
    w.yield_(a)
    w.settle()
    assert c.holding


def test_a_job_whose_living_processes_lost_their_state_is_refused_even_if_nobody_was_told() -> None:
    """The report may come after its swap was given up, or never: the node's facts say it as well."""
    w = world("n0")
    a = hold(w, "a1", "a")
    w.use_device(a)
    b = wait_behind(w, "b1", "b")
    w.yield_(a)
    w.settle()
    assert b.holding
    w.nodes["n0"].contexts[JobId("a")] = ContextState.LOST
    w.nodes["n0"].push()
    w.settle()
    w.yield_(b)
    w.ask(a)
    w.settle()
    assert not a.holding, "it would go on without its state"
    assert a.refused == [RefuseCode.JOB_FAULTED]
    again = w.client("a2", job="a", incarnation="second")
    w.close(a)
    w.ask(again)
    w.settle()
    assert again.holding, "another start of it begins afresh"
