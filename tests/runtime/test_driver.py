"""The driver with a machine small enough to see through, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs

from coslice.core.effects import Reason, ReasonCode
from coslice.core.outcome import Rejected, Step
from coslice.runtime.clock import LoopClock
from coslice.runtime.driver import PATIENCE_S, UNSAVED_S, Driver, Stopped
from coslice.store.base import Conflict, Store
from coslice.store.codec import Codec
from coslice.store.memory import MemoryStore
from coslice.store.slot import Slot
from coslice.testing.stores import ObservedStore, disk_full
from coslice.testing.virtual_time import run_virtual

# ── a toy: it counts, announces each count, and refuses what is negative; a timer adds 100 once ───────


class Count(Struct, frozen=True):
    total: int = 0
    due: float | None = None


class Add(Struct, frozen=True):
    amount: int
    due_in: float | None = None
    at: float = 0.0


class Ping(Struct, frozen=True):
    """Changes nothing and has an effect."""


class Hear(Struct, frozen=True):
    """Adds without an effect; whoever sent it would send it again to a restarted machine."""

    amount: int


class Due(Struct, frozen=True):
    at: float


class Said(Struct, frozen=True):
    total: int


Event = Add | Ping | Hear | Due


def step(state: Count, event: Event) -> Step[Count, Said]:
    match event:
        case Add(amount=amount) if amount < 0:
            raise Rejected("failed", f"cannot add {amount}")
        case Add(amount=666):
            raise ZeroDivisionError("a defect of the machine")
        case Add():
            due = state.due if event.due_in is None else event.at + event.due_in
            after = Count(state.total + event.amount, due)
        case Ping():
            after = state
        case Hear(amount=amount):
            return Step(Count(state.total + amount, state.due))
        case Due():
            assert state.due is not None
            assert event.at >= state.due
            after = Count(state.total + 100, None)
    return Step(after, (Said(after.total),), (Reason(ReasonCode.MEASURED, "counted"),))


CODEC = Codec(Count, kind="count")


class Rig:
    """One driver over one store, and everything it did in the order in which it did it."""

    def __init__(
        self, store: Store | None = None, found: tuple[bytes, int] | None = None, **options: Any
    ) -> None:
        self.log: list[Any] = []
        self.store = ObservedStore(store or MemoryStore(), lambda entry: self.log.append(entry[0]))
        self.slot = Slot(self.store, "count", CODEC, found)
        save: Callable[[Count], Awaitable[None]] = self.slot.save
        arguments: dict[str, Any] = {
            "name": "count",
            "state": self.slot.state() or Count(),
            "step": step,
            "next_deadline": lambda state: state.due,
            "deadline_passed": Due,
            "clock": LoopClock(),
            "save": save,
            "perform": lambda effect: self.log.append(effect.total),
            "record": self._record,
            "changed": lambda state: self.log.append(("changed", state.total)),
        }
        self.records: list[tuple[float, Event, Step[Count, Said]]] = []
        self.driver: Driver[Count, Event, Said] = Driver(**(arguments | options))
        self.task: asyncio.Task[None] | None = None

    def start(self) -> "Rig":
        self.task = asyncio.create_task(self.driver.run())
        return self

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def _record(self, at: float, event: Event, taken: Step[Count, Said]) -> None:
        self.records.append((at, event, taken))

    @property
    def said(self) -> list[int]:
        return [entry for entry in self.log if isinstance(entry, int)]


def virtual(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtual(test())  # type: ignore[arg-type]

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtual
async def test_saved_first_then_acted_then_answered() -> None:
    rig = Rig().start()
    await rig.driver.post(Add(5))
    rig.log.append("answered")
    assert rig.log == ["saving", "saved", 5, ("changed", 5), "answered"]
    await rig.stop()


@virtual
async def test_whoever_waits_for_an_effect_goes_before_the_journal() -> None:
    heard = asyncio.get_running_loop().create_future()
    rig = Rig(perform=lambda effect: heard.set_result(None), record=lambda *_: rig.log.append("recorded"))

    async def wait() -> None:
        await heard
        rig.log.append("heard")

    waiting = asyncio.create_task(wait())
    rig.start()
    await rig.driver.post(Add(5))
    assert rig.log == ["saving", "saved", "heard", "recorded", ("changed", 5)]
    await waiting
    await rig.stop()


@virtual
async def test_what_was_performed_is_recorded_although_the_driver_is_cancelled_right_then() -> None:
    rig = Rig(perform=lambda effect: rig.task and rig.task.cancel()).start()
    await rig.driver.post(Add(5))
    assert len(rig.records) == 1
    await rig.stop()


@virtual
async def test_what_is_told_again_anyway_is_saved_with_the_next_turn_that_acts() -> None:
    rig = Rig(told_again=lambda event: isinstance(event, Hear)).start()
    await rig.driver.post(Hear(1))
    await rig.driver.post(Hear(2))
    assert rig.log == [("changed", 1), ("changed", 3)]
    await rig.driver.post(Add(5))
    assert rig.log[2:] == ["saving", "saved", 8, ("changed", 8)]
    await asyncio.sleep(10)
    assert len(rig.log) == 6, "nothing is left to save"
    await rig.stop()


@virtual
async def test_what_is_told_again_is_saved_soon_although_nothing_follows() -> None:
    rig = Rig(told_again=lambda event: isinstance(event, Hear)).start()
    await rig.driver.post(Hear(1))
    await asyncio.sleep(1.0)
    assert rig.log == [("changed", 1), "saving", "saved"]
    await rig.stop()


@virtual
async def test_what_is_told_again_and_again_is_saved_in_time_too() -> None:
    rig = Rig(told_again=lambda event: isinstance(event, Hear)).start()
    for _ in range(5):
        await rig.driver.post(Hear(1))
        await asyncio.sleep(0.75 * UNSAVED_S)
    assert rig.store.saves == 2, "the first two, then the next two; the fifth is still in time"
    await rig.stop()


@virtual
async def test_a_patient_event_is_saved_in_one_turn_with_the_next_that_does_not_wait() -> None:
    rig = Rig(patient=lambda state, event: isinstance(event, Hear)).start()
    await asyncio.sleep(1.0)
    waits = rig.driver.put(Hear(1))
    await asyncio.sleep(PATIENCE_S / 2)
    assert rig.log == []
    rig.driver.tell(Hear(2))
    await rig.driver.post(Add(5))
    assert rig.log == ["saving", "saved", 8, ("changed", 8)]
    assert waits.done()
    assert [event for _, event, _ in rig.records] == [Hear(1), Hear(2), Add(5)]
    await rig.stop()


@virtual
async def test_patience_ends_and_drivers_that_wait_save_together() -> None:
    loop = asyncio.get_running_loop()
    rigs = [Rig(patient=lambda state, event: isinstance(event, Hear)).start() for _ in range(2)]
    await asyncio.sleep(1.0)
    answered = []
    for rig in rigs:
        await asyncio.sleep(PATIENCE_S / 3)
        rig.driver.put(Hear(1)).add_done_callback(lambda _: answered.append(loop.time()))
    began = loop.time()
    await asyncio.sleep(3 * PATIENCE_S)
    assert [rig.log for rig in rigs] == [["saving", "saved", ("changed", 1)]] * 2
    assert answered[0] == answered[1]
    assert PATIENCE_S / 2 < answered[0] - began <= 2 * PATIENCE_S
    await asyncio.gather(*(rig.stop() for rig in rigs))


@virtual
async def test_an_event_that_need_not_be_patient_any_more_is_taken_at_once() -> None:
    """The turn that was on when it came changed the state."""
    rig = Rig(patient=lambda state, event: isinstance(event, Hear) and state.total == 0).start()
    rig.store.gate = asyncio.Event()
    busy = rig.driver.put(Add(5))
    await asyncio.sleep(1.0)
    waits = rig.driver.put(Hear(1))
    rig.store.gate.set()
    began = asyncio.get_running_loop().time()
    await waits
    assert busy.done()
    assert asyncio.get_running_loop().time() == began
    await rig.stop()


@virtual
async def test_patience_puts_no_deadline_off() -> None:
    rig = Rig(patient=lambda state, event: isinstance(event, Hear)).start()
    at = asyncio.get_running_loop().time()
    await rig.driver.post(Add(5, due_in=PATIENCE_S / 4, at=at))
    rig.driver.tell(Hear(1))
    await asyncio.sleep(PATIENCE_S / 2)
    assert rig.said == [5, 106], "what came before the deadline goes before it"
    await rig.stop()


@virtual
async def test_nothing_shows_while_a_save_is_under_way() -> None:
    rig = Rig().start()
    rig.store.gate = asyncio.Event()
    posted = asyncio.create_task(rig.driver.post(Add(5)))
    await asyncio.sleep(3600)
    assert rig.log == ["saving"]
    assert rig.driver.state == Count(0)
    assert not posted.done()
    assert rig.records == []
    rig.store.gate.set()
    await posted
    assert rig.driver.state == Count(5)
    await rig.stop()


@virtual
async def test_all_that_is_queued_shares_one_save_and_acts_in_order() -> None:
    rig = Rig().start()
    rig.store.gate = asyncio.Event()
    first = asyncio.create_task(rig.driver.post(Add(1)))
    await asyncio.sleep(1)
    rest = [asyncio.create_task(rig.driver.post(Add(10))) for _ in range(50)]
    await asyncio.sleep(1)
    rig.store.gate.set()
    await asyncio.gather(first, *rest)
    assert rig.store.saves == 2
    assert rig.said == [1, *range(11, 502, 10)]
    assert [entry for entry in rig.log if isinstance(entry, tuple)] == [("changed", 1), ("changed", 501)]
    await rig.stop()


@virtual
async def test_what_is_told_right_after_a_put_shares_its_save() -> None:
    rig = Rig().start()
    await asyncio.sleep(1)  # virtual time
    put = rig.driver.put(Add(1))
    rig.driver.tell(Add(10))
    await put
    assert (rig.store.saves, rig.said) == (1, [1, 11])
    await rig.stop()


@virtual
async def test_events_posted_before_run_are_served() -> None:
    rig = Rig()
    rig.driver.tell(Add(1))
    posted = asyncio.create_task(rig.driver.post(Add(2)))
    await asyncio.sleep(0)
    rig.start()
    await posted
    assert rig.said == [1, 3]
    await rig.stop()


@virtual
async def test_a_refusal_reaches_its_poster_only_and_changes_nothing() -> None:
    rig = Rig().start()
    results = await asyncio.gather(
        *(rig.driver.post(Add(amount)) for amount in (1, -2, 3)), return_exceptions=True
    )
    assert [type(result) for result in results] == [type(None), Rejected, type(None)]
    assert rig.said == [1, 4]
    refused = [taken for _, event, taken in rig.records if event == Add(-2)]
    assert refused[0].state == Count(1)
    assert refused[0].effects == ()
    assert refused[0].reasons == (Reason(ReasonCode.REFUSED, "cannot add -2"),)
    await rig.stop()


@virtual
async def test_a_refusal_that_was_only_told_is_recorded() -> None:
    rig = Rig().start()
    rig.driver.tell(Add(-1))
    await rig.driver.post(Ping())
    assert [event for _, event, _ in rig.records] == [Add(-1), Ping()]
    await rig.stop()


@virtual
async def test_an_unchanged_state_is_not_saved_and_still_acts() -> None:
    rig = Rig().start()
    await rig.driver.post(Ping())
    await rig.driver.post(Add(0))
    assert rig.log == [0, 0]
    assert rig.store.saves == 0
    await rig.stop()


@virtual
async def test_a_failed_save_acts_on_nothing_stops_visibly_and_tells_every_poster() -> None:
    for error in (disk_full(), Conflict("count", expected=0, found=3)):
        rig = Rig().start()
        await rig.driver.post(Add(1))
        done = list(rig.log)
        rig.store.gate, rig.store.fail_next = asyncio.Event(), error
        posted = [asyncio.create_task(rig.driver.post(event)) for event in (Add(1), Add(-1), Ping())]
        await asyncio.sleep(1)
        late = asyncio.create_task(rig.driver.post(Add(7)))  # arrives while the save is under way
        await asyncio.sleep(1)
        rig.store.gate.set()
        assert await asyncio.gather(*posted, late, return_exceptions=True) == [error] * 4
        assert rig.task is not None
        with pytest.raises(type(error)):
            await rig.task
        assert rig.log == [*done, "saving"]
        assert rig.driver.state == Count(1)
        assert len(rig.records) == 1
        with pytest.raises(Stopped):
            await rig.driver.post(Add(1))
        rig.driver.tell(Add(1))


@virtual
async def test_a_defect_of_the_machine_stops_the_driver_and_leaves_the_saved_state() -> None:
    rig = Rig().start()
    await rig.driver.post(Add(1))
    results = await asyncio.gather(
        *(rig.driver.post(Add(amount)) for amount in (1, 666)), return_exceptions=True
    )
    assert [type(result) for result in results] == [ZeroDivisionError] * 2
    assert rig.said == [1]
    assert CODEC.decode((await rig.store.load())["count"][0]) == Count(1)


@virtual
async def test_posters_are_told_when_the_driver_is_cancelled() -> None:
    rig = Rig().start()
    rig.store.gate = asyncio.Event()
    posted = asyncio.create_task(rig.driver.post(Add(1)))
    await asyncio.sleep(1)
    await rig.stop()
    with pytest.raises(Stopped, match="count"):
        await posted
    assert rig.said == []


@virtual
async def test_a_cancelled_poster_takes_nothing_back_and_harms_nobody() -> None:
    rig = Rig().start()
    rig.store.gate = asyncio.Event()
    gone = asyncio.create_task(rig.driver.post(Add(1)))
    stays = asyncio.create_task(rig.driver.post(Add(2)))
    await asyncio.sleep(1)
    gone.cancel()
    rig.store.gate.set()
    await stays
    assert rig.said == [1, 3]
    await rig.stop()


@virtual
async def test_resume_effects_come_before_everything_else() -> None:
    rig = Rig()
    rig.driver.start_with([Said(-1), Said(-2)])
    rig.start()
    await rig.driver.post(Add(1))
    assert rig.said == [-1, -2, 1]
    await rig.stop()


# ── time ───────────────────────────────────────────────────────────────────


@virtual
async def test_a_deadline_is_met_exactly_without_any_wake_before() -> None:
    asked = 0

    def next_deadline(state: Count) -> float | None:
        nonlocal asked
        asked += 1
        return state.due

    rig = Rig(next_deadline=next_deadline).start()
    start = LoopClock().now()
    await rig.driver.post(Add(1, due_in=86_400 * 3.5, at=start))
    asked = 0
    await asyncio.sleep(86_400 * 4)
    assert rig.said == [1, 101]
    assert [(at - start) for at, event, _ in rig.records if isinstance(event, Due)] == [
        pytest.approx(86_400 * 3.5, abs=1e-6)
    ]
    assert asked <= 8
    await rig.stop()


@virtual
async def test_a_deadline_can_be_brought_forward_and_put_off() -> None:
    rig = Rig().start()
    start = LoopClock().now()
    await rig.driver.post(Add(1, due_in=1000, at=start))
    await rig.driver.post(Add(1, due_in=10, at=start))
    await asyncio.sleep(5)
    await rig.driver.post(Add(1, due_in=100, at=start))
    await asyncio.sleep(90)
    assert rig.said == [1, 2, 3]
    await asyncio.sleep(10)
    assert rig.said == [1, 2, 3, 103]
    await rig.stop()


@virtual
async def test_events_that_are_here_go_before_a_deadline_that_passed_meanwhile() -> None:
    rig = Rig().start()
    start = LoopClock().now()
    await rig.driver.post(Add(1, due_in=10, at=start))
    rig.store.gate = asyncio.Event()
    slow = asyncio.create_task(rig.driver.post(Add(1)))  # its save takes longer than the deadline is away
    await asyncio.sleep(5)
    put_off = asyncio.create_task(rig.driver.post(Add(1, due_in=1000, at=start)))
    await asyncio.sleep(20)
    rig.store.gate.set()
    await asyncio.gather(slow, put_off)
    assert rig.said == [1, 2, 3]
    await rig.stop()


@virtual
async def test_a_busy_inbox_does_not_keep_a_deadline_waiting() -> None:
    rig = Rig().start()
    await rig.driver.post(Add(1, due_in=0.0, at=LoopClock().now()))
    for _ in range(3):
        await rig.driver.post(Ping())
    assert rig.said[-1] == 101
    await rig.stop()


@virtual
async def test_a_machine_with_nothing_to_do_at_its_deadline_does_not_spin() -> None:
    steps = 0

    def idle(state: Count, event: Event) -> Step[Count, Said]:
        nonlocal steps
        steps += 1
        return Step(state) if isinstance(event, Due) else step(state, event)

    rig = Rig(step=idle).start()
    await rig.driver.post(Add(1, due_in=5, at=LoopClock().now()))
    await asyncio.sleep(3600)
    assert steps == 2
    await rig.driver.post(Add(1))  # it still hears
    assert rig.driver.state.total == 2
    await rig.stop()


@virtual
async def test_a_driver_that_feeds_itself_does_not_starve_the_loop() -> None:
    fed = 0

    def feed(effect: Said) -> None:
        nonlocal fed
        fed += 1
        if fed < 10_000:
            rig.driver.tell(Ping())

    rig = Rig(perform=feed).start()
    rig.driver.tell(Ping())
    for _ in range(100):
        await asyncio.sleep(0)
    assert 10 < fed < 1000
    await rig.stop()


class StallingClock:
    """A clock that can be moved on while the loop stands still."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead


