"""One start of one job as admission sees it: where it stands, and how that is said. Decides nothing."""

from collections.abc import Iterable

from msgspec import Struct

from coslice.admission.model import MemberView, State
from coslice.admission.trail import KNOWN, ROLLING, Trail
from coslice.core import events as ev
from coslice.core.group_state import Group, Held, waiting
from coslice.core.ids import Incarnation, JobId
from coslice.core.lease import can_join

MOST = 1e6
"""A slowdown of that much or more is saved as that much: JSON has no infinity."""


class SavedSeat(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A ``Seat`` that the lock knows. Times are seconds before it was saved."""

    job: JobId
    incarnation: Incarnation
    state: State
    reason: str = ""
    predicted: float = 0.0
    above: int = 0
    since: int = 0
    correction: float = 1.0
    judged: int = 0
    admitted: bool = False
    queued_ago: float | None = None
    queued_s: float = 0.0


class Seat:
    """One start of one job."""

    __slots__ = ("above", "admitted", "correction", "incarnation", "job", "judged", "measured", "met",
                 "predicted", "queued_at", "queued_s", "reason", "since", "state")  # fmt: skip

    def __init__(self, job: JobId, incarnation: Incarnation, state: State) -> None:
        self.job, self.incarnation, self.state = job, incarnation, state
        self.reason = ""
        self.predicted = 0.0
        self.above = self.since = 0
        """Rolling means in a row above the bound; cycles since the members or their order last changed."""
        self.measured = 0
        """Cycles of its trail that were looked at."""
        self.correction = 1.0
        self.judged = 0
        """How many of ``AGAIN`` are behind it, since it came or changed."""
        self.admitted = state is State.SEATED
        self.met = False
        """The lock knows it."""
        self.queued_at: float | None = None
        self.queued_s = 0.0

    def save(self, at: float) -> SavedSeat:
        return SavedSeat(
            job=self.job,
            incarnation=self.incarnation,
            state=self.state,
            reason=self.reason,
            predicted=min(MOST, self.predicted),
            above=self.above,
            since=self.since,
            correction=self.correction,
            judged=self.judged,
            admitted=self.admitted,
            queued_ago=None if self.queued_at is None else at - self.queued_at,
            queued_s=self.queued_s,
        )

    @classmethod
    def restored(cls, saved: SavedSeat, trail: Trail, saved_at: float) -> "Seat":
        seat = cls(saved.job, saved.incarnation, saved.state)
        seat.reason, seat.predicted, seat.correction = saved.reason, saved.predicted, saved.correction
        seat.above, seat.since, seat.judged = saved.above, saved.since, saved.judged
        seat.measured, seat.admitted, seat.met = trail.seen, saved.admitted, True
        seat.queued_at = None if saved.queued_ago is None else saved_at - saved.queued_ago
        seat.queued_s = saved.queued_s
        return seat


def view_of(seat: Seat, trail: Trail | None, now: float) -> MemberView:
    on, off = trail.times() if trail is not None else (0.0, 0.0)
    queued = now - seat.queued_at if seat.queued_at is not None else 0.0
    return MemberView(
        job=seat.job,
        incarnation=seat.incarnation,
        state=seat.state,
        cycles=len(trail.cycles) if trail is not None else 0,
        on_s=on,
        off_s=off,
        slowdown=(trail.rolling() or 0.0) if trail is not None else 0.0,
        predicted=seat.predicted,
        queued_s=seat.queued_s + queued,
        reason=seat.reason,
        drifts=trail.drifts if trail is not None else 0,
    )


def stands(seat: Seat, trail: Trail | None, now: float) -> Iterable[str]:
    view = view_of(seat, trail, now)
    if not view.on_s:
        what = f"{view.job}: not known yet what it does alone"
    else:
        what = f"{view.job}: {view.on_s:.1f} s on, {view.off_s:.1f} s off in a cycle alone"
        what += f", measured over {view.cycles}" if view.cycles >= KNOWN else ", as declared"
    if view.slowdown:
        what += f"; {view.slowdown:.2f} x slower here over the last {ROLLING}"
    if view.predicted:
        what += f" ({max(1.0, view.predicted):.2f} x predicted)"
    yield what + "."
    if seat.state in (State.APPLYING, State.QUEUED):
        since = f", for {now - seat.queued_at:.1f} s now" if seat.queued_at is not None else ""
        yield f"Admission keeps {view.job} at the door{since}: {seat.reason}."
    elif seat.state is State.JUDGED:
        yield f"Admission warns of {view.job}: {seat.reason}."
    elif seat.state is State.PROBATION:
        yield f"{view.job} is on probation: judged after {KNOWN} cycles."


def who_is_here(group: Group) -> list[tuple[JobId, Incarnation]]:
    return [(record.job, record.incarnation) for record in group.jobs]


def in_turn(group: Group, event: ev.AcquireRequested) -> bool:
    """Is the job's turn on, or does the lock have it in its queue, so that this process belongs to it?"""
    held = group.occupancy
    if isinstance(held, Held) and held.job == event.job and held.incarnation == event.incarnation:
        return can_join(held, event.session)
    return any(w.job == event.job and w.incarnation == event.incarnation for w in waiting(group))
