"""Only as much leaves a device as the next job needs. Figures are MiB; the device has 100."""

import msgspec
from core.test_context import MIB, A, B, C, Node, done, member, restore, snapshot

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.context import Holdings, NodeRules, find, restarted, resume
from coslice.core.events import ContextState
from coslice.core.holdings import Live, Partly, Saved
from coslice.core.ids import Incarnation, JobId


class Elastic(Node):
    def joins(self, job: JobId, size: int, *, divisible: bool = True, **said: bool) -> list[fx.NodeEffect]:
        pid = 1 + ord(job[0])
        return self.hear(
            ev.MemberRegistered(
                at=self.tick(),
                job=job,
                incarnation=Incarnation("i1"),
                member=member(job, pid=pid, start="i1"),
                pid=pid,
                start_time=pid * 10,
                bytes=size * MIB,
                need=size * MIB,
                divisible=divisible,
                **said,
            )
        )

    def part_left(self, job: JobId, moved: int, left: int) -> list[fx.NodeEffect]:
        return self.hear(
            ev.SnapshotSucceeded(
                at=self.tick(),
                job=job,
                op=self.op,
                bytes=moved * MIB,
                residual=left * MIB,
                seconds=0.1,
                partly=True,
            )
        )

    def place(self, job: JobId) -> object:
        context = find(self.holdings, job)
        assert context is not None
        return context.place


def asked(effects: list[fx.NodeEffect]) -> fx.RunSnapshot:
    (effect,) = (e for e in effects if isinstance(e, fx.RunSnapshot))
    return effect


def test_two_jobs_of_60_percent_exchange_20_percent() -> None:
    node = Elastic()
    node.joins(A, 60)
    node.command(A)
    node.joins(B, 60, parked=True)
    effect = asked(node.command(B))
    assert effect.job == A
    assert effect.least == 20 * MIB
    assert node.part_left(A, 20, 40) == [restore(node, B)]
    assert node.place(A) == Partly(saved=20 * MIB, left=40 * MIB)
    assert done(node.restore_done(B, 60)).bytes_out == 20 * MIB
    assert node.state(A) is ContextState.LEAVING  # never granted without a command
    for job, other in ((A, B), (B, A)) * 3:
        effect = asked(node.command(job))
        assert (effect.job, effect.least) == (other, 20 * MIB)
        assert node.part_left(other, 20, 40) == [restore(node, job)]
        report = done(node.restore_done(job, 20))
        assert (report.bytes_in, report.bytes_out) == (20 * MIB, 20 * MIB)


def test_what_is_missing_counts_residuals_of_parked_jobs() -> None:
    node = Elastic()
    node.joins(C, 50)
    node.command(C)
    node.joins(A, 60, parked=True)
    node.command(A)
    node.snapshot_done(C, 50, residual=10)
    node.restore_done(A, 60)
    node.joins(B, 60, parked=True)
    assert asked(node.command(B)).least == 30 * MIB


def test_a_peak_counts_and_not_the_registered_bytes() -> None:
    node = Elastic()
    node.joins(A, 60)
    node.joins(B, 30, parked=True)
    node.command(A)
    node.measure(A, 90)
    node.measure(A, 60)
    assert asked(node.command(B)).least == 20 * MIB  # 90 + 30 is 20 too much


def test_a_part_that_was_not_enough_is_followed_by_another() -> None:
    node = Elastic()
    node.joins(A, 60)
    node.command(A)
    node.joins(B, 60, parked=True)
    node.command(B)
    second = asked(node.part_left(A, 20, 42))  # an allocator kept 2 of 20
    assert (second.job, 3 * MIB <= second.least <= 4 * MIB) == (A, True)
    assert node.part_left(A, 4, 38) == [restore(node, B)]
    assert node.place(A) == Partly(saved=24 * MIB, left=38 * MIB)