SLOW_S = 3.0


async def _slow_save(_: Count) -> None:
    await asyncio.sleep(SLOW_S)


def _regrace(state: Count, now: float) -> Count:
    return structs.replace(state, due=None if state.due is None else now + 10)


@pytest.mark.parametrize(("stall", "fresh"), [(5.1, True), (60.0, True), (2.4, False)])
def test_after_a_stall_the_deadline_gets_its_grace_again(stall: float, fresh: bool) -> None:
    async def main() -> None:
        clock = StallingClock()
        rig = Rig(clock=clock, on_stall=_regrace, stall_limit=5.0).start()
        await rig.driver.post(Add(1, due_in=10, at=clock.now()))
        await asyncio.sleep(4)
        before = clock.now()
        clock.ahead += stall  # the process was stopped, say, just here
        await asyncio.sleep(2)
        assert (rig.said == [1]) if fresh else (rig.driver.state.due == before + 6)
        if fresh:
            assert rig.driver.state.due is not None
            assert rig.driver.state.due >= before + stall + 10
        await asyncio.sleep(20)
        assert rig.said == [1, 101]
        await rig.stop()

    run_virtual(main())


@virtual
async def test_a_look_at_whether_the_loop_stands_still_is_no_turn() -> None:
    turns = 0

    class Counted(Driver[Count, Event, Said]):
        async def _take_turn(self) -> None:
            nonlocal turns
            turns += 1
            await super()._take_turn()

    rig = Rig()
    clock = StallingClock()
    rig.driver = Counted(
        name="count",
        state=Count(),
        step=step,
        next_deadline=lambda state: state.due,
        deadline_passed=Due,
        clock=clock,
        save=rig.slot.save,
        perform=lambda effect: rig.log.append(effect.total),
        on_stall=_regrace,
        stall_limit=5.0,
    )
    rig.start()
    await rig.driver.post(Add(1, due_in=100, at=clock.now()))
    await asyncio.sleep(60)
    assert turns == 1
    clock.ahead += 60  # the process was stopped
    await asyncio.sleep(9)
    assert rig.said == [1], "it has its grace again"
    await asyncio.sleep(9)
    assert (rig.said, turns) == ([1, 101], 3)
    await rig.stop()


