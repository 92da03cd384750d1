"""What follows from a plan, for members and lock. Pure; called by the warden, writes its books."""

from typing import assert_never

from coslice.admission.arrange import Plan, Question
from coslice.admission.books import Books
from coslice.admission.model import BY, Actions, Code, State
from coslice.admission.outlook import Outlook
from coslice.admission.seats import Seat
from coslice.core import events as ev
from coslice.core.group_state import waiting
from coslice.core.ids import JobId
from coslice.core.prose import names


def enforce(books: Books, question: Question, plan: Plan, at: float) -> Actions:
    _keep_figures(books, plan.outlook)
    events: list[ev.PolicySet | ev.JobEvicted] = []
    enter, refuse = [], []
    for job in plan.drop:
        seat = books.seats[job]
        if seat.state in (State.PROBATION, State.APPLYING):
            others = names(plan.keep)
            text = f"{job} is not admitted beside {others}: {plan.why}. {books.next_step()}"
            if seat.state is State.APPLYING:
                refuse.append((job, text))
            elif books.group is not None and any(w.job == job for w in waiting(books.group)):
                events.append(ev.JobEvicted(at=at, job=job, reason=text, by=BY))
            books.refuse(seat, text)
            books.say(at, Code.REFUSED, job, text)
        elif seat.state is not State.QUEUED:
            _queue(books, seat, plan, at)
    for job in plan.keep:
        seat = books.seats[job]
        if _seat(books, seat, plan, at):
            enter.append(job)
    if plan.policy != question.policy:
        events.append(_reorder(books, question, plan, at))
    elif not plan.drop and not question.newcomers and len(plan.keep) > 1:
        books.say(
            at, Code.KEPT, plan.keep[0], f"judged again, nothing changes: {books.figures(plan.outlook)}"
        )
    books.changed()
    return Actions(events=tuple(events), enter=tuple(enter), refuse=tuple(refuse))


def _seat(books: Books, seat: Seat, plan: Plan, at: float) -> bool:
    """True: it waited at the door, and may enter."""
    was, seat.state, seat.reason, seat.admitted = seat.state, State.SEATED, "", True
    match was:
        case State.SEATED:
            return False
        case State.QUEUED:
            waited = _leave_queue(books, seat, at)
            books.say(at, Code.LIFTED, seat.job, f"there is room for {seat.job} again, after {waited:.0f} s")
        case State.PROBATION | State.APPLYING | State.JUDGED | State.REFUSED:
            beside = [job for job in plan.keep if job != seat.job]
            told = f" beside {names(beside)}: {books.figures(plan.outlook)}" if beside else ""
            books.say(at, Code.ADMITTED, seat.job, f"{seat.job} is admitted{told}")
        case _:
            assert_never(was)
    _through_door(books, seat.job, at)
    return was in (State.QUEUED, State.APPLYING)


def _queue(books: Books, seat: Seat, plan: Plan, at: float) -> None:
    seat.state, seat.queued_at = State.QUEUED, at
    seat.reason = f"{plan.why}; without it {names(plan.keep)} would keep the bound"
    books.say(
        at,
        Code.QUEUED,
        seat.job,
        f"{seat.job} is queued from its next turn on, for {books.rules.queue_limit:.0f} s at most: "
        f"{seat.reason}",
    )


def _leave_queue(books: Books, seat: Seat, at: float) -> float:
    waited = at - seat.queued_at if seat.queued_at is not None else 0.0
    seat.queued_s, seat.queued_at = seat.queued_s + waited, None
    return waited


def _through_door(books: Books, job: JobId, at: float) -> None:
    trail = books.watch.trails.get(job)
    if trail is not None and trail.at_door:
        trail.at_door = False
        trail.queued += at - trail.asked[0] if trail.asked is not None else 0.0


def _reorder(books: Books, question: Question, plan: Plan, at: float) -> ev.PolicySet:
    base = plan.policy == question.base
    books.before = books.ours or books.operator
    books.ours = "" if base else plan.policy
    why = f"{plan.why}; with" if plan.why else "with"
    books.say(
        at, Code.REORDERED, plan.keep[0], f"{why} the policy {plan.policy}: {books.figures(plan.outlook)}"
    )
    return ev.PolicySet(at=at, policy=books.operator if base else plan.policy, by=BY)


def warn(books: Books, plan: Plan, at: float) -> None:
    if plan.now is not None:
        _keep_figures(books, plan.now)
    for seat in books.seats.values():
        if seat.job in plan.drop:
            seat.state = State.JUDGED
            seat.reason = f"{plan.why}; with admission: enforce it would be " + (
                "queued" if seat.admitted else "refused"
            )
        elif seat.state is not State.SEATED:
            seat.state, seat.reason, seat.admitted = State.SEATED, "", True
    if plan.drop:
        job = plan.drop[0]
        books.say(at, Code.WARNED, job, f"{job} beside {names(plan.keep)}: {books.seats[job].reason}")
    elif plan.why:
        text = f"{plan.why}; with the policy {plan.policy}: {books.figures(plan.outlook)}"
        books.say(at, Code.WARNED, plan.keep[0], text)
    else:
        books.say(at, Code.KEPT, plan.keep[0], books.figures(plan.outlook))


def _keep_figures(books: Books, seen: Outlook) -> None:
    for seat in books.seats.values():
        seat.predicted = seen.slowdown.get(seat.job, 0.0)
