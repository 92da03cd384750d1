"""The imagined orchestrator process: real locks, and around them what its sessions and links do.

It remembers who is connected and which requests for several groups are half-way; all that is lost when it
dies, and only the groups' saved states come back. What it wants to say is in ``out``. Locks are stepped in
the order in which events are posted, as the driver does, each event saved before its effects.
"""

from collections import deque

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core import group as core
from coslice.core.effects import RefuseCode
from coslice.core.group import Group, Held
from coslice.core.group_state import open_asks, share_of
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, NodeId, RequestId, SessionId
from coslice.core.invariants import InvariantBroken, check_group_step
from coslice.core.outcome import Rejected
from coslice.core.policy import Policy
from coslice.proof import wire
from coslice.proof.client import Client
from coslice.proof.device import Violation
from coslice.proof.story import Story

EPSILON = 1e-6
"""Clocks that began at different moments round differently."""


class Asked(Struct):
    """A request that is not confirmed yet."""

    groups: tuple[GroupId, ...]
    event: ev.AcquireRequested
    taken: wire.Leases = ()
    answered: bool = False


class Person(Struct):
    """What the process remembers of one session."""

    job: JobId
    incarnation: Incarnation
    home: NodeId
    pid: int
    connected: bool = True
    forget_at: float | None = None
    asked: dict[RequestId, Asked] = {}
    groups: tuple[GroupId, ...] = ()

    def copy(self) -> "Person":
        asked = {request: replace(one) for request, one in self.asked.items()}
        return Person(
            self.job,
            self.incarnation,
            self.home,
            self.pid,
            self.connected,
            self.forget_at,
            asked,
            self.groups,
        )


