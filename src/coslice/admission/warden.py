"""Admission of one group: who is a member, who waits at the door, what is judged when. Pure, one writer.

Called by the orchestrator's shell and by the simulator: ``heard`` with everything that the lock did, ``asks``
before a request goes to the lock. Something to judge is a ``question``; whoever runs the warden has it
answered by ``arrange.arrange``, off the path of hand-overs, and brings the plan back to ``answered``, which
says what to do. ``deadline`` and ``passed`` are for time alone.

A request that may not go to the lock waits at the door; the lock never hears of it. Nobody is interrupted: a
job that is queued or refused keeps the turn that it has, or waits for already unless it is refused.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import assert_never

from coslice.admission.arrange import Plan, Question
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
from coslice.admission.outlook import Outlook, Player
from coslice.admission.seats import Seat, in_turn, stands, view_of, who_is_here
from coslice.admission.watch import KEEP, KNOWN, ROLLING, Trail, Watch
from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import Group, waiting
from coslice.core.ids import Incarnation, JobId
from coslice.core.prose import names
from coslice.profile.model import Pool

REMEMBERED = 50
REFUSED = 256
"""Starts of jobs that were refused, the latest: they stay refused."""
AGAIN = (8, 24, KEEP)
"""After so many cycles of a member everybody is judged again: more of them say more of how they scatter."""
PERSISTS = 3
"""A bound counts as broken when so many rolling means in a row are above it."""
MOST_CORRECTION = 1.3


class Warden:
    """``configured``: the group's policy when nobody has set another; ``policy``: the one that was set, if
    one was, when this began. ``told`` hears every decision."""

    def __init__(
        self,
        rules: Rules,
        *,
        configured: str,
        policy: str = "",
        told: Callable[[Decision], None] | None = None,
    ) -> None:
        self.rules, self.watch, self._told_of = rules, Watch(), told
        self.decisions: deque[Decision] = deque(maxlen=REMEMBERED)
        self._configured, self._operator, self._ours = configured, policy, ""
        self._seats: dict[JobId, Seat] = {}
        """In the order in which they came."""
        self._refused: dict[tuple[JobId, Incarnation], str] = {}
        self._known: dict[JobId, Pool] = {}
        """What jobs that left did, for their return."""
        self._to_judge = False
        self._version = 0
        self._group: Group | None = None

    # ── what happens ───────────────────────────────────────────────────────

    def asks(self, event: ev.AcquireRequested, declared: Pool | None = None) -> Answer:
        """May this request go to the lock? ``declared``: what the job says that it will do."""
        job, incarnation = event.job, event.incarnation
        if self._group is not None and in_turn(self._group, event):
            return Enter()  # a repeat, or one more process of a turn that has begun
        if (why := self._refused.get((job, incarnation))) is not None:
            return Refuse(why)
        seat = self._seats.get(job)
        if seat is None or seat.incarnation != incarnation:
            seat = self._arrives(job, incarnation, event.at, declared)
        if seat.state in (State.APPLYING, State.QUEUED):
            trail = self.watch.expect(job, incarnation)
            trail.at_door = True
            self.watch.asks(job, incarnation, event.at, event.phase)
            return Wait(seat.reason)
        return Enter()

    def heard(self, event: ev.GroupEvent, effects: Sequence[fx.GroupEffect], group: Group) -> None:
        """``group``: after the event. Cheap: it is called between a hand-over and the next."""
        was, self._group = self._group, group
        if isinstance(event, ev.PolicySet) and event.by != BY:
            self._operator, self._ours = event.policy, ""
        ended = self.watch.heard(event, effects, group)
        if was is None or (was.jobs is not group.jobs and who_is_here(was) != who_is_here(group)):
            self._look_who_is_here(event.at, group)
        if ended is not None:
            self._ended_turn(ended[0], ended[1], event.at)

    def left_door(self, job: JobId) -> None:
        """Whoever asked for it gave up."""
        trail, seat = self.watch.trails.get(job), self._seats.get(job)
        if trail is not None and trail.at_door:
            trail.at_door, trail.asked = False, None
            trail.cut()
            if seat is not None and not seat.met:
                del self._seats[job], self.watch.trails[job]
                self._changed()

    def open_door(self) -> Actions:
        """There will be no verdict: whoever waits for one may enter."""
        applying = [seat for seat in self._seats.values() if seat.state is State.APPLYING]
        for seat in applying:
            seat.state, seat.reason = State.PROBATION, ""
            if (trail := self.watch.trails.get(seat.job)) is not None:
                trail.at_door = False
        return Actions(enter=tuple(seat.job for seat in applying))

    @property
    def deadline(self) -> float | None:
        """When ``passed`` is due."""
        queued = [seat.queued_at for seat in self._seats.values() if seat.queued_at is not None]
        return min(queued) + self.rules.queue_limit if queued else None

    def passed(self, at: float) -> Actions:
        refuse = []
        for seat in tuple(self._seats.values()):
            if seat.queued_at is None or seat.queued_at + self.rules.queue_limit > at:
                continue
            text = (
                f"{seat.job} was queued for {self.rules.queue_limit:.0f} s and there was no room for it: "
                f"{seat.reason}. {self._next_step()}"
            )
            refuse.append((seat.job, text))
            self._refuse(seat, text)
            self._say(at, Code.EVICTED, seat.job, text)
        return Actions(refuse=tuple(refuse))

    # ── verdicts ───────────────────────────────────────────────────────────

    @property
    def has_question(self) -> bool:
        return self._to_judge and self.rules.mode != "off"

    def question(self) -> Question | None:
        """What is to be judged now; None: nothing, or somebody is not known yet."""
        if not self.has_question:
            return None
        if self._group is not None and self._group.deleted:
            return None
        players = []
        for seat in self._seats.values():
            trail = self.watch.trails.get(seat.job)
            profile = trail.profile() if trail is not None and trail.known else None
            if profile is None:
                return None
            players.append(
                Player(
                    job=seat.job,
                    profile=profile,
                    bound=self.rules.max_slowdown,
                    correction=seat.correction,
                )
            )
        self._to_judge = False
        if not players:
            return None
        new = (State.PROBATION, State.APPLYING)
        return Question(
            players=tuple(players),
            newcomers=tuple(seat.job for seat in self._seats.values() if seat.state in new),
            policy=self._policy(),
            base=self._operator or self._configured,
            swap_s=self.watch.swap_s,
            version=self._version,
        )

    def answered(self, question: Question, plan: Plan, at: float) -> Actions:
        """Carry out a plan, as far as the mode allows. One that came too late is asked for again."""
        if question.version != self._version:
            self._to_judge = True
            return Actions()
        if self.rules.mode == "enforce":
            return self._enforce(question, plan, at)
        self._warn(plan, at)
        return Actions()

    # ── for people ─────────────────────────────────────────────────────────

    def members(self, now: float) -> list[MemberView]:
        return [view_of(seat, self.watch.trails.get(seat.job), now) for seat in self._seats.values()]

    def lines(self, job: str, now: float) -> list[str]:
        """What ``explain`` says of a job (empty: of all): where it stands, then what was decided."""
        lines: list[str] = []
        for seat in self._seats.values():
            if job in ("", seat.job):
                lines += stands(seat, self.watch.trails.get(seat.job), now)
        for (name, _), why in self._refused.items():
            if job == name:
                lines.append(f"Admission refuses {name}: {why}")
        for one in self.decisions:
            if job in ("", one.job):
                lines.append(f"{max(0.0, now - one.at):.1f} s ago: admission, {one.code}: {one.text}")
        return lines

    def queued(self) -> dict[JobId, str]:
        """Who waits at the door, and why."""
        return {
            seat.job: seat.reason
            for seat in self._seats.values()
            if seat.state in (State.APPLYING, State.QUEUED)
        }

    # ── who is here ────────────────────────────────────────────────────────

    def _arrives(self, job: JobId, incarnation: Incarnation, at: float, declared: Pool | None) -> Seat:
        known = declared if declared is not None else self._known.pop(job, None)
        self._seats.pop(job, None)
        trail = self.watch.expect(job, incarnation, known)
        state, reason = self._first_state(trail)
        seat = self._seats[job] = Seat(job, incarnation, state)
        seat.reason = reason
        self._changed()
        if state is State.PROBATION and self.rules.mode == "enforce":
            unknown = [name for name in self._seats if not self.watch.trails[name].known]
            text = f"{job} is judged when {KNOWN} whole cycles of {names(unknown)} were seen"
            self._say(at, Code.PROBATION, job, text)
        self._to_judge = self._to_judge or state is not State.SEATED
        return seat

    def _first_state(self, trail: Trail) -> tuple[State, str]:
        others = [seat for seat in self._seats.values() if seat.job != trail.job]
        if not others or self.rules.mode == "off":
            return State.SEATED, ""
        seen = [self.watch.trails[seat.job].known for seat in others if seat.job in self.watch.trails]
        if self.rules.mode == "enforce" and trail.known and all(seen):
            return State.APPLYING, f"{trail.job} waits for the verdict of admission"
        return State.PROBATION, ""

    def _look_who_is_here(self, at: float, group: Group) -> None:
        here = {record.job: record.incarnation for record in group.jobs}
        for seat in tuple(self._seats.values()):
            if here.get(seat.job) == seat.incarnation:
                seat.met = True
            elif seat.met:
                self._leaves(seat, at)
        for gone in [key for key in self._refused if not key[1] and key[0] not in here]:
            del self._refused[gone]  # of a job that never says which start it is
        for job, incarnation in here.items():
            seat_now = self._seats.get(job)
            if (job, incarnation) in self._refused:
                continue
            if seat_now is None or seat_now.incarnation != incarnation:  # it was here when this began
                self.watch.expect(job, incarnation)
                self._seats[job] = Seat(job, incarnation, State.SEATED)
                self._seats[job].met = True

    def _leaves(self, seat: Seat, at: float) -> None:
        del self._seats[seat.job]
        trail = self.watch.trails.pop(seat.job, None)
        pool = trail.pool() if trail is not None else None
        if pool is not None:
            self._known[seat.job] = pool
            while len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]
        self._changed()
        if self._ours or self.queued():
            self._say(at, Code.LEFT, seat.job, f"{seat.job} left: there may be room")
            self._to_judge = True

    def _changed(self) -> None:
        """Who is here, or what they do, or in which order, is not what it was."""
        self._version += 1
        for seat in self._seats.values():
            seat.above, seat.since = 0, 0

    def _ended_turn(self, job: JobId, drifted: bool, at: float) -> None:
        seat, trail = self._seats.get(job), self.watch.trails.get(job)
        if seat is None or trail is None:
            return
        if drifted:
            self._drifted(seat, trail, at)
            return
        if seat.state is State.PROBATION and trail.known:
            self._to_judge = True
        if seat.judged < len(AGAIN) and len(trail.cycles) >= AGAIN[seat.judged]:
            seat.judged, self._to_judge = seat.judged + 1, self._to_judge or len(self._seats) > 1
        if trail.seen == seat.since:
            return  # within a cycle
        self._measure(seat, trail, at)

    def _drifted(self, seat: Seat, trail: Trail, at: float) -> None:
        on, off = trail.times()
        before = trail.before or (0.0, 0.0)
        self._say(
            at,
            Code.DRIFTED,
            seat.job,
            f"{seat.job} has changed: a cycle was {before[0]:.1f} s on and {before[1]:.1f} s off, and is now "
            f"{on:.1f} s and {off:.1f} s, for {len(trail.cycles)} cycles",
        )
        seat.judged = 0
        for other in self._seats.values():
            other.correction = 1.0
        self._changed()
        self._to_judge = True

    def _measure(self, seat: Seat, trail: Trail, at: float) -> None:
        """Is a member slower than its bound, for a while, although all was predicted to be well?"""
        if self.rules.mode == "off":
            return
        seat.since += 1
        rolling = trail.rolling() if seat.since >= ROLLING else None
        if rolling is None or seat.state is not State.SEATED or trail.staleness:
            return  # of a buffered job nobody knows what each of its cycles had taken alone
        seat.above = seat.above + 1 if rolling > self.rules.max_slowdown else 0
        if seat.above < PERSISTS or len(self._seats) < 2:
            return
        seat.correction = min(MOST_CORRECTION, max(1.0, rolling / (seat.predicted or 1.0)))
        self._say(
            at,
            Code.MEASURED,
            seat.job,
            f"{seat.job} takes {rolling:.2f} x its time alone over its last {ROLLING} cycles, and "
            f"{seat.predicted or 1.0:.2f} x was predicted; the bound is {self.rules.max_slowdown:.2f}",
        )
        self._changed()
        self._to_judge = True

    # ── carrying out ───────────────────────────────────────────────────────

    def _enforce(self, question: Question, plan: Plan, at: float) -> Actions:
        self._keep_figures(plan.outlook)
        events: list[ev.PolicySet | ev.JobEvicted] = []
        enter, refuse = [], []
        for job in plan.drop:
            seat = self._seats[job]
            if seat.state in (State.PROBATION, State.APPLYING):
                others = names(plan.keep)
                text = f"{job} is not admitted beside {others}: {plan.why}. {self._next_step()}"
                if seat.state is State.APPLYING:
                    refuse.append((job, text))
                elif self._group is not None and any(w.job == job for w in waiting(self._group)):
                    events.append(ev.JobEvicted(at=at, job=job, reason=text, by=BY))
                self._refuse(seat, text)
                self._say(at, Code.REFUSED, job, text)
            elif seat.state is not State.QUEUED:
                self._queue(seat, plan, at)
        for job in plan.keep:
            seat = self._seats[job]
            if self._seat(seat, plan, at):
                enter.append(job)
        if plan.policy != question.policy:
            events.append(self._reorder(question, plan, at))
        elif not plan.drop and not question.newcomers and len(plan.keep) > 1:
            self._say(
                at, Code.KEPT, plan.keep[0], f"judged again, nothing changes: {self._told(plan.outlook)}"
            )
        self._changed()
        return Actions(events=tuple(events), enter=tuple(enter), refuse=tuple(refuse))

    def _seat(self, seat: Seat, plan: Plan, at: float) -> bool:
        """True: it waited at the door, and may enter."""
        was, seat.state, seat.reason, seat.admitted = seat.state, State.SEATED, "", True
        match was:
            case State.SEATED:
                return False
            case State.QUEUED:
                waited = self._leave_queue(seat, at)
                self._say(
                    at, Code.LIFTED, seat.job, f"there is room for {seat.job} again, after {waited:.0f} s"
                )
            case State.PROBATION | State.APPLYING | State.JUDGED | State.REFUSED:
                beside = [job for job in plan.keep if job != seat.job]
                told = f" beside {names(beside)}: {self._told(plan.outlook)}" if beside else ""
                self._say(at, Code.ADMITTED, seat.job, f"{seat.job} is admitted{told}")
            case _:
                assert_never(was)
        self._through_door(seat.job, at)
        return was in (State.QUEUED, State.APPLYING)

    def _queue(self, seat: Seat, plan: Plan, at: float) -> None:
        seat.state, seat.queued_at = State.QUEUED, at
        seat.reason = f"{plan.why}; without it {names(plan.keep)} would keep the bound"
        self._say(
            at,
            Code.QUEUED,
            seat.job,
            f"{seat.job} is queued from its next turn on, for {self.rules.queue_limit:.0f} s at most: "
            f"{seat.reason}",
        )

    def _leave_queue(self, seat: Seat, at: float) -> float:
        waited = at - seat.queued_at if seat.queued_at is not None else 0.0
        seat.queued_s, seat.queued_at = seat.queued_s + waited, None
        return waited

    def _through_door(self, job: JobId, at: float) -> None:
        trail = self.watch.trails.get(job)
        if trail is not None and trail.at_door:
            trail.at_door = False
            trail.queued += at - trail.asked[0] if trail.asked is not None else 0.0

    def _refuse(self, seat: Seat, text: str) -> None:
        if seat.incarnation or seat.met:  # else nothing would tell its next start from this one
            self._refused[seat.job, seat.incarnation] = text
        while len(self._refused) > REFUSED:
            del self._refused[next(iter(self._refused))]
        del self._seats[seat.job]
        self.watch.trails.pop(seat.job, None)
        self._changed()

    def _reorder(self, question: Question, plan: Plan, at: float) -> ev.PolicySet:
        base = plan.policy == question.base
        self._ours = "" if base else plan.policy
        why = f"{plan.why}; with" if plan.why else "with"
        self._say(
            at, Code.REORDERED, plan.keep[0], f"{why} the policy {plan.policy}: {self._told(plan.outlook)}"
        )
        return ev.PolicySet(at=at, policy=self._operator if base else plan.policy, by=BY)

    def _warn(self, plan: Plan, at: float) -> None:
        if plan.now is not None:
            self._keep_figures(plan.now)
        for seat in self._seats.values():
            if seat.job in plan.drop:
                seat.state = State.JUDGED
                seat.reason = f"{plan.why}; with admission: enforce it would be " + (
                    "queued" if seat.admitted else "refused"
                )
            elif seat.state is not State.SEATED:
                seat.state, seat.reason, seat.admitted = State.SEATED, "", True
        if plan.drop:
            job = plan.drop[0]
            self._say(at, Code.WARNED, job, f"{job} beside {names(plan.keep)}: {self._seats[job].reason}")
        elif plan.why:
            text = f"{plan.why}; with the policy {plan.policy}: {self._told(plan.outlook)}"
            self._say(at, Code.WARNED, plan.keep[0], text)
        else:
            self._say(at, Code.KEPT, plan.keep[0], self._told(plan.outlook))

    def _keep_figures(self, seen: Outlook) -> None:
        for seat in self._seats.values():
            seat.predicted = seen.slowdown.get(seat.job, 0.0)

    # ── words ──────────────────────────────────────────────────────────────

    def _policy(self) -> str:
        return self._ours or self._operator or self._configured

    def _say(self, at: float, code: Code, job: JobId, text: str) -> None:
        if code is Code.KEPT and self.decisions and self.decisions[-1].text == text:
            return
        self.decisions.append(Decision(at=at, code=code, job=job, text=text))
        if self._told_of is not None:
            self._told_of(self.decisions[-1])

    def _told(self, seen: Outlook) -> str:
        each = ", ".join(f"{job} {max(1.0, slow):.2f} x" for job, slow in seen.slowdown.items())
        return f"{each} predicted, useful duty {seen.useful_duty:.0%}"

    def _next_step(self) -> str:
        bound = self.rules.max_slowdown
        return f"Use another group, wait until a member is done, or raise max_slowdown ({bound:.2f})"
