"""The real lock machine under the real driver, in virtual time: clients that cancel, vanish and come back,
nodes that fail and leave, a process that is killed and started again, a disk that is full. After every step
the machine's own invariants are checked, and here what they mean to those outside:

* an effect is only ever seen once the state it follows from is in the store,
* nobody is granted while another, reachable, believes to hold,
* whatever happened, in the end everybody who waits is answered and nothing is left behind.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core import group as core
from coslice.core.events import ContextFact, ContextState, NodeFacts
from coslice.core.group_state import Group, Held, active, open_asks
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, NodeId, RequestId, SessionId
from coslice.core.invariants import check_group_step
from coslice.core.outcome import Rejected, Step
from coslice.core.policy import policy_named
from coslice.runtime.clock import LoopClock
from coslice.runtime.driver import Driver, Stopped
from coslice.store.base import StoreError
from coslice.store.codec import Codec
from coslice.store.memory import MemoryStore
from coslice.store.slot import Slot
from coslice.testing.stores import ObservedStore, disk_full
from coslice.testing.virtual_time import run_virtual

GROUP = GroupId("g")
CODEC = Codec(Group, kind="group")
CLOCK = LoopClock()
POLICY = policy_named("fifo")
OP_SECONDS = 2.0


class Client:
    """One process of one job, like a client library: it confirms what it wants and abandons the rest."""

    def __init__(self, world: "World", number: int) -> None:
        self.world, self.name = world, f"job-{number}"
        self.start = 0
        self.requests = 0
        self.connected = True
        self.asking: RequestId | None = None
        self.held: Epoch | None = None
        self._begin()

    def _begin(self) -> None:
        self.start += 1
        self.session = SessionId(f"{self.name}.{self.start}")
        self.asking, self.held, self.connected = None, None, True

    def acquire(self) -> None:
        if self.asking is None and self.held is None:
            self.requests += 1
            self.asking = RequestId(f"{self.session}/{self.requests}")
            self._ask()

    def _ask(self) -> None:
        if self.connected and self.asking is not None:
            self.world.tell(
                ev.AcquireRequested(
                    at=CLOCK.now(),
                    job=JobId(self.name),
                    incarnation=Incarnation(self.session),
                    session=self.session,
                    request=self.asking,
                )
            )

    def yield_(self) -> None:
        if self.held is not None and self.connected:
            event = ev.LeaseYielded(
                at=CLOCK.now(), job=JobId(self.name), session=self.session, epoch=self.held
            )
            self.held = None
            self.world.tell(event)

    def cancel(self) -> None:
        if self.asking is not None:
            request, self.asking = self.asking, None
            if self.connected:
                self.world.tell(ev.AcquireAbandoned(at=CLOCK.now(), request=request))

    def lose(self) -> None:
        if self.connected:
            self.connected = False
            self.world.tell(ev.SessionLost(at=CLOCK.now(), session=self.session))

    async def resume(self) -> None:
        if self.connected:
            return
        await self.world.post(ev.SessionResumed(at=CLOCK.now(), session=self.session))
        self.connected = True
        now = self.world.group.occupancy
        mine = isinstance(now, Held) and any(h.session == self.session for h in active(now))
        if not (isinstance(now, Held) and mine and now.epoch == self.held):
            self.held = None  # it is told so in the welcome
        self._ask()

    def close(self) -> None:
        """The process ends, and its successor is another incarnation."""
        self.world.tell(ev.SessionClosed(at=CLOCK.now(), session=self.session))
        self._begin()

    def hear(self, effect: fx.GroupEffect) -> None:
        match effect:
            case fx.Grant() if effect.request == self.asking:
                self.world.granted(self)
                self.asking, self.held = None, effect.epoch
                self.world.tell(ev.GrantConfirmed(at=CLOCK.now(), request=effect.request))
            case fx.Grant() if effect.epoch != self.held:
                self.world.tell(ev.AcquireAbandoned(at=CLOCK.now(), request=effect.request))
            case fx.Refuse() if effect.request == self.asking:
                self.asking = None
            case fx.LoseLease() if effect.epoch == self.held:
                self.held = None
            case _:
                pass


class Node:
    """One agent: room for one job, an operation takes a while, and it can be told to fail."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, NodeId(name)
        self.attached = False
        self.contexts: dict[JobId, ContextState] = {}
        self.version, self.epoch = 0, Epoch(0)
        self.failing: str | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    def facts(self) -> NodeFacts:
        self.version += 1
        facts = (
            ContextFact(job=job, state=state, bytes=8, pids=(1,)) for job, state in self.contexts.items()
        )
        return NodeFacts(version=self.version, contexts=tuple(facts), device_budget=10)

    def attach(self) -> None:
        if not self.attached:
            self.attached = True
            self.world.tell(
                ev.NodeAttached(at=CLOCK.now(), node=self.name, epoch=self.epoch, facts=self.facts())
            )

    def detach(self) -> None:
        if self.attached:
            self.attached = False
            self.world.tell(ev.NodeDetached(at=CLOCK.now(), node=self.name))

    def command(self, effect: fx.MakeResident) -> None:
        if self.attached:
            task = asyncio.create_task(self._carry_out(effect))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _carry_out(self, effect: fx.MakeResident) -> None:
        self.epoch = max(self.epoch, effect.epoch)
        await asyncio.sleep(OP_SECONDS)
        if effect.epoch < self.epoch:
            return  # a newer command took over
        failing, self.failing = self.failing, None
        others = [job for job in self.contexts if job != effect.job and self.contexts[job] == "live"]
        if failing is None or (failing == "stuck" and not others):
            self.contexts.update(dict.fromkeys(others, ContextState.SAVED))
            restored = self.contexts.get(effect.job) is ContextState.SAVED
            self.contexts[effect.job] = ContextState.LIVE
            self._report(
                ev.OpSucceeded(
                    at=CLOCK.now(), op=effect.op, node=self.name, restored=restored, facts=self.facts()
                )
            )
            return
        culprit = others[0] if failing == "stuck" else effect.job
        if failing == "lost":
            self.contexts[effect.job] = ContextState.LOST
        self._report(
            ev.OpFailed(
                at=CLOCK.now(),
                op=effect.op,
                node=self.name,
                culprit=culprit,
                reason=f"told to fail: {failing}",
                stuck=failing == "stuck",
                facts=self.facts(),
            )
        )

    def _report(self, event: ev.GroupEvent) -> None:
        if self.attached:
            self.world.tell(event)