def _given_late(before: Count, state: Count, now: float) -> Count:
    return state if state.due == before.due else _regrace(state, now)


@pytest.mark.parametrize(("took", "fresh"), [(12.0, True), (2.4, False)])
def test_a_save_that_took_long_takes_nothing_of_the_time_that_it_gave(took: float, fresh: bool) -> None:
    async def main() -> None:
        clock = LoopClock()
        rig = Rig(clock=clock, on_stall=_regrace, on_late=_given_late, stall_limit=5.0)
        slow = rig.store.gate = asyncio.Event()
        rig.start()
        began = clock.now()
        rig.driver.tell(Add(1, due_in=10, at=began))
        await asyncio.sleep(took)
        rig.store.gate = None
        slow.set()
        await asyncio.sleep(1)
        assert rig.said == [1]
        await asyncio.sleep(6.5)
        assert rig.said == [1], "until then it was granted nothing less than the time it was promised"
        await asyncio.sleep(10)
        assert rig.said == [1, 101]
        assert rig.records[-1][0] == pytest.approx(began + (took if fresh else 0.0) + 10, abs=0.01)
        await rig.stop()

    run_virtual(main())


@virtual
async def test_a_store_that_is_slow_for_good_puts_a_deadline_off_once() -> None:
    clock = LoopClock()
    rig = Rig(clock=clock, on_stall=_regrace, on_late=_given_late, stall_limit=5.0, save=_slow_save)
    rig.start()
    began = clock.now()
    rig.driver.tell(Add(1, due_in=10, at=began))
    while clock.now() < began + 60:
        await rig.driver.post(Add(1))
    due = [at for at, event, _ in rig.records if isinstance(event, Due)]
    assert len(due) == 1
    assert began + SLOW_S + 10 <= due[0] <= began + 2 * SLOW_S + 10
    await rig.stop()


