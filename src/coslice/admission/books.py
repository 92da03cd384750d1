"""What admission remembers of one group: who is a member, who was refused, what was decided, what is to be
judged. Pure; written by its ``warden`` and by ``verdict`` only.

All that cannot be seen again is saved, and taken up by ``restored``: bounded, whatever the jobs do. Times are
saved as ages, because clocks mean nothing to another process."""

from collections import deque
from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from coslice.admission.model import Code, Decision, Mode, Rules, State
from coslice.admission.outlook import Outlook
from coslice.admission.seats import SavedSeat, Seat, who_is_here
from coslice.admission.trail import KEEP, SavedTrail, Trail
from coslice.admission.watch import SWAPS, Watch
from coslice.core.group_state import Group
from coslice.core.ids import Incarnation, JobId
from coslice.profile.model import Pool, brief_pool

REMEMBERED = 50
"""Decisions, and jobs that left; of the latter ``SAVED_LEFT`` are saved."""
REFUSED = 256
"""Starts of jobs that were refused, the latest: they stay refused."""
SAVED_CYCLES = 1024
"""Of all members together; each has its share."""
LEAST_CYCLES = 8
SAVED_LEFT = 16


class Saved(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``decisions``: ``at`` is seconds before it was saved."""

    mode: Mode
    max_slowdown: float
    seats: tuple[SavedSeat, ...] = ()
    trails: tuple[SavedTrail, ...] = ()
    refused: tuple[tuple[JobId, Incarnation, str], ...] = ()
    left: tuple[tuple[JobId, Pool], ...] = ()
    decisions: tuple[Decision, ...] = ()
    swaps: tuple[float, ...] = ()
    operator: str = ""
    ours: str = ""
    before: str | None = None
    to_judge: bool = False


class Books:
    """``configured``: the group's policy when nobody has set another; ``policy``: the one that was set, if
    one was, when this began. ``told`` hears every decision."""

    def __init__(
        self, rules: Rules, *, configured: str, policy: str, told: Callable[[Decision], None] | None
    ) -> None:
        self.rules, self.watch, self._told_of = rules, Watch(), told
        self.configured, self.operator, self.ours = configured, policy, ""
        """``ours``: the policy that admission chose, where it did."""
        self.before: str | None = None
        """The policy that the lock has until it hears of admission's; None: it has heard of it."""
        self.seats: dict[JobId, Seat] = {}
        """In the order in which they came."""
        self.refused: dict[tuple[JobId, Incarnation], str] = {}
        self.left: dict[JobId, Pool] = {}
        """What jobs that left did, for their return."""
        self.decisions: deque[Decision] = deque(maxlen=REMEMBERED)
        self.to_judge = False
        self.version = 0
        self.group: Group | None = None
        """As the lock was last heard of."""
        self.unsaved = False

    @property
    def policy(self) -> str:
        """In force, by its name."""
        return self.ours or self.operator or self.configured

    # ── changes ────────────────────────────────────────────────────────────

    def changed(self) -> None:
        """Who is here, or what they do, or in which order, is not what it was."""
        self.version += 1
        self.unsaved = True
        for seat in self.seats.values():
            seat.above, seat.since = 0, 0

    def say(self, at: float, code: Code, job: JobId, text: str) -> None:
        if code is Code.KEPT and self.decisions and self.decisions[-1].text == text:
            return
        self.decisions.append(Decision(at=at, code=code, job=job, text=text))
        self.unsaved = True
        if self._told_of is not None:
            self._told_of(self.decisions[-1])

    def refuse(self, seat: Seat, text: str) -> None:
        if seat.incarnation or seat.met:  # else nothing would tell its next start from this one
            self.refused[seat.job, seat.incarnation] = text
        while len(self.refused) > REFUSED:
            del self.refused[next(iter(self.refused))]
        del self.seats[seat.job]
        self.watch.trails.pop(seat.job, None)
        self.changed()

    def look_who_is_here(self, at: float, group: Group) -> None:
        here = dict(who_is_here(group))
        for seat in tuple(self.seats.values()):
            if here.get(seat.job) == seat.incarnation:
                seat.met = True
            elif seat.met:
                self._leaves(seat, at)
        for gone in [key for key in self.refused if not key[1] and key[0] not in here]:
            del self.refused[gone]  # of a job that never says which start it is
        for job, incarnation in here.items():
            seat_now = self.seats.get(job)
            if (job, incarnation) in self.refused:
                continue
            if seat_now is None or seat_now.incarnation != incarnation:  # it was here when this began
                self.watch.expect(job, incarnation)
                self.seats[job] = Seat(job, incarnation, State.SEATED)
                self.seats[job].met = True
        self.unsaved = True

    def _leaves(self, seat: Seat, at: float) -> None:
        del self.seats[seat.job]
        trail = self.watch.trails.pop(seat.job, None)
        pool = trail.pool() if trail is not None else None
        if pool is not None:
            self.left[seat.job] = pool
            while len(self.left) > REMEMBERED:
                del self.left[next(iter(self.left))]
        self.changed()
        if self.ours or any(self.at_door()):
            self.say(at, Code.LEFT, seat.job, f"{seat.job} left: there may be room")
            self.to_judge = True

    def at_door(self) -> Iterable[Seat]:
        return (seat for seat in self.seats.values() if seat.state in (State.APPLYING, State.QUEUED))

    # ── words ──────────────────────────────────────────────────────────────

    def figures(self, seen: Outlook) -> str:
        each = ", ".join(f"{job} {max(1.0, slow):.2f} x" for job, slow in seen.slowdown.items())
        return f"{each} predicted, useful duty {seen.useful_duty:.0%}"

    def next_step(self) -> str:
        bound = self.rules.max_slowdown
        return f"Use another group, wait until a member is done, or raise max_slowdown ({bound:.2f})"

    # ── restarts ───────────────────────────────────────────────────────────

    def save(self, at: float) -> Saved:
        """Of jobs that the lock does not know (they wait for their first verdict) nothing: they ask again."""
        seats = [seat for seat in self.seats.values() if seat.met and seat.state is not State.APPLYING]
        seats = [seat for seat in seats if seat.job in self.watch.trails][: SAVED_CYCLES // LEAST_CYCLES]
        share = min(KEEP, SAVED_CYCLES // max(1, len(seats)))
        trails = [self.watch.trails[seat.job].save(share) for seat in seats]
        self.unsaved = False
        return Saved(
            mode=self.rules.mode,
            max_slowdown=self.rules.max_slowdown,
            seats=tuple(seat.save(at) for seat in seats),
            trails=tuple(trails),
            refused=tuple((job, incarnation, why) for (job, incarnation), why in self.refused.items()),
            left=tuple((job, brief_pool(pool)) for job, pool in list(self.left.items())[-SAVED_LEFT:]),
            decisions=tuple(replace(one, at=at - one.at) for one in self.decisions),
            swaps=tuple(self.watch.swaps),
            operator=self.operator,
            ours=self.ours,
            before=self.before,
            to_judge=self.to_judge,
        )

    def restore(self, saved: Saved, group: Group, *, at: float, ago: float) -> None:
        """Into fresh books. ``group``: as the lock was taken up; ``ago``: seconds since it was saved."""
        saved_at = at - ago
        self.group = group
        self.watch.swaps.extend(saved.swaps[-SWAPS:])
        self.left = dict(saved.left)
        self.decisions.extend(replace(one, at=saved_at - one.at) for one in saved.decisions)
        same = (saved.mode, saved.max_slowdown) == (self.rules.mode, self.rules.max_slowdown)
        if same:  # else it might be let in now: it is asked anew
            self.refused = {(job, incarnation): why for job, incarnation, why in saved.refused}
        trails = {trail.job: Trail.restored(trail) for trail in saved.trails}
        self.watch.trails.update(trails)
        for one in saved.seats:
            if one.job in trails:
                self.seats[one.job] = Seat.restored(one, trails[one.job], saved_at)
        if self.rules.mode != "enforce":
            self.nobody_is_queued(at)
        self.to_judge = saved.to_judge or not same
        if group.policy in (saved.ours or saved.operator, saved.before):
            self.operator, self.ours, self.before = saved.operator, saved.ours, saved.before
        else:  # somebody set it since
            self.operator, self.ours, self.before = group.policy, "", None
        self.look_who_is_here(at, group)

    def nobody_is_queued(self, at: float) -> None:
        for seat in self.seats.values():
            if seat.queued_at is not None:
                seat.queued_s, seat.queued_at = seat.queued_s + at - seat.queued_at, None
                seat.state, seat.reason = State.SEATED, ""