class Shell:
    __slots__ = (
        "at",
        "attached",
        "born",
        "due",
        "grants",
        "inbox",
        "locks",
        "out",
        "people",
        "policies",
        "rejected",
        "story",
    )

    def __init__(self, groups: dict[GroupId, Group], policies: dict[GroupId, Policy], story: Story) -> None:
        self.locks, self.policies, self.story = groups, policies, story
        self.at = self.born = 0.0
        self.due: dict[GroupId, float | None] = {}
        self.people: dict[SessionId, Person] = {}
        self.attached: set[NodeId] = set()
        self.inbox: deque[tuple[GroupId, ev.GroupEvent]] = deque()
        self.out: list[tuple[str, wire.Down]] = []
        self.grants: list[tuple[GroupId, fx.Grant]] = []
        """Not judged yet."""
        self.rejected: Rejected | None = None

    def copy(self) -> "Shell":
        new = Shell(self.locks.copy(), self.policies, self.story)
        new.at, new.born, new.due = self.at, self.born, self.due.copy()
        new.people = {session: person.copy() for session, person in self.people.items()}
        new.attached = self.attached.copy()
        return new

    # ── the locks ──

    def post(self, group: GroupId, event: ev.GroupEvent) -> None:
        self.inbox.append((group, event))

    def run(self) -> None:
        while self.inbox:
            group, event = self.inbox.popleft()
            self._step(group, event)

    def _step(self, group: GroupId, event: ev.GroupEvent) -> None:
        before = self.locks[group]
        try:
            taken = core.step(before, event, self.policies[group])
        except Rejected as refusal:
            self.rejected = refusal
            reason = fx.Reason(fx.ReasonCode.REFUSED, str(refusal))
            self.story.heard(self.at, group, event, (), (reason,))
            return
        self.story.heard(self.at, group, event, taken.effects, taken.reasons)
        try:
            check_group_step(before, event, taken)
        except InvariantBroken as broken:
            raise Violation(f"{group}: {broken}") from None
        self.locks[group] = taken.state
        self.due[group] = core.next_deadline(taken.state)
        for effect in taken.effects:
            self._perform(group, effect)

    def _perform(self, group: GroupId, effect: fx.GroupEffect) -> None:
        match effect:
            case fx.MakeResident(node=node):
                if node in self.attached:
                    self.out.append((node, wire.Told(group, effect)))
            case fx.ForgetJob(node=node, job=job):
                if node in self.attached:
                    self.out.append((node, wire.Forget(group, job)))
            case fx.Grant():
                self._granted(group, effect)
            case fx.Refuse():
                self._refused(effect.session, effect.request, effect.code)
            case fx.LoseLease():
                self._lost(group, effect)
            case fx.AskYield(session=session, epoch=epoch):
                self._say(session, wire.ShouldYield(group, epoch))

    def _say(self, session: SessionId, message: wire.ServerMessage) -> None:
        person = self.people.get(session)
        if person is not None and person.connected:
            self.out.append((session, message))

    # ── answers ──

    def _granted(self, group: GroupId, grant: fx.Grant) -> None:
        self.grants.append((group, grant))
        person = self.people.get(grant.session)
        asked = person.asked.get(grant.request) if person is not None else None
        lease = (group, grant.epoch)
        if asked is None and grant.more:
            return  # this process has not heard the whole request yet
        if asked is None or len(asked.groups) == 1:
            if asked is not None:
                asked.taken = (lease,)
            self._say(grant.session, wire.Granted(grant.request, (lease,)))
        elif not asked.answered and asked.groups[len(asked.taken) :][:1] == (group,):
            asked.taken = (*asked.taken, lease)
            self._next(grant.session, asked)

    def _next(self, session: SessionId, asked: Asked) -> None:
        """A request for several groups goes on to the next, or is complete."""
        if len(asked.taken) < len(asked.groups):
            self.post(asked.groups[len(asked.taken)], replace(asked.event, at=self.at))
            return
        for group in asked.groups:
            self.post(group, ev.AcquireCompleted(at=self.at, request=asked.event.request))
        asked.answered = True
        self._say(session, wire.Granted(asked.event.request, asked.taken))

    def _refused(self, session: SessionId, request: RequestId, code: RefuseCode) -> None:
        person = self.people.get(session)
        asked = person.asked.pop(request, None) if person is not None else None
        if asked is not None and len(asked.groups) > 1 and not asked.answered:
            self._give_back(request, asked.groups)
        self._say(session, wire.Refused(request, code))

    def _lost(self, group: GroupId, effect: fx.LoseLease) -> None:
        person = self.people.get(effect.session)
        for request, asked in list(person.asked.items()) if person is not None else ():
            if (group, effect.epoch) in asked.taken:
                if len(asked.groups) > 1 and not asked.answered:
                    self._refused(effect.session, request, RefuseCode.FAILED)
                elif person is not None:
                    del person.asked[request]
        self._say(effect.session, wire.LeaseLost(group, effect.epoch))

    def _give_back(self, request: RequestId, groups: tuple[GroupId, ...]) -> None:
        for group in reversed(groups):
            self.post(group, ev.AcquireAbandoned(at=self.at, request=request))

    # ── sessions ──

    def greet(self, client: Client) -> bool:
        """A hello. False: another start of the job is connected."""
        session, job, incarnation = client.session, client.job, client.incarnation
        for one in self.people.values():
            if one.connected and one.job == job and one.incarnation != incarnation:
                return False
        person = self.people.setdefault(session, Person(job, incarnation, client.home, client.pid))
        person.connected, person.forget_at = True, None
        for group, state in self.locks.items():
            if any(session in record.sessions for record in state.jobs):
                person.groups = tuple(sorted({*person.groups, group}))
        for group in person.groups:
            self.post(group, ev.SessionResumed(at=self.at, session=session))
        self.run()
        held = ((g, lease_of(self.locks[g], session)) for g in person.groups)
        welcome = wire.Welcome(tuple((g, e) for g, e in held if e is not None))
        self.out.insert(0, (session, welcome))
        return True

    def hear(self, session: SessionId, message: wire.ClientMessage) -> None:
        person = self.people.get(session)
        if person is None or not person.connected:
            return
        match message:
            case wire.Acquire():
                self._acquire(session, person, message)
            case wire.Confirm(request=request):
                asked = person.asked.get(request)
                if asked is not None and len(asked.groups) > 1 and not asked.answered:
                    return  # asked again since that grant was lost: this one is not answered yet
                person.asked.pop(request, None)
                for group in asked.groups if asked is not None else person.groups:
                    self.post(group, ev.GrantConfirmed(at=self.at, request=request))
            case wire.Abandon(request=request):
                asked = person.asked.pop(request, None)
                self._give_back(request, asked.groups if asked is not None else person.groups)
            case wire.Yield():
                self._yield(session, person, message)
            case wire.Goodbye():
                self._forget(session)
                for group in person.groups:
                    self.post(group, ev.SessionClosed(at=self.at, session=session))
            case wire.Hello():
                pass
        self.run()

    def _acquire(self, session: SessionId, person: Person, message: wire.Acquire) -> None:
        several = len(message.groups) > 1
        event = ev.AcquireRequested(
            at=self.at,
            job=person.job,
            incarnation=person.incarnation,
            session=session,
            request=message.request,
            need=message.need,
            more=several,
            node=person.home,
            pid=person.pid,
            start_time=person.pid,
        )
        known = person.asked.get(message.request)
        asked = known or Asked(message.groups, event)
        person.asked[message.request] = asked
        person.groups = tuple(sorted({*person.groups, *message.groups}))
        if several and asked.answered:
            self._say(session, wire.Granted(message.request, asked.taken))
        else:
            self.post(asked.groups[len(asked.taken) if several else 0], event)

    def _yield(self, session: SessionId, person: Person, message: wire.Yield) -> None:
        problem: Rejected | None = None
        for group, epoch in message.leases:
            event = ev.LeaseYielded(at=self.at, job=person.job, session=session, epoch=epoch)
            if (refusal := self._try(group, event)) is not None:
                problem = refusal
                continue
            for request, asked in list(person.asked.items()):
                if (group, epoch) in asked.taken and len(asked.taken) == len(asked.groups):
                    del person.asked[request]
        if problem is None:
            self._say(session, wire.Yielded(message.ident))
        else:
            self._say(session, wire.Refused(message.ident, RefuseCode(problem.code)))

    def _try(self, group: GroupId, event: ev.GroupEvent) -> Rejected | None:
        """Post, and return the machine's refusal of it, if any."""
        self.rejected = None
        self.post(group, event)
        self.run()
        return self.rejected

    def operator_says(self, group: GroupId, event: ev.GroupEvent) -> bool:
        """False: the machine refused."""
        return self._try(group, event) is None

    def stranger_yields(self, group: GroupId, job: JobId, session: SessionId, epoch: Epoch) -> None:
        """Somebody names a lease that is not its own, or is over. It must be refused, changing nothing."""
        before = self.locks[group]
        event = ev.LeaseYielded(at=self.at, job=job, session=session, epoch=epoch)
        if self._try(group, event) is None or self.locks[group] != before:
            raise Violation(f"1: {job} (session {session}) ended lease {epoch} of {group}, not its own")

    def lost(self, session: SessionId, grace: float) -> None:
        """Its stream ended without a goodbye."""
        person = self.people.get(session)
        if person is None or not person.connected:
            return
        person.connected, person.forget_at = False, self.at + grace
        for group in person.groups:
            self.post(group, ev.SessionLost(at=self.at, session=session))
        self.run()

    def _forget(self, session: SessionId) -> None:
        person = self.people.pop(session)
        for request, asked in person.asked.items():
            if len(asked.groups) > 1 and not asked.answered:
                self._give_back(request, asked.groups)

    # ── agents ──

    def attach(self, node: NodeId, hello: wire.Hello) -> None:
        self.attached.add(node)
        for group, epoch, facts in hello.facts:
            self.post(group, ev.NodeAttached(at=self.at, node=node, epoch=epoch, facts=facts))
        self.run()

    def detach(self, node: NodeId) -> None:
        if node in self.attached:
            self.attached.remove(node)
            for group in self.locks:
                self.post(group, ev.NodeDetached(at=self.at, node=node))
            self.run()

    def report(self, said: wire.Said) -> None:
        self.post(said.group, replace(said.event, at=self.at))
        self.run()

    # ── time and death ──

    def pass_time(self) -> None:
        """Whatever is due now."""
        for session, person in list(self.people.items()):
            if person.forget_at is not None and person.forget_at <= self.at + EPSILON:
                self._forget(session)
        self.run()
        for group in self.locks:
            due = self.due.get(group)
            if due is not None and due <= self.at + EPSILON:
                self.at = max(self.at, due)
                self.post(group, ev.DeadlinePassed(at=self.at))
                self.run()
                after = self.due[group]
                if after is not None and after <= self.at:
                    raise Violation(f"8: {group} has nothing to do at its deadline {after:.2f}")

    def next_due(self) -> float | None:
        forget = (p.forget_at for p in self.people.values() if p.forget_at is not None)
        return min((*(d for d in self.due.values() if d is not None), *forget), default=None)

    def stall(self) -> None:
        """The event loop stood still for long: every deadline gets its full time."""
        for group, state in self.locks.items():
            self._replace(group, core.stalled(state, self.at))

    def restart(self, now: float) -> None:
        """The process dies, and another begins with what was saved, on a new clock."""
        self.people.clear()
        self.attached.clear()
        self.inbox.clear()
        self.out.clear()
        self.at, self.born = 0.0, now
        for group, state in list(self.locks.items()):
            stored = msgspec.json.decode(msgspec.json.encode(state), type=Group)
            if stored != state:
                raise Violation(f"6: {group} does not come back from its store as it was")
            after = core.restarted(stored, 0.0)
            _check_kept(group, state, after)
            self._replace(group, after)
            for effect in core.resume(after):
                self._perform(group, effect)

    def _replace(self, group: GroupId, state: Group) -> None:
        self.locks[group], self.due[group] = state, core.next_deadline(state)


def lease_of(group: Group, session: SessionId) -> Epoch | None:
    """The epoch of the lease that this session shares, if it does."""
    share = share_of(group, session)
    return None if share is None else share.epoch


def _check_kept(group: GroupId, before: Group, after: Group) -> None:
    """A restart keeps the lock, the order of the queue, and the epoch."""
    asks = [a.request for a in open_asks(before)]
    if asks != [a.request for a in open_asks(after)] or after.epoch < before.epoch:
        raise Violation(f"6: {group} lost its queue in a restart: {asks} had places")
    if isinstance(before.occupancy, Held):
        held, now = before.occupancy, after.occupancy
        if not isinstance(now, Held) or (now.epoch, now.job) != (held.epoch, held.job):
            raise Violation(f"6: {group} lost lease {held.epoch} of {held.job} in a restart")
    if [(f.job, f.epoch) for f in before.frozen] != [(f.job, f.epoch) for f in after.frozen]:
        raise Violation(f"6: {group} lost a frozen lease in a restart")
    if before.drained != after.drained:
        raise Violation(f"6: {group} lost a drained node in a restart")
