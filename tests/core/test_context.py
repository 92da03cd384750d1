"""What one node decides, rule by rule. Figures are MiB; the device has 100 unless said otherwise."""

import msgspec
import pytest
from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.context import Holdings, NodeRules, facts, find, mib, next_deadline, restarted, resume, step
from coslice.core.events import ContextState
from coslice.core.holdings import Live, Lost, Saved
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, MemberId, NodeId, OpId
from coslice.core.invariants_node import violations_of_step
from coslice.core.outcome import Rejected

MIB = 1 << 20
A, B, C = JobId("a"), JobId("b"), JobId("c")


class Node:
    """One node's holdings, and all effects since the last look."""

    def __init__(self, *, device: int = 100, host: int = 0, rules: NodeRules | None = None) -> None:
        self.holdings = Holdings(
            group=GroupId("g"),
            node=NodeId("n"),
            device_budget=device * MIB,
            host_budget=host * MIB,
            rules=rules or NodeRules(),
        )
        self.at = 0.0
        self.epoch = 0

    def hear(self, event: ev.NodeEvent) -> list[fx.NodeEffect]:
        """The effects of one event, facts pushed left out (``violations_of_step`` checks those)."""
        taken = step(self.holdings, event)
        assert violations_of_step(self.holdings, event, taken) == []
        self.holdings, self.reasons = taken.state, taken.reasons
        return [e for e in taken.effects if not isinstance(e, fx.PushFacts)]

    def tick(self, seconds: float = 1.0) -> float:
        self.at += seconds
        return self.at

    def register(
        self, job: JobId, size: int, *, pid: int = 0, start: str = "i1", parked: bool = False, need: int = 0
    ) -> list[fx.NodeEffect]:
        pid = pid or 1 + ord(job[0])
        return self.hear(
            ev.MemberRegistered(
                at=self.tick(),
                job=job,
                incarnation=Incarnation(start),
                member=member(job, pid=pid, start=start),
                pid=pid,
                start_time=pid * 10,
                bytes=size * MIB,
                need=need * MIB,
                parked=parked,
            )
        )

    def command(self, job: JobId, *, need: int = 0, epoch: int | None = None) -> list[fx.NodeEffect]:
        self.epoch = epoch if epoch is not None else self.epoch + 1
        return self.hear(
            ev.MakeResidentCommanded(
                at=self.tick(), op=self.op, epoch=Epoch(self.epoch), job=job, need=need * MIB
            )
        )

    @property
    def op(self) -> OpId:
        return OpId(f"g/{self.epoch}/n")

    def snapshot_done(self, job: JobId, size: int, *, residual: int = 0) -> list[fx.NodeEffect]:
        return self.hear(
            ev.SnapshotSucceeded(
                at=self.tick(), job=job, op=self.op, bytes=size * MIB, residual=residual * MIB, seconds=1.0
            )
        )

    def snapshot_failed(self, job: JobId, **how: object) -> list[fx.NodeEffect]:
        event = ev.SnapshotFailed(at=self.tick(), job=job, op=self.op, reason="it flaked")
        return self.hear(replace(event, **how))

    def restore_done(self, job: JobId, size: int) -> list[fx.NodeEffect]:
        return self.hear(
            ev.RestoreSucceeded(at=self.tick(), job=job, op=self.op, bytes=size * MIB, seconds=1.0)
        )

    def restore_failed(self, job: JobId, **how: object) -> list[fx.NodeEffect]:
        event = ev.RestoreFailed(at=self.tick(), job=job, op=self.op, reason="it flaked")
        return self.hear(replace(event, **how))

    def measure(self, job: JobId, size: int) -> list[fx.NodeEffect]:
        return self.hear(ev.UsageMeasured(at=self.tick(), job=job, bytes=size * MIB))

    def gone(self, job: JobId, *, pid: int = 0, start: str = "i1") -> list[fx.NodeEffect]:
        pid = pid or 1 + ord(job[0])
        return self.hear(ev.MemberGone(at=self.tick(), job=job, member=member(job, pid=pid, start=start)))

    def wake(self) -> list[fx.NodeEffect]:
        """Let time pass until the deadline that the holdings ask for."""
        deadline = next_deadline(self.holdings)
        assert deadline is not None
        self.at = max(self.at, deadline)
        return self.hear(ev.DeadlinePassed(at=self.at))

    def state(self, job: JobId) -> ContextState | None:
        return next((c.state for c in facts(self.holdings).contexts if c.job == job), None)


