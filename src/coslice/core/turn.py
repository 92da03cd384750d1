"""One step of the group in the making: the state so far, and the effects and reasons gathered on the way.

Used only inside ``core``, within a single call of ``step``; from outside, ``step`` is a pure function.
"""

from msgspec import Struct
from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core.effects import Reason, ReasonCode
from coslice.core.group_state import (
    ACTIVE,
    Group,
    Held,
    HolderState,
    JobRecord,
    NodeView,
    Swapping,
    frozen_lease,
)
from coslice.core.ids import JobId, SessionId
from coslice.core.policy.base import Ask, Waiter


class Turn(Struct, gc=False):
    group: Group
    at: float
    effects: list[fx.GroupEffect] = []
    reasons: list[Reason] = []
    spare: bool = False
    """A record was stored that nobody needs any more: ``group.step`` drops it in the end."""

    def set(self, **changes: object) -> None:
        self.group = replace(self.group, **changes)

    def say(self, code: ReasonCode, text: str) -> Reason:
        reason = Reason(code, text)
        self.reasons.append(reason)
        return reason

    # ── edits that every part needs ──

    def put_record(self, record: JobRecord) -> None:
        """Store a job's record in its place, or at the end if it is new."""
        group, job = self.group, record.job
        jobs = list(group.jobs)
        for i, old in enumerate(jobs):
            if old.job == job:
                jobs[i] = record
                break
        else:
            jobs.append(record)
        self.group = replace(group, jobs=tuple(jobs))
        if not record.sessions and record.fault is None:
            self.spare = True

    def put_view(self, view: NodeView) -> None:
        """Store a view in its place, or where it belongs by its name if the node is new."""
        group, node = self.group, view.node
        views = list(group.views)
        for i, old in enumerate(views):
            if old.node == node:
                views[i] = view
                break
        else:
            views = sorted([*views, view], key=lambda v: v.node)
        self.group = replace(group, views=tuple(views))

    def take_asks(self, *, job: JobId | None = None, session: SessionId | None = None) -> tuple[Ask, ...]:
        """Remove the open requests of a job, or of a session, from the queue and from a running swap."""
        taken: list[Ask] = []

        def rest(waiter: Waiter) -> Waiter | None:
            gone = [a for a in waiter.asks if job == waiter.job or session == a.session]
            taken.extend(gone)
            if not gone:
                return waiter
            asks = tuple(a for a in waiter.asks if a not in gone)
            return replace(waiter, asks=asks) if asks or frozen_lease(self.group, waiter.job) else None

        swap = self.group.occupancy
        if type(swap) is Swapping and swap.waiter is not None:
            self.set(occupancy=replace(swap, waiter=rest(swap.waiter)))
        kept = [rest(w) for w in self.group.waiters]
        if taken:
            self.set(waiters=tuple(w for w in kept if w is not None))
        return tuple(taken)

    def refuse(self, job: JobId, code: fx.RefuseCode, reason: str) -> None:
        """Answer every open request of a job with a refusal; a lease of it that is frozen is over."""
        for ask in self.take_asks(job=job):
            self.effects.append(fx.Refuse(request=ask.request, session=ask.session, code=code, reason=reason))
        if (held := frozen_lease(self.group, job)) is not None:
            self.take_back(held, reason)
            self.drop_frozen(job)

    def put_lease(self, held: Held) -> None:
        """Store a changed lease where it is: held, or frozen."""
        on = self.group.occupancy
        if type(on) is Held and on.job == held.job:
            self.group = replace(self.group, occupancy=held)
        else:
            self.set(frozen=tuple(held if f.job == held.job else f for f in self.group.frozen))

    def thaw(self, job: JobId) -> None:
        """Its lease is frozen no more. Whoever of it is not connected has a grace from now on: it was not
        counted before."""
        grace = self.at + self.group.rules.session_grace
        mine = {h.session for f in self.group.frozen if f.job == job for h in f.holders}
        self.set(
            frozen=tuple(f for f in self.group.frozen if f.job != job),
            lost=tuple(replace(s, deadline=grace) if s.session in mine else s for s in self.group.lost),
        )

    def drop_frozen(self, job: JobId) -> None:
        """Nobody of a frozen lease is left: with it goes the place in the queue that it had, unless somebody
        else of the job asked for one."""
        self.thaw(job)
        on = self.group.occupancy
        if type(on) is Swapping and on.incoming == job and on.waiter is not None and not on.waiter.asks:
            self.set(occupancy=replace(on, waiter=None))
        if any(w.job == job and not w.asks for w in self.group.waiters):
            self.set(waiters=tuple(w for w in self.group.waiters if w.job != job or w.asks))

    def take_back(
        self, held: Held, reason: str, *, session: SessionId | None = None, tell: bool = True
    ) -> Held:
        """Mark the shares of all who hold the lease (or of one session) gone, and tell them so."""
        told: set[SessionId] = set()
        holders = []
        for holder in held.holders:
            if holder.state is not ACTIVE or session not in (None, holder.session):
                holders.append(holder)
                continue
            if tell and holder.session not in told:
                told.add(holder.session)
                self.effects.append(
                    fx.LoseLease(session=holder.session, job=held.job, epoch=holder.epoch, reason=reason)
                )
            holders.append(replace(holder, state=HolderState.GONE, confirm_by=None))
        held = replace(held, holders=tuple(holders))
        self.put_lease(held)
        return held