class World:
    """An orchestrator that can be killed, and all who talk to it."""

    def __init__(self, clients: int, nodes: int) -> None:
        self.store = ObservedStore(MemoryStore())
        self.clients = [Client(self, number) for number in range(clients)]
        self.nodes = [Node(self, f"node-{number}") for number in range(nodes)]
        self.automatic = False
        self.grants = 0
        self._durable: Group | None = None
        self._task: asyncio.Task[None] | None = None
        self._driver: Driver[Group, ev.GroupEvent, fx.GroupEffect] | None = None

    @property
    def group(self) -> Group:
        assert self._driver is not None
        return self._driver.state

    def tell(self, event: ev.GroupEvent) -> None:
        if self._driver is not None:
            self._driver.tell(event)

    async def post(self, event: ev.GroupEvent) -> None:
        if self._driver is not None:
            await self._driver.post(event)

    async def start(self) -> None:
        found = (await self.store.load()).get("g")
        slot = Slot(self.store, "g", CODEC, found)
        saved = slot.state()
        names = [node.name for node in self.nodes]
        group = (
            core.new_group(GROUP, nodes=names, at=CLOCK.now())
            if saved is None
            else core.restarted(saved, CLOCK.now())
        )
        self._durable = group
        self._driver = Driver(
            name="g",
            state=group,
            step=self._step,
            next_deadline=core.next_deadline,
            deadline_passed=lambda at: ev.DeadlinePassed(at=at),
            clock=CLOCK,
            save=lambda state: self._save(slot, state),
            perform=self._perform,
            on_stall=core.stalled,
            on_late=core.told_late,
        )
        self._driver.start_with(core.resume(group))
        self._task = asyncio.create_task(self._driver.run())

    async def stop(self) -> None:
        assert self._task is not None
        self.check()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._driver = None

    def check(self) -> None:
        """Raise what broke the driver, if it was not the disk."""
        if self._task is not None and self._task.done():
            error = self._task.exception()
            if error is not None and not isinstance(error, StoreError):
                raise error

    async def restart(self) -> None:
        """Every stream breaks; agents and the clients that were connected dial in again."""
        await self.stop()
        were = [client for client in self.clients if client.connected]
        for client in self.clients:
            client.connected = False
        for node in self.nodes:
            for task in node.tasks:
                task.cancel()
        attached = [node for node in self.nodes if node.attached]
        for node in self.nodes:
            node.attached = False
        await self.start()
        for node in attached:
            node.attach()
        for client in were:
            await client.resume()

    def granted(self, client: Client) -> None:
        self.grants += 1
        others = [c.name for c in self.clients if c is not client and c.held is not None and c.connected]
        assert not others, f"{client.name} is granted while {others} hold"
        if self.automatic:
            asyncio.get_running_loop().call_later(1.0, client.yield_)

    def _step(self, group: Group, event: ev.GroupEvent) -> Step[Group, fx.GroupEffect]:
        taken = core.step(group, event, POLICY)
        check_group_step(group, event, taken)
        return taken

    async def _save(self, slot: Slot[Group], state: Group) -> None:
        await slot.save(state)
        data, _ = (await self.store.load())["g"]
        self._durable = CODEC.decode(data)

    def _perform(self, effect: fx.GroupEffect) -> None:
        assert self._durable == self.group  # durable first, then visible
        match effect:
            case fx.MakeResident():
                assert effect.epoch <= self._durable.epoch
                next(node for node in self.nodes if node.name == effect.node).command(effect)
            case fx.Grant() | fx.Refuse() | fx.LoseLease() | fx.AskYield():
                if isinstance(effect, fx.Grant):
                    assert effect.epoch <= self._durable.epoch
                for client in self.clients:
                    if client.session == effect.session and client.connected:
                        client.hear(effect)