def freed(job: JobId, *, pid: int = 0, start: str = "i1") -> fx.FreeBuffers:
    return fx.FreeBuffers(job=job, members=(member(job, pid=pid or 1 + ord(job[0]), start=start),))


def member(job: JobId, *, pid: int, start: str) -> MemberId:
    return MemberId(f"{job}/{start}/{pid}/{pid * 10}")


def snapshot(node: Node, job: JobId, attempt: int = 1) -> fx.RunSnapshot:
    return fx.RunSnapshot(op=node.op, job=job, attempt=attempt)


def restore(node: Node, job: JobId, attempt: int = 1) -> fx.RunRestore:
    return fx.RunRestore(op=node.op, job=job, attempt=attempt)


def done(effects: list[fx.NodeEffect]) -> fx.ReportDone:
    (report,) = (e for e in effects if isinstance(e, fx.ReportDone))
    return report


def failed(effects: list[fx.NodeEffect]) -> fx.ReportFailed:
    (report,) = (e for e in effects if isinstance(e, fx.ReportFailed))
    return report


def swapped_out(device: int = 100, *, rules: NodeRules | None = None, host: int = 0) -> Node:
    """``a`` (60) is in host memory, ``b`` (60) on the device."""
    node = Node(device=device, rules=rules, host=host)
    node.command(A)
    node.register(A, 60)
    node.command(B)
    node.snapshot_done(A, 60)
    node.register(B, 60)
    return node


# ── who leaves ─────────────────────────────────────────────────────────────


def test_a_job_without_processes_gets_an_empty_device() -> None:
    report = done(Node().command(A))
    assert not report.restored
    assert report.bytes_in == report.bytes_out == 0


def test_a_job_that_never_left_pays_nothing_and_is_told_so() -> None:
    node = Node()
    node.register(A, 60)
    report = done(node.command(A))
    assert not report.restored
    assert "already resident" in report.reason


def test_a_full_swap_reports_what_moved() -> None:
    node = swapped_out()
    assert node.command(A) == [snapshot(node, B)]
    assert node.state(B) is ContextState.LEAVING
    assert node.snapshot_done(B, 60) == [restore(node, A)]
    assert (node.state(A), node.state(B)) == (ContextState.RETURNING, ContextState.SAVED)
    report = done(node.restore_done(A, 60))
    assert report.restored
    assert (report.bytes_in, report.bytes_out) == (60 * MIB, 60 * MIB)
    assert node.state(A) is ContextState.LIVE


def test_nothing_moves_when_both_fit_and_the_figures_say_why() -> None:
    node = Node(device=512)
    node.register(A, 60, need=60)
    node.register(B, 40, need=40)
    report = done(node.command(B))
    assert "both fit: 60 MiB + 40 MiB of 512 MiB" in report.reason
    assert node.state(A) is node.state(B) is ContextState.LIVE


def test_a_job_that_comes_back_beside_another_moves_only_itself() -> None:
    node = Node(device=512)
    node.register(A, 60, need=60)
    node.register(B, 40, parked=True, need=40)
    assert node.command(B) == [restore(node, B)]
    report = done(node.restore_done(B, 40))
    assert (report.bytes_in, report.bytes_out) == (40 * MIB, 0)
    assert "both fit" in report.reason


def test_who_is_crowded_is_told_from_who_leaves() -> None:
    node = Node()
    node.register(A, 60, need=60)
    node.register(B, 60, need=60)

    def said() -> list[tuple[ContextState, bool]]:
        return [(c.state, c.crowded) for c in facts(node.holdings).contexts]

    assert said() == [(ContextState.LEAVING, True), (ContextState.LEAVING, True)]
    assert node.command(A) == [snapshot(node, B)]
    assert said() == [(ContextState.LEAVING, True), (ContextState.LEAVING, False)]
    node.snapshot_done(B, 60)
    assert said() == [(ContextState.LIVE, False), (ContextState.SAVED, False)]


def test_the_least_recently_used_leaves_first_and_only_as_many_as_needed() -> None:
    node = Node()
    node.register(C, 50, parked=True, need=50)
    node.register(A, 30, need=30)
    node.register(B, 30, need=30)
    node.command(B)
    node.command(A)
    assert node.command(C) == [snapshot(node, B)]
    assert node.snapshot_done(B, 30) == [restore(node, C)]
    node.restore_done(C, 50)
    assert node.state(A) is ContextState.LIVE


