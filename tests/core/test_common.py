"""What several jobs have on the device in common is counted once, and is there while one of them is.

Figures are MiB; the device has 100.
"""

from core.test_context import MIB, A, B, C, done, member, restore
from core.test_elastic import Elastic, asked

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.context import find
from coslice.core.events import ContextState
from coslice.core.holdings import Saved, least
from coslice.core.ids import Incarnation, JobId

BASE = ("b" * 64, 50 * MIB)
OTHER = ("c" * 64, 50 * MIB)


class Sharing(Elastic):
    def comes(
        self, job: JobId, own: int, *, base: tuple[str, int] | None = BASE, parked: bool = False
    ) -> list[fx.NodeEffect]:
        """It needs what is its own, and the base."""
        pid = 1 + ord(job[0])
        return self.hear(
            ev.MemberRegistered(
                at=self.tick(),
                job=job,
                incarnation=Incarnation("i1"),
                member=member(job, pid=pid, start="i1"),
                pid=pid,
                start_time=pid * 10,
                bytes=own * MIB,
                need=own * MIB + (0 if base is None else base[1]),
                divisible=True,
                parked=parked,
                common=() if base is None else (base,),
            )
        )


def test_jobs_on_one_base_stay_together_where_it_fits_once() -> None:
    node = Sharing()
    node.comes(A, 25)
    node.command(A)
    node.comes(B, 25, parked=True)
    assert node.command(B) == [restore(node, B)]  # 75 + 75 - 50
    report = done(node.restore_done(B, 25))
    assert report.bytes_out == 0
    assert report.reason.endswith("both fit: 75 MiB + 75 MiB - 50 MiB in common of 100 MiB")
    assert node.state(A) is ContextState.LIVE


def test_a_base_of_the_same_size_is_another() -> None:
    node = Sharing()
    node.comes(A, 25)
    node.command(A)
    node.comes(B, 25, base=OTHER, parked=True)
    effect = asked(node.command(B))
    assert (effect.job, effect.least) == (
        A,
        0,
    )  # 50 lack, and 25 are its own: it leaves, and the base with it
    assert node.snapshot_done(A, 25) == [restore(node, B)]


def test_of_a_job_that_gives_way_the_base_stays_as_long_as_its_own_state_is_enough() -> None:
    node = Sharing()
    node.comes(A, 40)
    node.command(A)
    node.comes(B, 40, parked=True)
    effect = asked(node.command(B))
    assert (effect.job, effect.least) == (A, 30 * MIB)  # 90 + 90 - 50
    assert node.part_left(A, 30, 10) == [restore(node, B)]
    done(node.restore_done(B, 40))
    node.comes(C, 35, base=None, parked=True)
    effect = asked(node.command(C))  # A has 10, B 40, the base 50: the last used stays longest
    assert (effect.job, effect.least) == (A, 0)
    effect = asked(node.snapshot_done(A, 10))
    assert (effect.job, effect.least) == (B, 25 * MIB), "the base is B's too, and did not leave with A"
    assert node.part_left(B, 25, 15) == [restore(node, C)]


def test_a_base_that_nobody_on_the_device_has_takes_no_room() -> None:
    node = Sharing()
    node.comes(A, 40, parked=True)
    node.comes(B, 40, parked=True)
    node.comes(C, 95, base=None, parked=True)
    assert node.command(C) == [restore(node, C)]


def test_what_turns_out_to_be_common_was_not_the_jobs_own_use() -> None:
    """It came with a base of its own, was measured so, and shares it now."""
    node = Sharing()
    node.comes(A, 75, base=None)
    node.command(A)
    node.hear(ev.UsageMeasured(at=node.tick(), job=A, bytes=80 * MIB))
    pid = 1 + ord(A[0])
    node.hear(
        ev.MemberResized(
            at=node.tick(),
            job=A,
            member=member(A, pid=pid, start="i1"),
            bytes=25 * MIB,
            need=75 * MIB,
            common=(BASE,),
        )
    )
    context = find(node.holdings, A)
    assert context is not None
    assert least(node.holdings, context) == 80 * MIB
    node.comes(B, 20, parked=True)
    assert node.command(B) == [restore(node, B)]  # 80 + 70 - 50
    assert not isinstance(node.place(A), Saved)