Action = tuple[str, int]


async def _act(world: World, action: str, which: int) -> None:
    client = world.clients[which % len(world.clients)]
    node = world.nodes[which % len(world.nodes)]
    plain: dict[str, Callable[[], None]] = {
        "acquire": client.acquire,
        "yield": client.yield_,
        "cancel": client.cancel,
        "lose": client.lose,
        "close": client.close,
        "attach": node.attach,
        "detach": node.detach,
    }
    if action in plain:
        plain[action]()
    elif action == "resume":
        await client.resume()
    elif action == "restart":
        await world.restart()
    elif action == "disk full":
        world.store.fail_next = disk_full()
        world.tell(ev.SessionLost(at=CLOCK.now(), session=client.session))
        client.connected = False
        await asyncio.sleep(0.01)
        world.store.fail_next = None
        if world._task is not None and world._task.done():
            await world.restart()
    else:
        node.failing = action


async def _settle(world: World) -> None:
    """Everybody is well again; then everybody waiting is answered, and at the end nothing is left."""
    world.automatic = True
    for node in world.nodes:
        node.failing = None
        node.attach()
    await asyncio.sleep(0)
    world.check()
    for client in world.clients:
        await client.resume()
        client.yield_()
    for client in world.clients:
        client.acquire()
    await asyncio.sleep(4 * 3600.0)
    world.check()
    assert [c.name for c in world.clients if c.asking is not None or c.held is not None] == []
    for client in world.clients:
        client.close()
    await asyncio.sleep(60)
    assert not isinstance(world.group.occupancy, Held)
    assert list(open_asks(world.group)) == []
    assert [record.sessions for record in world.group.jobs if record.sessions] == []
    assert world.group.lost == ()


_ACTIONS = (
    ["acquire"] * 6
    + ["yield"] * 5
    + ["cancel", "lose", "resume", "resume", "close", "attach", "detach", "restart", "disk full"]
    + ["stuck", "lost", "failed"]
)
_scripts = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.5, 2.0, 3.0, 8.0, 40.0, 100.0]),
        st.sampled_from(_ACTIONS),
        st.integers(0, 3),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(clients=st.integers(1, 4), nodes=st.integers(1, 3), script=_scripts)
def test_through_restarts_cancels_and_failures(clients: int, nodes: int, script: Any) -> None:
    async def main() -> None:
        world = World(clients, nodes)
        await world.start()
        for node in world.nodes:
            node.attach()
        for delay, action, which in script:
            await asyncio.sleep(delay)
            world.check()
            await _act(world, action, which)
        await _settle(world)
        await world.stop()

    run_virtual(main())


def test_a_store_that_is_slow_for_good_lets_no_holder_stay_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(world: World, slot: Slot[Group], state: Group) -> None:
        await asyncio.sleep(3.0)
        await save(world, slot, state)

    async def main() -> None:
        world = World(clients=3, nodes=1)
        await world.start()
        world.nodes[0].attach()
        holder, waiter, other = world.clients
        holder.acquire()
        await asyncio.sleep(60)
        assert holder.held is not None
        waiter.acquire()
        for _ in range(800):
            other.acquire()
            await asyncio.sleep(5)
            other.cancel()
        assert holder.held is None
        assert waiter.held is not None
        await world.stop()

    save = World._save
    monkeypatch.setattr(World, "_save", slow)
    run_virtual(main())


def test_two_jobs_take_turns_and_a_restart_changes_nothing() -> None:
    async def main() -> None:
        world = World(clients=2, nodes=2)
        await world.start()
        for node in world.nodes:
            node.attach()
        world.automatic = True
        for turn in range(20):
            for client in world.clients:
                client.acquire()
            if turn % 5 == 4:
                await asyncio.sleep(0.5)
                await world.restart()
            await asyncio.sleep(30)
        assert world.grants == 40
        assert world.group.swaps > 0
        await _settle(world)
        await world.stop()

    run_virtual(main())


def test_a_yield_of_a_foreign_lease_is_raised_to_its_caller() -> None:
    async def main() -> None:
        world = World(clients=1, nodes=1)
        await world.start()
        event = ev.LeaseYielded(at=CLOCK.now(), job=JobId("x"), session=SessionId("s"), epoch=Epoch(9))
        with pytest.raises(Rejected) as refusal:
            await world.post(event)
        assert refusal.value.data["current_epoch"] == "0"
        driver = world._driver
        await world.stop()
        assert driver is not None
        with pytest.raises(Stopped):
            await driver.post(event)

    run_virtual(main())