def test_an_unknown_need_evicts_everything() -> None:
    node = Node(device=1000)
    node.register(A, 10)
    node.register(B, 10)
    assert node.command(C) == [snapshot(node, A)]
    assert node.snapshot_done(A, 10) == [snapshot(node, B)]
    assert done(node.snapshot_done(B, 10))


def test_what_a_job_registered_is_not_what_it_will_use_until_it_had_a_turn() -> None:
    """Two jobs that register 10 and grow to 60 must not be left side by side on a device of 100."""
    node = Node(device=100)
    node.register(A, 10)
    node.register(B, 10)
    assert node.command(B) == [snapshot(node, A)]
    node.snapshot_done(A, 10)
    node.measure(B, 60)
    assert node.command(A) == [snapshot(node, B)], "A declared nothing: it may grow to anything"
    node.snapshot_done(B, 10)
    node.restore_done(A, 10)
    node.measure(A, 12)
    assert node.command(B) == [snapshot(node, A)], "what A used so far may be its building only"


def test_a_state_that_cannot_fit_is_not_restored_for_want_of_a_declared_need() -> None:
    node = Node(device=100)
    node.register(A, 60)
    node.register(B, 95, parked=True)
    node.command(B)
    assert node.snapshot_done(A, 60, residual=20) == [], "95 beside 20 that A leaves, of 100"


def test_a_declared_need_of_a_job_without_processes_evicts_only_what_is_in_its_way() -> None:
    node = Node(device=100)
    node.register(A, 60, need=60)
    assert "nothing of c" in done(node.command(C, need=40)).reason
    assert node.command(C, need=41) == [snapshot(node, A)]


def test_a_device_of_unknown_size_holds_one_job() -> None:
    node = Node(device=0)
    node.register(A, 1)
    node.register(B, 1)
    assert node.command(B) == [snapshot(node, A)]


def test_need_is_the_most_a_job_was_seen_to_use() -> None:
    node = swapped_out(device=130)
    node.measure(B, 80)
    node.measure(B, 50)
    node.command(A, need=60)
    assert node.snapshot_done(B, 60) == [restore(node, A)], "80 + 60 of 130 do not fit"
    node.restore_done(A, 60)
    assert node.command(B) == [snapshot(node, A)]


def test_a_live_job_keeps_the_room_of_its_peak_for_it_may_be_granted_without_a_command() -> None:
    node = Node()
    node.register(A, 30)
    node.measure(A, 70)
    node.measure(A, 30)
    assert node.command(B, need=40) == [snapshot(node, A)]


def test_what_parked_jobs_leave_behind_counts() -> None:
    node = Node()
    node.register(A, 40)
    node.command(B, need=90)
    node.snapshot_done(A, 40, residual=10)
    node.register(B, 60)
    node.command(C, need=40)  # 60 + 40 + 10 of 100
    assert node.state(B) is ContextState.LEAVING


def test_a_job_larger_than_the_device_fails_before_anybody_is_moved() -> None:
    node = Node()
    node.register(A, 60)
    report = failed(node.command(B, need=101))
    assert report.culprit == B
    assert not report.stuck
    assert "101 MiB" in report.reason
    assert "100 MiB" in report.reason
    assert node.state(A) is ContextState.LIVE


def test_leftovers_of_parked_jobs_get_some_time_to_go_and_then_fail_the_newcomer() -> None:
    for goes in (True, False):
        node = Node()
        node.register(A, 60)
        node.register(B, 95, parked=True)
        node.command(B)
        assert node.snapshot_done(A, 60, residual=20) == []
        if goes:
            assert node.measure(A, 1) == [restore(node, B)]
        else:
            report = failed(node.wake())
            assert report.culprit == B
            assert "20 MiB" in report.reason


def test_a_peak_counts_also_if_it_was_reached_under_a_grant_that_needed_no_command() -> None:
    node = Node()
    node.register(A, 40)
    node.measure(A, 95)
    node.command(B)
    done(node.snapshot_done(A, 40, residual=2))
    node.register(B, 50)
    node.command(A)
    assert node.snapshot_done(B, 50, residual=10) == [], "95 beside 10 that B leaves, of 100"