# ── properties ─────────────────────────────────────────────────────────────

_events = st.lists(
    st.one_of(
        st.builds(Add, amount=st.integers(-3, 9), due_in=st.one_of(st.none(), st.floats(0, 5))),
        st.just(Ping()),
    ),
    max_size=8,
)
_plans = st.lists(st.tuples(_events, st.sampled_from(["go", "fail", "crash", "cancel"])), max_size=6)


@settings(max_examples=150, deadline=None)
@given(_plans)
def test_through_failures_and_restarts_no_effect_speaks_of_a_state_that_was_not_saved(plans: Any) -> None:
    async def main() -> None:
        inner = MemoryStore()
        for events, ending in plans:
            before = (await inner.load()).get("count")
            rig = Rig(inner, before)
            durable = {rig.driver.state.total}
            rig.driver = _watched(rig, durable)
            rig.start()
            if ending == "fail":
                rig.store.fail_next = disk_full()
            elif ending == "crash":
                rig.store.gate = asyncio.Event()
            now = LoopClock().now()
            posts = [asyncio.create_task(rig.driver.post(_stamped(event, now))) for event in events]
            await asyncio.sleep(0.001)
            if ending == "cancel":
                for post in posts[::2]:
                    post.cancel()
            if ending != "crash":
                await asyncio.sleep(10)
            await rig.stop()
            results = await asyncio.gather(*posts, return_exceptions=True)
            acknowledged = sum(
                event.amount
                for event, result in zip(events, results, strict=True)
                if result is None and isinstance(event, Add)
            )
            saved = (await inner.load()).get("count")
            total = 0 if saved is None else CODEC.decode(saved[0]).total
            started = 0 if before is None else CODEC.decode(before[0]).total
            assert total >= started + acknowledged  # nothing acknowledged is lost
            assert rig.driver.state.total == total  # what shows is what is saved

    run_virtual(main())


def _stamped(event: Event, now: float) -> Event:
    return structs.replace(event, at=now) if isinstance(event, Add) else event


def _watched(rig: Rig, durable: set[int]) -> Driver[Count, Event, Said]:
    """A driver whose effects are checked against what the store has at that moment."""

    async def save(state: Count) -> None:
        await rig.slot.save(state)
        durable.clear()
        durable.add(state.total)

    def perform(effect: Said) -> None:
        assert effect.total <= max(durable)

    return Driver(
        name="count",
        state=rig.driver.state,
        step=step,
        next_deadline=lambda state: state.due,
        deadline_passed=Due,
        clock=LoopClock(),
        save=save,
        perform=perform,
    )
