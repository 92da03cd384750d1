"""The groups of this orchestrator: one lock, one driver and one place in the store for each.

Opens them from the store or afresh, hands each driver its events, and keeps what only this process remembers:
the last decisions with their reasons. Called by the session and agent handlers; knows no stream.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core import group as core
from coslice.core.brief import brief
from coslice.core.group_state import Drained, Group, Held, Swapping, drain_of
from coslice.core.ids import GroupId, NodeId
from coslice.core.outcome import Step
from coslice.core.policy import policy_named
from coslice.orchestrator import convert
from coslice.orchestrator.config import GroupConfig, OrchestratorConfig, rules
from coslice.orchestrator.observer import Observer
from coslice.runtime.clock import Clock
from coslice.runtime.driver import Driver
from coslice.runtime.journal import Journal
from coslice.runtime.supervisor import Supervisor
from coslice.store import Store, shared
from coslice.store.codec import Codec
from coslice.store.slot import Slot
from coslice.wire.v1 import coslice_pb2 as pb

REMEMBERED = 200
KEY = "group/"
CODEC = Codec(Group, kind="group")

Perform = Callable[[GroupId, fx.GroupEffect], None]


class Decision(Struct, frozen=True):
    """One event of a group and the reasons of what followed."""

    at: float
    event: ev.GroupEvent
    reasons: tuple[fx.Reason, ...]


def _changes(old: GroupConfig, new: GroupConfig) -> str:
    fields = ("policy", "admission", "max_slowdown")
    return ", ".join(
        f"{name} is {getattr(new, name)}" for name in fields if getattr(old, name) != getattr(new, name)
    )


def _told_again(event: ev.GroupEvent) -> bool:
    """Agents repeat facts when they attach, and an operation's report when it is commanded again."""
    return isinstance(event, ev.OpSucceeded | ev.NodeReported)


def _patient(state: Group, event: ev.GroupEvent) -> bool:
    """What only adds to the state, while the lock is somebody else's or on its way."""
    if isinstance(event, ev.GrantConfirmed):
        return True
    if not isinstance(event, ev.AcquireRequested):
        return False
    busy = state.occupancy
    return isinstance(busy, Swapping) or (isinstance(busy, Held) and busy.job != event.job)


def taken_up(saved: Group, now: float, config: OrchestratorConfig) -> Group:
    """The saved group as this process goes on with it at ``now``.

    With a shared store everybody has more time to come back than after a restart: a stream to a machine that
    is cut off breaks late, and whose stream broke has to find us. How long that takes on a busy machine
    nobody knows, so nobody is passed over before it is given up.
    """
    views = tuple(replace(view, facts=convert.recalled(view.facts)) for view in saved.views)
    state = core.restarted(replace(saved, rules=rules(config), views=views), now)
    if not shared(config.store):
        return state
    grace = now + config.takeover_grace
    return replace(state, lost=tuple(replace(s, deadline=max(s.deadline, grace)) for s in state.lost))


class GroupLock:
    """A group that is open: the only way to its driver."""

    def __init__(
        self,
        config: GroupConfig,
        driver: "Driver[Group, ev.GroupEvent, fx.GroupEffect]",
        slot: Slot[Group],
    ) -> None:
        self.id, self.config, self._driver, self.slot = GroupId(config.id), config, driver, slot
        self.order = (config.rank, config.id)
        """Place in the global order of groups."""
        self.decisions: deque[Decision] = deque(maxlen=REMEMBERED)
        self.post, self.put, self.tell, self.run = driver.post, driver.put, driver.tell, driver.run

    def configure(self, config: GroupConfig) -> None:
        """As if it had been opened with that; rank and nodes stay as they are."""
        self.config = config
        self._driver.step_with(functools.partial(core.step, policy=policy_named(config.policy)))

    @property
    def state(self) -> Group:
        return self._driver.state

    def patient(self, event: ev.GroupEvent) -> bool:
        """May it wait for the next event? Then whoever posts it does not wait for it."""
        return _patient(self.state, event)

    @property
    def policy(self) -> str:
        """In force now: what an operator set, or else what is configured."""
        return self.state.policy or self.config.policy