def test_what_is_there_and_what_comes_back_are_counted_together() -> None:
    node = Node()
    node.register(A, 30)
    node.command(A)
    node.measure(A, 60)  # the process uses twice what it registered
    node.register(A, 30, pid=7, parked=True)
    node.register(B, 20, need=20)
    assert node.command(A) == [snapshot(node, B)], "60 + 30 beside 20, of 100"


def test_no_room_in_host_memory_refuses_before_anything_moves() -> None:
    node = swapped_out(host=100)
    report = failed(node.command(A))
    assert report.culprit == A
    assert "host memory" in report.reason
    assert node.state(B) is ContextState.LIVE


def test_two_jobs_that_started_without_the_lock_heal_at_the_next_grant() -> None:
    node = Node()
    node.register(A, 60)
    node.register(B, 60)
    assert node.state(A) is node.state(B) is ContextState.LEAVING, "neither may be granted without a command"
    assert node.command(B) == [snapshot(node, A)]
    node.snapshot_done(A, 60)
    assert node.state(B) is ContextState.LIVE


# ── commands ───────────────────────────────────────────────────────────────


def test_a_repeated_command_is_done_once_and_answered_each_time() -> None:
    node = swapped_out()
    assert node.command(A) == [snapshot(node, B)]
    assert node.command(A, epoch=node.epoch) == []
    node.snapshot_done(B, 60)
    report = done(node.restore_done(A, 60))
    assert node.command(A, epoch=node.epoch) == [report]


def test_a_command_of_an_older_epoch_is_rejected_and_changes_nothing() -> None:
    node = swapped_out()
    before = node.holdings
    with pytest.raises(Rejected) as caught:
        node.command(A, epoch=1)
    assert caught.value.code == "stale_lease"
    assert node.holdings == before


def test_a_newer_epoch_waits_for_the_running_operation_and_takes_the_place_of_an_older_one() -> None:
    node = swapped_out()
    node.register(C, 60, parked=True)
    node.command(A)
    first = node.op
    assert node.command(B) == []
    second = node.epoch
    assert node.command(C) == []
    third = node.op
    with pytest.raises(Rejected):
        node.command(B, epoch=second)
    node.epoch = 3
    assert node.op == first
    node.snapshot_done(B, 60)
    effects = node.restore_done(A, 60)
    assert done(effects).op == first
    assert effects[-1] == fx.RunSnapshot(op=third, job=A, attempt=1)


# ── a job that does not leave ──────────────────────────────────────────────


def test_one_flake_in_a_snapshot_costs_a_retry_and_no_failure() -> None:
    node = swapped_out()
    node.command(A)
    assert node.snapshot_failed(B) == [snapshot(node, B, 2)]
    assert node.snapshot_done(B, 60) == [restore(node, A)]


def test_nothing_is_restored_after_a_failed_snapshot_until_the_memory_is_free() -> None:
    node = swapped_out()
    node.command(A)
    seen: list[fx.NodeEffect] = []
    for _ in range(6):
        seen += node.snapshot_failed(B)
        if next_deadline(node.holdings) is not None:
            seen += node.wake()
    assert not any(isinstance(e, fx.RunRestore) for e in seen)


def test_a_stuck_job_is_killed_after_its_grace_and_the_next_one_gets_the_device() -> None:
    node = swapped_out(rules=NodeRules(retries=1, stuck_grace=60.0))
    node.command(A)
    node.snapshot_failed(B)
    began = node.at
    effects = node.snapshot_failed(B)
    while not effects or not isinstance(effects[0], fx.KillJob):
        effects = node.wake()
    assert node.at - began >= 60.0
    assert effects == [fx.KillJob(job=B, reason=effects[0].reason)]
    assert node.gone(B) == [freed(B), restore(node, A)]
    lost = find(node.holdings, B)
    assert lost is not None
    assert isinstance(lost.place, Lost)
    assert "it flaked" in lost.place.reason
    assert done(node.restore_done(A, 60)).restored


def test_a_stuck_job_that_leaves_within_its_grace_is_not_killed() -> None:
    node = swapped_out(rules=NodeRules(retries=0))
    node.command(A)
    node.snapshot_failed(B, busy=True)
    assert node.wake() == [snapshot(node, B, 2)]
    assert node.snapshot_done(B, 60) == [restore(node, A)]