def test_parts_that_free_nothing_come_to_an_end() -> None:
    node = Elastic()
    node.joins(A, 60)
    node.command(A)
    node.joins(B, 60, parked=True)
    effect, left = asked(node.command(B)), 60
    for _ in range(10):
        if not effect.least:
            break
        moved = -(-effect.least // MIB)
        left -= moved
        effect = asked(node.part_left(A, moved, 60))
    assert effect == snapshot(node, A)
    assert node.snapshot_done(A, left) == [restore(node, B)]
    assert node.place(A) == Saved(bytes=60 * MIB)


def test_the_least_recently_used_leaves_first_and_only_as_far_as_needed() -> None:
    node = Elastic()
    for job in (A, B):
        node.joins(job, 30)
    node.command(A)
    node.command(B)
    node.joins(C, 80, parked=True)
    effect = asked(node.command(C))
    assert (effect.job, effect.least) == (A, 0)  # 40 must go, A has 30
    effect = asked(node.snapshot_done(A, 30))
    assert effect.job == B
    assert effect.least == 10 * MIB
    assert node.part_left(B, 12, 18) == [restore(node, C)]


def test_an_unknown_need_or_a_job_that_cannot_be_divided_moves_everything() -> None:
    node = Elastic()
    node.joins(A, 60, divisible=False)
    node.command(A)
    node.joins(B, 60, parked=True)
    assert asked(node.command(B)).least == 0
    other = Elastic()
    other.joins(A, 60)
    other.command(A)
    other.register(B, 60, parked=True)
    assert asked(other.command(B)).least == 0


def test_a_job_that_is_partly_there_is_not_whole_after_a_failure() -> None:
    node = Elastic(rules=NodeRules(retries=0, on_stuck="wait"))
    node.joins(A, 60)
    node.command(A)
    node.joins(B, 60, parked=True)
    node.command(B)
    node.part_left(A, 22, 38)
    node.restore_done(B, 60)
    assert asked(node.command(C)) == snapshot(node, A)  # of unknown need: B and the rest of A must go
    (report,) = node.snapshot_failed(A, busy=True)
    assert isinstance(report, fx.ReportFailed)
    assert (report.culprit, report.stuck) == (A, True)
    place = node.place(A)
    assert isinstance(place, Live)
    assert not place.whole
    effect = asked(node.command(A, epoch=9))
    assert (effect.job, effect.least >= 20 * MIB) == (B, True)  # room for all of A, not for what had left


def test_a_second_part_may_leave_for_another_turn() -> None:
    node = Elastic()
    node.joins(A, 60)
    node.command(A)
    node.joins(B, 60, parked=True)
    node.joins(C, 80, parked=True)
    node.command(B)
    node.part_left(A, 22, 38)
    node.restore_done(B, 60)
    effect = asked(node.command(C))
    assert (effect.job, effect.least) == (A, 0)  # 78 must go: all 38 of A, and of B
    effect = asked(node.snapshot_done(A, 38))
    assert effect.job == B
    assert effect.least == 40 * MIB


def test_host_memory_is_asked_for_the_part_only_and_before_anything_moves() -> None:
    node = Elastic(host=24)
    node.joins(A, 60)
    node.command(A)
    node.joins(B, 60)
    node.hear(ev.MemberGone(at=node.tick(), job=B, member=member(B, pid=1 + ord("b"), start="i1")))
    assert asked(node.command(B, need=60)).least <= 23 * MIB
    tight = Elastic(host=10)
    tight.joins(A, 60)
    tight.command(A)
    (report,) = tight.command(B, need=60)
    assert isinstance(report, fx.ReportFailed)
    assert report.culprit == B
    assert tight.place(A) == Live()


def test_it_comes_back_from_the_store_and_says_itself_what_is_where() -> None:
    node = Elastic()
    node.joins(A, 60)
    node.command(A)
    node.joins(B, 60, parked=True)
    node.command(B)
    node.part_left(A, 22, 38)
    node.restore_done(B, 60)
    stored = msgspec.json.decode(msgspec.json.encode(node.holdings), type=Holdings)
    assert stored == node.holdings
    node.holdings = restarted(stored, 0.0)
    resume(node.holdings)
    node.joins(A, 60, part=True)
    assert node.place(A) == Partly(saved=22 * MIB, left=38 * MIB)
    node.joins(A, 60)  # or it had come back meanwhile
    assert isinstance(node.place(A), Live)
    node.joins(A, 60, parked=True)
    assert node.place(A) == Saved(bytes=60 * MIB)
    node.joins(A, 60, part=True)
    assert node.place(A) == Live(whole=False, reason="some of it is in host memory")


def test_a_new_process_of_a_sleeping_job_makes_nothing_of_it_whole() -> None:
    node = Elastic()
    node.joins(A, 60)
    node.command(A)
    node.joins(B, 60, parked=True)
    node.command(B)
    node.part_left(A, 22, 38)
    node.restore_done(B, 60)
    node.register(A, 5, pid=7)
    assert node.place(A) == Live(whole=False, reason="some of it is in host memory")
    assert node.state(A) is ContextState.LEAVING
