"""Admission of one group: who may go to the lock, who waits at the door, what is judged when. Pure.

Called by the orchestrator's shell and by the simulator: ``heard`` with everything that the lock did, ``asks``
before a request goes to the lock. Something to judge is a ``question``; whoever runs the warden has it
answered by ``arrange.arrange``, off the path of hand-overs, and brings the plan back to ``answered``, which
says what to do. ``deadline`` and ``passed`` are for time alone.

A request that may not go to the lock waits at the door; the lock never hears of it. Nobody is interrupted: a
job that is queued or refused keeps the turn that it has, or waits for already unless it is refused.

Whoever keeps state saves ``books`` before it carries out what ``answered`` and ``passed`` say.
"""

from collections import deque
from collections.abc import Callable, Sequence

from coslice.admission import verdict
from coslice.admission.arrange import Plan, Question
from coslice.admission.books import Books, Saved
from coslice.admission.model import (
    BY,
    Actions,
    Answer,
    Code,
    Decision,
    Enter,
    MemberView,
    Refuse,
    Rules,
    State,
    Wait,
)
from coslice.admission.outlook import Player
from coslice.admission.seats import Seat, in_turn, stands, view_of, who_is_here
from coslice.admission.trail import KEEP, KNOWN, ROLLING, Trail
from coslice.admission.watch import Watch
from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import Group, waiting
from coslice.core.ids import Incarnation, JobId
from coslice.core.prose import names
from coslice.profile.model import Pool

AGAIN = (8, 24, KEEP)
"""After so many cycles of a member everybody is judged again: more of them say more of how they scatter."""
PERSISTS = 3
"""A bound counts as broken when so many rolling means in a row are above it."""
MOST_CORRECTION = 1.3