def test_with_on_stuck_wait_the_evictee_is_blamed_and_stays() -> None:
    node = swapped_out(rules=NodeRules(retries=1, on_stuck="wait"))
    node.command(A)
    node.snapshot_failed(B)
    report = failed(node.snapshot_failed(B))
    assert (report.culprit, report.stuck, report.pid) == (B, True, 1 + ord("b"))
    assert node.state(B) is ContextState.LEAVING, "half of it may have left"
    assert node.command(B) == [restore(node, B)], "so its own grant brings it back first"
    assert done(node.restore_done(B, 60)).restored


def test_a_busy_job_that_nobody_touched_stays_whole() -> None:
    node = swapped_out(rules=NodeRules(retries=0, on_stuck="wait"))
    node.command(A)
    assert failed(node.snapshot_failed(B, busy=True)).culprit == B
    assert node.state(B) is ContextState.LIVE


def test_host_memory_running_out_blames_the_newcomer_and_kills_nobody() -> None:
    node = swapped_out()
    node.command(A)
    report = failed(node.snapshot_failed(B, no_room=True))
    assert report.culprit == A
    assert node.state(B) is ContextState.LIVE


def test_a_backend_that_never_answers_counts_as_failed() -> None:
    node = swapped_out()
    node.command(A)
    assert node.wake() == [snapshot(node, B, 2)]


def test_the_late_answer_of_an_earlier_attempt_is_not_taken_for_the_present_one() -> None:
    node = swapped_out()
    node.command(A)
    node.wake()
    before = node.holdings
    node.snapshot_failed(B, attempt=1)
    assert node.holdings == before
    node.snapshot_failed(B, attempt=2)
    assert node.wake() == [snapshot(node, B, 3)]


def test_killing_that_does_not_help_is_reported_as_stuck() -> None:
    node = swapped_out(rules=NodeRules(retries=0, stuck_grace=0.0))
    node.command(A)
    assert isinstance(node.snapshot_failed(B)[0], fx.KillJob)
    report = failed(node.wake())
    assert (report.culprit, report.stuck) == (B, True)


# ── a job that does not come back ──────────────────────────────────────────


def test_a_restore_is_tried_again_unless_the_state_is_lost() -> None:
    node = swapped_out()
    node.command(A)
    node.snapshot_done(B, 60)
    assert node.restore_failed(A) == [restore(node, A, 2)]
    effects = node.restore_failed(A, lost=True)
    assert failed(effects).culprit == A
    assert freed(A) in effects
    assert node.state(A) is ContextState.LOST
    assert node.state(B) is ContextState.SAVED


def test_a_restore_that_keeps_failing_faults_the_incoming_job_only() -> None:
    node = swapped_out(rules=NodeRules(retries=1))
    node.command(A)
    node.snapshot_done(B, 60)
    node.restore_failed(A)
    assert failed(node.restore_failed(A)).culprit == A
    assert node.command(B) == [snapshot(node, A)], "what came in half-way has to leave first"
    assert node.snapshot_done(A, 60) == [restore(node, B)]


def test_a_lost_job_whose_processes_linger_on_the_device_is_in_the_way_until_they_end() -> None:
    node = swapped_out(rules=NodeRules(stuck_grace=10.0))
    node.command(A)
    node.snapshot_done(B, 60)
    node.restore_failed(A, lost=True)
    assert node.command(B) == [], "60 may still be there"
    assert node.wake() == [fx.KillJob(job=A, reason=node.reasons[0].text.removeprefix("killing "))]
    assert restore(node, B) in node.gone(A)


def test_a_lost_job_whose_memory_is_seen_to_be_gone_is_in_nobodys_way() -> None:
    node = swapped_out()
    node.command(A)
    node.snapshot_done(B, 60)
    node.restore_failed(A, lost=True)
    node.measure(A, 0)
    assert node.command(B) == [restore(node, B)]


def test_a_half_restored_job_is_not_taken_for_saved_because_of_what_its_processes_said_before() -> None:
    node = swapped_out(rules=NodeRules(retries=0))
    node.command(A)
    node.snapshot_done(B, 60)
    failed(node.restore_failed(A))
    node.register(A, 10, pid=7, parked=True)
    assert node.state(A) is ContextState.LEAVING, "a part of it may be on the device"
    node.gone(A, pid=7)
    assert node.state(A) is ContextState.LEAVING
    assert node.command(B) == [snapshot(node, A)]


# ── processes ──────────────────────────────────────────────────────────────


def test_a_finished_job_has_nothing_to_save() -> None:
    node = Node()
    node.register(A, 60)
    assert node.gone(A) == [freed(A)]
    assert node.state(A) is None
    assert done(node.command(B)).bytes_out == 0


