"""Admission, live: one warden for each group, fed by its driver, asked before a request goes to the lock.

Verdicts are worked out in a thread, so that no hand-over waits for one. Requests that may not go to the lock
yet wait here, at the door; what a client that vanished had there is dropped, and asked for again by the
client itself when it is back. Verdicts are saved before they are acted upon (``admission_store``). Decides
nothing: that is ``coslice.admission``."""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from coslice.admission.arrange import Plan, Question, arrange
from coslice.admission.model import Actions, Code, Decision, Enter, Refuse, Rules, Wait
from coslice.admission.warden import Warden
from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import Group
from coslice.core.ids import GroupId, JobId, RequestId
from coslice.core.outcome import Step
from coslice.orchestrator import convert
from coslice.orchestrator.admission_store import AdmissionStore
from coslice.orchestrator.groups import GroupLock
from coslice.orchestrator.sessions import GivenUp, Session
from coslice.profile.model import Pool, Profile
from coslice.runtime.clock import Clock
from coslice.runtime.threads import computing
from coslice.wire.v1 import coslice_pb2 as pb

log = logging.getLogger(__name__)
TOGETHER = 100
"""Events that are heard in one go at most, where nothing is judged: a good half millisecond."""
LOUD = frozenset({Code.REFUSED, Code.WARNED, Code.QUEUED, Code.EVICTED, Code.REORDERED})


class _Knock:
    """One request at the door. ``passed``: of a request for several groups, which waits for it in a task.
    ``entering`` is called when it goes to the lock from here."""

    def __init__(
        self,
        session: Session,
        event: ev.AcquireRequested,
        passed: "asyncio.Future[None] | None" = None,
        entering: Callable[[], object] = lambda: None,
    ) -> None:
        self.session, self.event, self.passed, self.entering = session, event, passed, entering