class Warden:
    """Its arguments are those of ``Books``."""

    def __init__(
        self,
        rules: Rules,
        *,
        configured: str,
        policy: str = "",
        told: Callable[[Decision], None] | None = None,
    ) -> None:
        self.books = Books(rules, configured=configured, policy=policy, told=told)

    @property
    def rules(self) -> Rules:
        return self.books.rules

    @property
    def watch(self) -> Watch:
        return self.books.watch

    @property
    def decisions(self) -> deque[Decision]:
        return self.books.decisions

    def resume(self, saved: Saved, group: Group, *, at: float, ago: float) -> Actions:
        """Go on from what was saved ``ago`` seconds ago, with the lock as it was taken up; a fresh warden's.
        Returns what may not have been carried out before the restart."""
        books = self.books
        books.restore(saved, group, at=at, ago=ago)
        events: list[ev.PolicySet | ev.JobEvicted] = []
        if group.policy == books.before != (wanted := books.ours or books.operator):
            events.append(ev.PolicySet(at=at, policy=wanted, by=BY))
        for waiter in waiting(group):
            if (why := books.refused.get((waiter.job, waiter.incarnation))) is not None:
                events.append(ev.JobEvicted(at=at, job=waiter.job, reason=why, by=BY))
        return Actions(events=tuple(events))

    def configured(self, rules: Rules, policy: str, *, at: float) -> Actions:
        """Other rules from now on. Only ``enforce`` keeps anybody waiting; off, the order is as it was."""
        books = self.books
        if rules != books.rules:
            books.refused.clear()  # it might be let in now: it is asked anew
        books.rules, books.configured, books.to_judge = rules, policy, True
        books.changed()
        if rules.mode == "enforce":
            return Actions()
        queued = tuple(seat.job for seat in books.seats.values() if seat.queued_at is not None)
        books.nobody_is_queued(at)
        if rules.mode == "warn":
            return Actions(enter=queued)
        events = (ev.PolicySet(at=at, policy=books.operator, by=BY),) if books.ours else ()
        books.ours = ""
        return Actions(events=events, enter=(*queued, *self.open_door().enter))

    # ── what happens ───────────────────────────────────────────────────────

    def asks(self, event: ev.AcquireRequested, declared: Pool | None = None) -> Answer:
        """May this request go to the lock? ``declared``: what the job says that it will do."""
        books = self.books
        job, incarnation = event.job, event.incarnation
        if books.group is not None and in_turn(books.group, event):
            return Enter()  # a repeat, or one more process of a turn that has begun
        if (why := books.refused.get((job, incarnation))) is not None:
            return Refuse(why)
        seat = books.seats.get(job)
        if seat is None or seat.incarnation != incarnation:
            seat = self._arrives(job, incarnation, event.at, declared)
        if seat.state in (State.APPLYING, State.QUEUED):
            trail = books.watch.expect(job, incarnation)
            trail.at_door = True
            books.watch.asks(job, incarnation, event.at, event.phase)
            return Wait(seat.reason)
        return Enter()

    def heard(self, event: ev.GroupEvent, effects: Sequence[fx.GroupEffect], group: Group) -> None:
        """``group``: after the event. Cheap: it is called between a hand-over and the next."""
        books = self.books
        was, books.group = books.group, group
        if isinstance(event, ev.PolicySet):
            books.before, books.unsaved = None, True
            if event.by != BY:
                books.operator, books.ours = event.policy, ""
        ended = books.watch.heard(event, effects, group)
        if was is None or (was.jobs is not group.jobs and who_is_here(was) != who_is_here(group)):
            books.look_who_is_here(event.at, group)
        if ended is not None:
            books.unsaved = True
            self._ended_turn(ended[0], ended[1], event.at)

    def left_door(self, job: JobId) -> None:
        """Whoever asked for it gave up."""
        books = self.books
        trail, seat = books.watch.trails.get(job), books.seats.get(job)
        if trail is not None and trail.at_door:
            trail.at_door, trail.asked = False, None
            trail.cut()
            if seat is not None and not seat.met:
                del books.seats[job], books.watch.trails[job]
                books.changed()

    def open_door(self) -> Actions:
        """There will be no verdict: whoever waits for one may enter."""
        books = self.books
        applying = [seat for seat in books.seats.values() if seat.state is State.APPLYING]
        for seat in applying:
            seat.state, seat.reason = State.PROBATION, ""
            if (trail := books.watch.trails.get(seat.job)) is not None:
                trail.at_door = False
        return Actions(enter=tuple(seat.job for seat in applying))

    @property
    def deadline(self) -> float | None:
        """When ``passed`` is due."""
        books = self.books
        queued = [seat.queued_at for seat in books.seats.values() if seat.queued_at is not None]
        return min(queued) + books.rules.queue_limit if queued else None

    def passed(self, at: float) -> Actions:
        books = self.books
        refuse = []
        for seat in tuple(books.seats.values()):
            if seat.queued_at is None or seat.queued_at + books.rules.queue_limit > at:
                continue
            text = (
                f"{seat.job} was queued for {books.rules.queue_limit:.0f} s and there was no room for it: "
                f"{seat.reason}. {books.next_step()}"
            )
            refuse.append((seat.job, text))
            books.refuse(seat, text)
            books.say(at, Code.EVICTED, seat.job, text)
        return Actions(refuse=tuple(refuse))

    # ── verdicts ───────────────────────────────────────────────────────────

    @property
    def has_question(self) -> bool:
        books = self.books
        return books.to_judge and books.rules.mode != "off"

    def question(self) -> Question | None:
        """What is to be judged now; None: nothing, or somebody is not known yet."""
        books = self.books
        if not self.has_question:
            return None
        if books.group is not None and books.group.deleted:
            return None
        players = []
        trails = books.watch.trails
        scatter = all(trails[job].measured_well for job in books.seats if job in trails)
        for seat in books.seats.values():
            trail = trails.get(seat.job)
            profile = trail.profile(scatter=scatter) if trail is not None and trail.known else None
            if profile is None:
                return None
            players.append(
                Player(
                    job=seat.job,
                    profile=profile,
                    bound=books.rules.max_slowdown,
                    correction=seat.correction,
                    error=trail.error if trail is not None else 0.0,
                    few=trail is not None and not trail.measured_well,
                )
            )
        books.to_judge = False
        if not players:
            return None
        new = (State.PROBATION, State.APPLYING)
        return Question(
            players=tuple(players),
            newcomers=tuple(seat.job for seat in books.seats.values() if seat.state in new),
            queued=tuple(seat.job for seat in books.seats.values() if seat.state is State.QUEUED),
            policy=books.policy,
            base=books.operator or books.configured,
            swap_s=books.watch.swap_s,
            version=books.version,
        )

    def answered(self, question: Question, plan: Plan, at: float) -> Actions:
        """Carry out a plan, as far as the mode allows. One that came too late is asked for again."""
        books = self.books
        if question.version != books.version:
            books.to_judge = True
            return Actions()
        if books.rules.mode == "enforce":
            return verdict.enforce(books, question, plan, at)
        verdict.warn(books, plan, at)
        return Actions()

    # ── for people ─────────────────────────────────────────────────────────

    def members(self, now: float) -> list[MemberView]:
        books = self.books
        return [view_of(seat, books.watch.trails.get(seat.job), now) for seat in books.seats.values()]

    def lines(self, job: str, now: float) -> list[str]:
        """What ``explain`` says of a job (empty: of all): where it stands, then what was decided."""
        books = self.books
        lines: list[str] = []
        for seat in books.seats.values():
            if job in ("", seat.job):
                lines += stands(seat, books.watch.trails.get(seat.job), now)
        for (name, _), why in books.refused.items():
            if job == name:
                lines.append(f"Admission refuses {name}, this start of it (another is judged anew): {why}")
        for one in books.decisions:
            if job in ("", one.job):
                lines.append(f"{max(0.0, now - one.at):.1f} s ago: admission, {one.code}: {one.text}")
        return lines

    # ── who is here, and what they do ──────────────────────────────────────

    def _arrives(self, job: JobId, incarnation: Incarnation, at: float, declared: Pool | None) -> Seat:
        books = self.books
        known = declared if declared is not None else books.left.pop(job, None)
        books.seats.pop(job, None)
        trail = books.watch.expect(job, incarnation, known)
        state, reason = self._first_state(trail)
        seat = books.seats[job] = Seat(job, incarnation, state)
        seat.reason = reason
        books.changed()
        if state is State.PROBATION and books.rules.mode == "enforce":
            unknown = [name for name in books.seats if not books.watch.trails[name].known]
            text = f"{job} is judged when {KNOWN} whole cycles of {names(unknown)} were seen"
            books.say(at, Code.PROBATION, job, text)
        books.to_judge = books.to_judge or state is not State.SEATED
        return seat

    def _first_state(self, trail: Trail) -> tuple[State, str]:
        books = self.books
        others = [seat for seat in books.seats.values() if seat.job != trail.job]
        if not others or books.rules.mode == "off":
            return State.SEATED, ""
        seen = [books.watch.trails[seat.job].known for seat in others if seat.job in books.watch.trails]
        if books.rules.mode == "enforce" and trail.known and all(seen):
            return State.APPLYING, f"{trail.job} waits for the verdict of admission"
        return State.PROBATION, ""

    def _ended_turn(self, job: JobId, drifted: bool, at: float) -> None:
        books = self.books
        seat, trail = books.seats.get(job), books.watch.trails.get(job)
        if seat is None or trail is None:
            return
        if drifted:
            self._drifted(seat, trail, at)
            return
        if seat.state is State.PROBATION and trail.known:
            books.to_judge = True
        if seat.judged < len(AGAIN) and len(trail.cycles) >= AGAIN[seat.judged]:
            seat.judged, books.to_judge = seat.judged + 1, books.to_judge or len(books.seats) > 1
        if trail.seen != seat.measured:  # else within a cycle
            seat.measured = trail.seen
            self._measure(seat, trail, at)

    def _drifted(self, seat: Seat, trail: Trail, at: float) -> None:
        books = self.books
        on, off = trail.times()
        before = trail.before or (0.0, 0.0)
        books.say(
            at,
            Code.DRIFTED,
            seat.job,
            f"{seat.job} has changed: a cycle was {before[0]:.1f} s on and {before[1]:.1f} s off, and is now "
            f"{on:.1f} s and {off:.1f} s, for {len(trail.cycles)} cycles",
        )
        seat.judged = 0
        for other in books.seats.values():
            other.correction = 1.0
        books.changed()
        books.to_judge = True

    def _measure(self, seat: Seat, trail: Trail, at: float) -> None:
        """Is a member slower than its bound, for a while, although all was predicted to be well?"""
        books = self.books
        if books.rules.mode == "off":
            return
        seat.since += 1
        rolling = trail.rolling() if seat.since >= ROLLING else None
        if rolling is None or seat.state is not State.SEATED or trail.staleness:
            return  # of a buffered job nobody knows what each of its cycles had taken alone
        seat.above = seat.above + 1 if rolling > books.rules.max_slowdown else 0
        if seat.above < PERSISTS or len(books.seats) < 2:
            return
        seat.correction = min(MOST_CORRECTION, max(1.0, rolling / (seat.predicted or 1.0)))
        books.say(
            at,
            Code.MEASURED,
            seat.job,
            f"{seat.job} takes {rolling:.2f} x its time alone over its last {ROLLING} cycles, and "
            f"{seat.predicted or 1.0:.2f} x was predicted; the bound is {books.rules.max_slowdown:.2f}",
        )
        books.changed()
        books.to_judge = True