def test_a_job_that_ends_while_it_leaves_has_left() -> None:
    node = swapped_out()
    node.command(A)
    assert node.gone(B) == [freed(B), restore(node, A)]


def test_a_job_that_ends_while_it_comes_back_is_reported_with_an_empty_device() -> None:
    node = swapped_out()
    node.command(A)
    node.snapshot_done(B, 60)
    report = done(node.gone(A))
    assert not report.restored
    assert node.state(A) is None


def test_the_saved_state_of_a_dead_job_is_dropped_with_a_reason() -> None:
    node = swapped_out()
    assert node.gone(A) == [freed(A)]
    assert any(r.code is fx.ReasonCode.LOST for r in node.reasons)
    assert node.state(A) is None


def test_a_process_that_comes_back_says_where_its_state_is() -> None:
    node = Node()
    node.register(A, 60)
    node.register(A, 60, parked=True)
    assert node.state(A) is ContextState.SAVED
    node.register(A, 60)
    assert node.state(A) is ContextState.LIVE


def test_another_start_of_a_job_is_refused_while_the_first_one_runs() -> None:
    node = Node()
    node.register(A, 60)
    with pytest.raises(Rejected) as caught:
        node.register(A, 60, pid=7, start="i2")
    assert caught.value.code == "job_running"
    assert caught.value.data["pid"] == str(1 + ord("a"))


def test_a_new_start_takes_the_place_of_one_that_is_lost_or_was_not_heard_of_again() -> None:
    node = Node()
    node.register(A, 60, parked=True)
    node.holdings = restarted(node.holdings, node.at)
    assert freed(A) in node.register(A, 50, pid=7, start="i2")
    context = find(node.holdings, A)
    assert context is not None
    assert (context.incarnation, context.place) == ("i2", Live())
    assert any(r.code is fx.ReasonCode.LOST for r in node.reasons)


def test_a_new_start_keeps_what_it_has_set_aside_when_the_old_one_is_ended() -> None:
    node = Node()
    node.register(A, 60, parked=True)
    node.holdings = restarted(node.holdings, node.at)
    effects = node.register(A, 50, pid=7, start="i2", parked=True)
    assert [e for e in effects if isinstance(e, fx.FreeBuffers)] == [freed(A, start="i1")]
    assert node.state(A) is ContextState.SAVED
    node.hear(ev.JobKilled(at=node.tick(), job=A, reason="it used 101 MiB of 100 MiB"))
    assert node.state(A) is ContextState.LOST
    node.register(A, 50, pid=8, start="i3")
    assert node.state(A) is ContextState.LIVE


def test_news_of_a_killed_older_start_does_not_touch_the_present_one() -> None:
    node = Node()
    node.register(A, 50, start="i2")
    node.hear(ev.JobKilled(at=node.tick(), job=A, reason="too large", incarnation=Incarnation("i1")))
    assert node.state(A) is ContextState.LIVE


def test_a_job_is_the_whole_of_its_processes() -> None:
    node = Node()
    node.register(A, 20, pid=1)
    node.register(A, 30, pid=2)
    context = find(node.holdings, A)
    assert context is not None
    assert context.bytes == 50 * MIB
    node.register(B, 60, parked=True)
    node.command(B)
    node.gone(A, pid=1)
    assert node.state(A) is ContextState.LEAVING, "the other process still moves"
    assert node.snapshot_done(A, 30) == [restore(node, B)]


def test_a_process_that_joins_during_the_snapshot_is_moved_too() -> None:
    node = Node()
    node.register(A, 50, pid=1)
    node.register(B, 60, parked=True)
    node.command(B)
    node.register(A, 30, pid=2)
    assert node.snapshot_done(A, 50) == [snapshot(node, A)]
    assert node.snapshot_done(A, 80) == [restore(node, B)]


def test_a_forgotten_job_goes_once_its_processes_are_gone() -> None:
    node = Node()
    node.register(A, 60)
    node.hear(ev.JobForgotten(at=node.tick(), job=A))
    assert node.state(A) is ContextState.LIVE
    node.hear(ev.JobKilled(at=node.tick(), job=A, reason="too large"))
    node.hear(ev.JobForgotten(at=node.tick(), job=A))
    assert node.state(A) is None