class Groups:
    """Iterates in the global order."""

    def __init__(
        self,
        config: OrchestratorConfig,
        *,
        store: Store,
        journal: Journal,
        clock: Clock,
        supervisor: Supervisor,
        changed: Callable[[GroupId], None],
        observer: Observer,
    ) -> None:
        self._config, self._store, self._journal = config, store, journal
        self._clock, self._supervisor, self._changed = clock, supervisor, changed
        self._observer = observer
        self._configured = {group.id: group for group in config.groups}
        self._locks: dict[str, GroupLock] = {}
        self._losing: dict[str, GroupLock] = {}
        self._deleted: dict[str, Slot[Group]] = {}
        """Their epochs stay in the store: a group of that name goes on above them."""
        self._perform: Perform = lambda group, effect: None

    def __iter__(self) -> Iterator[GroupLock]:
        return iter(self._locks.values())

    def losing(self) -> tuple[GroupLock, ...]:
        """Those that wait for a session to come back."""
        return tuple(self._losing.values())

    def __len__(self) -> int:
        return len(self._locks)

    def get(self, name: str) -> GroupLock | None:
        return self._locks.get(name)

    def unknown(self, request: str, name: str) -> pb.ServerMessage:
        """The refusal of a group that is not there."""
        known, name = ", ".join(self._locks), name[:63]
        text = f"there is no group {name!r} here; known: {known}"
        if not known:
            text = (
                f"there is no group {name!r} here, nor any other: start an agent that offers it (coslice up)"
            )
        return convert.refused(request, pb.UNKNOWN_GROUP, text, group=name, known_groups=known)

    def start(self, saved: Mapping[str, tuple[bytes, int]], perform: Perform) -> None:
        """Open every configured group and every saved one, each with the effects a restart says again."""
        self._perform = perform
        for key, found in saved.items():
            if key.startswith(KEY):
                name, slot = key.removeprefix(KEY), Slot(self._store, key, CODEC, found)
                state = slot.state()
                if state is not None and state.deleted:
                    self._deleted[name] = slot
                else:
                    self._open(self._config_of(name), slot)
        for config in self._config.groups:
            if config.id not in self._locks:
                self.open(config.id)

    def accepts(self, name: str, node: NodeId, *, beside: int = 0) -> bool:
        """May this node serve that group, when ``beside`` others are about to be opened? Nodes named in the
        configuration are the only ones.
        """
        config = self._configured.get(name)
        if config is None:
            room = len(self._locks) + beside < self._config.max_groups
            return name in self._locks or (self._config.open_groups and room)
        return config.nodes is None or node in config.nodes

    def drained(self, node: NodeId) -> Drained | None:
        """Is the node out for maintenance? One that is, is so in every group that it comes to."""
        found = (drain_of(lock.state, node) for lock in self)
        return next((drained for drained in found if drained is not None), None)

    def open(self, name: str) -> GroupLock:
        """The group, opened now if an agent's offer is the first that is heard of it."""
        if (lock := self._locks.get(name)) is not None:
            return lock
        slot = self._deleted.pop(name, None) or Slot(self._store, KEY + name, CODEC)
        return self._open(self._config_of(name), slot)

    def configure(self, configs: Sequence[GroupConfig]) -> list[str]:
        """Open what is new, and change what is different, now. Returns what is different, in prose. A group
        that is left out stays open, as one that agents offer."""
        self._configured = {config.id: config for config in configs}
        done = []
        for config in configs:
            lock = self._locks.get(config.id)
            if lock is None:
                self.open(config.id)
            elif lock.config != config:
                done.append(f"group {config.id}: {_changes(lock.config, config)}")
                lock.configure(config)
        return done

    async def delete(self, lock: GroupLock, reason: str, *, idle: bool = False) -> None:
        """Nobody waits for it or holds it any more. An agent that dials anew and offers it opens it again.
        ``idle``: only if nobody is in it; raises ``Rejected`` naming who is.

        Its driver goes on, deaf, for whoever still speaks to it on an open stream.
        """
        await lock.post(ev.GroupDeleted(at=self._clock.now(), reason=reason, idle=idle))
        if self._locks.get(lock.config.id) is lock:
            del self._locks[lock.config.id]
            self._losing.pop(lock.config.id, None)
            self._deleted[lock.config.id] = lock.slot
            self._observer.deleted(lock.id)

    def _config_of(self, name: str) -> GroupConfig:
        default = self._config
        return self._configured.get(name) or GroupConfig(
            id=name,
            policy=default.default_policy,
            admission=default.default_admission,
            max_slowdown=default.default_max_slowdown,
        )

    def _open(self, config: GroupConfig, slot: Slot[Group]) -> GroupLock:
        now, policy = self._clock.now(), policy_named(config.policy)
        nodes = tuple(NodeId(node) for node in config.nodes or ())
        saved = slot.state()
        if saved is None or saved.deleted:
            state = core.new_group(GroupId(config.id), nodes=nodes, rules=rules(self._config), at=now)
            state = replace(state, epoch=saved.epoch if saved is not None else state.epoch)
        else:
            state = taken_up(saved, now, self._config)
        self._observer.opened(state)
        driver: Driver[Group, ev.GroupEvent, fx.GroupEffect] = Driver(
            name=config.id,
            state=state,
            step=functools.partial(core.step, policy=policy),
            next_deadline=core.next_deadline,
            deadline_passed=lambda at: ev.DeadlinePassed(at=at),
            clock=self._clock,
            save=slot.save,
            perform=functools.partial(self._perform, GroupId(config.id)),
            record=functools.partial(self._record, config.id),
            changed=self._is_changed,
            told_again=_told_again,
            patient=_patient,
            on_stall=core.stalled,
            on_late=core.told_late,
            stall_limit=max(1.0, self._config.session_grace / 2),
        )
        if saved is not None and not saved.deleted:
            driver.start_with(core.resume(state))
            if config.nodes is not None and nodes != state.nodes:
                driver.tell(ev.NodesChanged(at=now, nodes=nodes))
        lock = self._locks[config.id] = GroupLock(config, driver, slot)
        self._locks = {one.config.id: one for one in sorted(self._locks.values(), key=lambda one: one.order)}
        if state.lost:
            self._losing[config.id] = lock
        self._supervisor.start(f"group {config.id}", lock.run())
        return lock

    def _is_changed(self, state: Group) -> None:
        lock = self._locks.get(state.id)
        if state.lost and lock is not None:
            self._losing[state.id] = lock
        else:
            self._losing.pop(state.id, None)
        self._changed(state.id)

    def _record(self, name: str, at: float, event: ev.GroupEvent, step: Step[Group, fx.GroupEffect]) -> None:
        lock = self._locks.get(name)
        if step.reasons and lock is not None:
            lock.decisions.append(Decision(at=at, event=event, reasons=step.reasons))
        self._observer.heard(event, step, self._clock.now())
        self._journal.record(name, at, event, step, brief(step.state))