class Admissions:
    def __init__(
        self,
        *,
        clock: Clock,
        store: AdmissionStore,
        queue_limit: float,
        line: Callable[[Mapping[str, object]], None],
        changed: Callable[[GroupId], None],
        lock_of: Callable[[str], GroupLock | None],
    ) -> None:
        self._clock, self._queue_limit, self._line, self._changed = clock, queue_limit, line, changed
        self._store, self._lock_of = store, lock_of
        self._wardens: dict[GroupLock, Warden] = {}
        self._doors: dict[GroupLock, dict[RequestId, _Knock]] = {}
        self._due: dict[GroupLock, None] = {}
        self._unsaved: dict[GroupLock, None] = {}
        self._deleted: list[GroupId] = []
        self._said: list[tuple[GroupLock, Decision]] | None = None
        """Of a verdict that is not saved yet."""
        self._wake = asyncio.Event()
        self.idle = asyncio.Event()
        """Set while nothing is to be judged, of what was heard so far."""
        self.idle.set()
        self._unheard: list[tuple[GroupLock, ev.GroupEvent, Step[Group, fx.GroupEffect]]] = []
        self._catching_up = False  # about to

    def warden(self, lock: GroupLock) -> Warden:
        warden = self._wardens.get(lock)
        if warden is None:
            config = lock.config
            rules = Rules(
                mode=config.admission, max_slowdown=config.max_slowdown, queue_limit=self._queue_limit
            )

            def told(decision: Decision) -> None:
                if self._said is not None:
                    self._said.append((lock, decision))
                else:
                    self._tell(lock, decision)

            warden = self._wardens[lock] = Warden(
                rules, configured=config.policy, policy=lock.state.policy, told=told
            )
        return warden

    def configured(self, lock: GroupLock) -> None:
        """Its configuration may be another one now; ``catch_up`` came before that."""
        warden, config = self._wardens.get(lock), lock.config
        if warden is None:
            return
        rules = Rules(mode=config.admission, max_slowdown=config.max_slowdown, queue_limit=self._queue_limit)
        if (rules, config.policy) == (warden.rules, warden.books.configured):
            return
        self._carry_out(lock, warden.configured(rules, config.policy, at=self._clock.now()))
        if rules.mode == "off":
            self._enter(lock, [knock.event.job for knock in self._doors.get(lock, {}).values()])
        self._judge_soon(lock)

    def resume(self, locks: Iterable[GroupLock]) -> None:
        """Take up what was saved of these groups, before anything is heard of them."""
        for lock in locks:
            if lock.config.admission != "off" and (found := self._store.found(lock.id)) is not None:
                saved, ago = found
                warden, now = self.warden(lock), self._clock.now()
                self._carry_out(lock, warden.resume(saved, lock.state, at=now, ago=ago))
                self._judge_soon(lock)

    # ── what happens ───────────────────────────────────────────────────────

    def heard(self, event: ev.GroupEvent, step: Step[Group, fx.GroupEffect]) -> None:
        """Only taken down: whoever posted the event still waits for its answer. Where nothing is judged it is
        heard with many others, or once somebody looks."""
        lock = self._lock_of(step.state.id)
        if lock is None:
            return
        self._unheard.append((lock, event, step))
        if lock.config.admission == "off" and not step.state.deleted and len(self._unheard) < TOGETHER:
            return
        if not self._catching_up:
            self._catching_up = True
            asyncio.get_running_loop().call_soon(self.catch_up)

    def catch_up(self) -> None:
        """Hear what was taken down so far, by the rules under which it happened."""
        unheard, self._unheard = self._unheard, []
        self._catching_up = False
        for lock, event, step in unheard:
            self._hear(lock, event, step)

    def _hear(self, lock: GroupLock, event: ev.GroupEvent, step: Step[Group, fx.GroupEffect]) -> None:
        self.warden(lock).heard(event, step.effects, step.state)
        if lock.config.admission != "off":
            self._judge_soon(lock)
        if step.state.deleted:  # the lock itself tells whoever waits
            self._enter(lock, [knock.event.job for knock in self._doors.get(lock, {}).values()])
            self._wardens.pop(lock, None)
            self._unsaved.pop(lock, None)
            self._deleted.append(lock.id)
            self._wake.set()

    def passes(
        self,
        session: Session,
        lock: GroupLock,
        event: ev.AcquireRequested,
        *,
        entering: Callable[[], object] = lambda: None,
    ) -> bool:
        """May it go to the lock now? If not, it is refused, or waits at the door and goes there later:
        ``entering`` is called then."""
        answer = self._ask(session, lock, event)
        if isinstance(answer, Refuse):
            session.asked.pop(event.request, None)
            session.send(self._refusal(lock, event, answer.text))
        elif isinstance(answer, Wait):
            self._knock(lock, _Knock(session, event, entering=entering))
        return isinstance(answer, Enter)

    async def passed(self, session: Session, lock: GroupLock, event: ev.AcquireRequested) -> None:
        """Returns when it may go to the lock. Raises ``GivenUp`` if it never may."""
        answer = self._ask(session, lock, event)
        if isinstance(answer, Refuse):
            raise GivenUp(self._refusal(lock, event, answer.text))
        if isinstance(answer, Wait):
            passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._knock(lock, _Knock(session, event, passed))
            try:
                await passed
            finally:
                self._leave(lock, event.request)

    def abandoned(self, request: RequestId) -> None:
        for lock in tuple(self._doors):
            self._leave(lock, request)

    def gone(self, session: Session) -> None:
        """The client is given up."""
        for lock, door in tuple(self._doors.items()):
            for request in [request for request, knock in door.items() if knock.session is session]:
                self._leave(lock, request)

    # ── judging ────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Answers questions, keeps deadlines and saves, until cancelled. Raises ``StoreError``."""
        while True:
            await self._sleep()
            deleted, self._deleted = self._deleted, []
            for group in deleted:
                await self._store.forget(group)
            due, self._due = tuple(self._due), {}
            for lock in due:
                await self._judge(lock)
            now = self._clock.now()
            for lock, warden in tuple(self._wardens.items()):
                if warden.deadline is not None and warden.deadline <= now:
                    await self._obey(lock, functools.partial(warden.passed, now))
            for lock in [lock for lock in self._unsaved if self._store.due(lock.id) <= now]:
                await self._save(lock)
            if not self._due:
                self.idle.set()

    async def _sleep(self) -> None:
        times = [warden.deadline for warden in self._wardens.values() if warden.deadline is not None]
        times += [self._store.due(lock.id) for lock in self._unsaved]
        left = max(0.0, min(times) - self._clock.now()) if times else None
        try:
            async with asyncio.timeout(left):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _judge(self, lock: GroupLock) -> None:
        warden = self._wardens.get(lock)
        while warden is not None and (question := warden.question()) is not None:
            try:
                plan = await asyncio.to_thread(_arrange, question)
            except Exception:  # a fault of the judge is no fault of any job's
                log.exception("admission of group %s: no verdict; everybody may enter", lock.id)
                self._carry_out(lock, warden.open_door())
                return
            now = self._clock.now()
            await self._obey(lock, functools.partial(warden.answered, question, plan, now))
            self._changed(lock.id)

    async def _obey(self, lock: GroupLock, decide: Callable[[], Actions]) -> None:
        """Save first, then act."""
        said = self._said = []
        try:
            actions = decide()
        finally:
            self._said = None
        await self._save(lock)
        for told, decision in said:
            self._tell(told, decision)
        self._carry_out(lock, actions)

    async def _save(self, lock: GroupLock) -> None:
        self._unsaved.pop(lock, None)
        if (warden := self._wardens.get(lock)) is not None:  # else the group is no more
            await self._store.save(lock.id, warden.books)

    def _carry_out(self, lock: GroupLock, actions: Actions) -> None:
        for event in actions.events:
            lock.tell(event)
        self._enter(lock, actions.enter)
        for job, text in actions.refuse:
            for knock in self._leave_all(lock, job):
                answer = self._refusal(lock, knock.event, text)
                if knock.passed is not None:
                    if not knock.passed.done():
                        knock.passed.set_exception(GivenUp(answer))
                else:
                    knock.session.asked.pop(knock.event.request, None)
                    knock.session.send(answer)

    def _enter(self, lock: GroupLock, jobs: "tuple[JobId, ...] | list[JobId]") -> None:
        now = self._clock.now()
        for job in jobs:
            for knock in self._leave_all(lock, job):
                if knock.passed is not None:
                    if not knock.passed.done():
                        knock.passed.set_result(None)
                elif knock.session.outbox is not None:  # else it asks again when it is back
                    knock.entering()
                    lock.tell(replace(knock.event, at=now))

    def at_door(self) -> dict[GroupId, int]:
        """How many requests wait there."""
        return {lock.id: len(door) for lock, door in self._doors.items()}

    # ── the door ───────────────────────────────────────────────────────────

    def _ask(self, session: Session, lock: GroupLock, event: ev.AcquireRequested) -> Enter | Wait | Refuse:
        if lock.config.admission == "off":
            return Enter()
        self.catch_up()
        answer = self.warden(lock).asks(event, pool_for(session.who.profile, lock.config.id))
        self._judge_soon(lock)
        return answer

    def _knock(self, lock: GroupLock, knock: _Knock) -> None:
        self._doors.setdefault(lock, {})[knock.event.request] = knock
        self._changed(lock.id)

    def _leave(self, lock: GroupLock, request: RequestId) -> None:
        knock = self._doors.get(lock, {}).pop(request, None)
        if knock is None:
            return
        job = knock.event.job
        if all(other.event.job != job for other in self._doors[lock].values()):
            self.warden(lock).left_door(job)

    def _leave_all(self, lock: GroupLock, job: JobId) -> list[_Knock]:
        door = self._doors.get(lock, {})
        found = [request for request, knock in door.items() if knock.event.job == job]
        return [door.pop(request) for request in found]

    def _judge_soon(self, lock: GroupLock) -> None:
        warden = self.warden(lock)
        if warden.has_question or warden.deadline is not None:
            self._due[lock] = None
            self.idle.clear()
            self._wake.set()
        if warden.books.unsaved and lock not in self._unsaved:
            self._unsaved[lock] = None
            self._wake.set()

    # ── words ──────────────────────────────────────────────────────────────

    def _tell(self, lock: GroupLock, decision: Decision) -> None:
        loud = logging.WARNING if decision.code in LOUD else logging.INFO
        log.log(loud, "admission of group %s, %s: %s", lock.id, decision.code, decision.text)
        said = {"group": lock.id, "job": decision.job, "code": decision.code, "text": decision.text}
        self._line({"t": decision.at, "admission": said})

    def _refusal(self, lock: GroupLock, event: ev.AcquireRequested, text: str) -> pb.ServerMessage:
        facts = {
            "group": str(lock.id),
            "job": str(event.job),
            "max_slowdown": f"{lock.config.max_slowdown:g}",
        }
        return convert.refused(convert.unscoped(event.request), pb.NOT_ADMITTED, text, **facts)

    def status(self, lock: GroupLock) -> pb.AdmissionStatus:
        self.catch_up()
        warden, now = self.warden(lock), self._clock.now()
        return pb.AdmissionStatus(
            mode=warden.rules.mode,
            max_slowdown=warden.rules.max_slowdown,
            swap_s=warden.watch.swap_s,
            members=[
                pb.AdmissionMember(
                    job=member.job,
                    state=member.state,
                    cycles=member.cycles,
                    on_s=member.on_s,
                    off_s=member.off_s,
                    slowdown=member.slowdown,
                    predicted=member.predicted,
                    queued_s=member.queued_s,
                    reason=member.reason,
                    drifts=member.drifts,
                )
                for member in warden.members(now)
            ],
            decisions=[f"{decision.code}: {decision.text}" for decision in warden.decisions],
        )

    def lines(self, lock: GroupLock, job: str) -> list[str]:
        self.catch_up()
        return self.warden(lock).lines(job, self._clock.now())

    def knows(self, lock: GroupLock, job: str) -> bool:
        return bool(self.lines(lock, job)) if job else False


def _arrange(question: Question) -> Plan:
    """In a thread of its own."""
    with computing():
        return arrange(question)


def pool_for(profile: Profile | None, group: str) -> Pool | None:
    """Which of the declared pools is about this group: the one of its name or role, else the trainer's."""
    if profile is None:
        return None
    for label in (group, "trainer"):
        for pool in profile.pools:
            if label in (pool.name, pool.role):
                return pool
    return profile.pools[0]