def test_reasons_of_old_losses_do_not_pile_up() -> None:
    node = Node()
    for n in range(100):
        node.hear(ev.JobKilled(at=node.tick(), job=JobId(f"j{n}"), reason="too large"))
    assert len(node.holdings.contexts) == 32
    assert node.holdings.contexts[-1].job == "j99"


# ── measurements ───────────────────────────────────────────────────────────


def test_small_changes_of_use_are_no_news() -> None:
    node = Node()
    node.register(A, 60)
    version = node.holdings.version
    node.measure(A, 62)
    assert node.holdings.version == version
    node.measure(A, 80)
    assert node.holdings.version == version + 1
    assert facts(node.holdings).device_used == 80 * MIB


def test_nothing_changes_for_events_about_nobody() -> None:
    node = Node()
    before = node.holdings
    assert node.measure(A, 10) == node.gone(A) == []
    assert node.snapshot_done(A, 10) == node.restore_failed(A) == []
    assert node.hear(ev.DeadlinePassed(at=node.tick())) == []
    assert node.holdings == before


# ── restarts ───────────────────────────────────────────────────────────────


def reborn(node: Node) -> list[fx.NodeEffect]:
    """The agent dies and starts from its store, on a clock that began anew."""
    stored = msgspec.json.decode(msgspec.json.encode(node.holdings), type=Holdings)
    assert stored == node.holdings
    node.at = 0.0
    node.holdings = restarted(stored, node.at)
    return list(resume(node.holdings))


def test_a_saved_job_survives_the_agent_and_is_restored_once_its_process_is_back() -> None:
    node = swapped_out()
    reborn(node)
    node.register(B, 60)
    assert node.command(A) == [snapshot(node, B)]
    assert node.snapshot_done(B, 60) == [], "nobody to talk to yet"
    assert node.register(A, 60, parked=True) == [restore(node, A)]


def test_an_operation_goes_on_where_it_was_after_a_restart() -> None:
    node = swapped_out()
    node.command(A)
    assert not any(isinstance(e, fx.RunSnapshot) for e in reborn(node))
    assert node.register(B, 60) == [snapshot(node, B)]
    node.snapshot_done(B, 60)
    node.register(A, 60, parked=True)
    reborn(node)
    assert node.register(A, 60, parked=True) == [restore(node, A)]
    report = done(node.restore_done(A, 60))
    assert report in reborn(node), "it may not have been sent"


def test_a_kill_is_repeated_after_a_restart() -> None:
    node = swapped_out(rules=NodeRules(retries=0, stuck_grace=0.0))
    node.command(A)
    (kill,) = node.snapshot_failed(B)
    assert kill in reborn(node)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 MiB"), (5, "5 bytes"), (MIB, "1 MiB"), (3 * MIB // 2, "1.5 MiB"), (600 * MIB + 7, "600 MiB")],
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert mib(size) == text


def test_where_a_saved_job_is_and_what_it_leaves_is_in_the_facts() -> None:
    node = Node()
    node.register(A, 60)
    node.command(B, need=95)
    node.snapshot_done(A, 60, residual=3)
    context = find(node.holdings, A)
    assert context is not None
    assert context.place == Saved(bytes=60 * MIB, residual=3 * MIB)
    said = facts(node.holdings)
    assert (said.device_used, said.host_used) == (3 * MIB, 60 * MIB)
    assert said.contexts[0].pids == (1 + ord("a"),)


def test_the_ends_of_processes_are_told_exactly_and_not_for_ever() -> None:
    """RB1: whoever waits for a client of that process need not wait for its grace."""
    node = Node()
    for pid in (4, 5, 6):
        node.register(A, 10, pid=pid)
    node.gone(A, pid=5)
    (end,) = facts(node.holdings).ended
    assert end == ev.EndedProcess(job=A, incarnation=Incarnation("i1"), pid=5, start_time=50)
    node.hear(ev.JobKilled(at=node.tick(), job=A, reason="it took too much", incarnation=Incarnation("i1")))
    assert [e.pid for e in facts(node.holdings).ended] == [5, 4, 6]
    node.gone(A, pid=4)
    assert [e.pid for e in facts(node.holdings).ended] == [5, 4, 6], "told once"
    for pid in range(100, 200):
        node.register(B, 1, pid=pid)
        node.gone(B, pid=pid)
    ends = [e.pid for e in facts(node.holdings).ended]
    assert ends == list(range(200 - len(ends), 200))
    assert len(ends) < 100
