"""``on_accelerators`` holds for exactly as long as the body runs, whatever the body is."""

import asyncio
import functools
import gc
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from client.fake_server import BOUND, FakeOrchestrator

import coslice
from coslice import errors
from coslice.gate import GATE


@pytest.fixture(autouse=True)
def nothing_is_left(fake: FakeOrchestrator) -> Iterator[None]:
    yield
    fake.until_free("a")
    assert GATE.active == 0


class TestFunctions:
    def test_with_and_without_parentheses(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        @client.on_accelerators
        def bare(x: int) -> tuple[int, bool]:
            """What it does."""
            return x, fake.holder("a") is not None

        @client.on_accelerators()
        def called(x: int) -> tuple[int, bool]:
            return x, fake.holder("a") is not None

        @client.on_accelerators(group="b", phase="eval")
        def other() -> bool:
            return fake.holder("b") is not None

        assert bare(3) == called(3) == (3, True)
        assert other()
        assert (bare.__name__, bare.__doc__) == ("bare", "What it does.")
        assert [asked.phase for asked in fake.contents("acquire")] == ["bare", "called", "eval"]

    def test_methods(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        class Trainer:
            @client.on_accelerators
            def step(self) -> tuple[object, str | None]:
                return self, fake.holder("a")

            @client.on_accelerators
            @staticmethod
            def still() -> str | None:
                return fake.holder("a")

            @client.on_accelerators
            @classmethod
            def of_class(cls) -> str | None:
                return fake.holder("a")

        trainer = Trainer()
        assert trainer.step()[0] is trainer
        assert trainer.step()[1]
        assert trainer.still()
        assert Trainer.of_class()

    def test_a_partial_can_be_decorated(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        held = client.on_accelerators(functools.partial(fake.holder, "a"))
        assert held()

    @pytest.mark.parametrize("thing", [dict, 3, None])
    def test_what_is_no_function_is_refused(self, client: coslice.Client, thing: object) -> None:
        with pytest.raises(TypeError, match="functions and methods"):
            client.on_accelerators()(thing)  # type: ignore[type-var]

    def test_nested_sections_are_one_lease(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        @client.on_accelerators
        def inner() -> None:
            pass

        @client.on_accelerators
        def outer() -> str | None:
            inner()
            return fake.holder("a")

        assert outer()
        assert fake.yields_applied == 1

    def test_with_block(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        section = client.on_accelerators(phase="save")
        with section as outer, section as inner:
            assert outer.leases == inner.leases
            assert fake.holder("a")
        with section:
            assert fake.holder("a")
        assert fake.yields_applied == 2

    def test_one_section_object_serves_several_threads(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        section, inside = client.on_accelerators(), threading.Barrier(2)

        def work() -> None:
            with section:
                inside.wait(BOUND)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND)
        assert fake.yields_applied == 1

    def test_a_timeout_belongs_to_the_section(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        give = fake.take("a")
        with pytest.raises(errors.AcquireTimeout), client.on_accelerators(timeout=0):
            pass
        give()


class TestExceptions:
    def test_an_exception_yields(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        with pytest.raises(ZeroDivisionError), client.on_accelerators():
            raise ZeroDivisionError
        assert fake.holder("a") is None

    def test_the_users_exception_stays_primary_when_the_yield_fails(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        @client.on_accelerators
        def train() -> None:
            fake.lose_silently("a")
            raise ZeroDivisionError("the user's")

        with pytest.raises(ZeroDivisionError, match="the user's") as raised:
            train()
        assert any("not held under epoch 1" in note for note in raised.value.__notes__)

    def test_a_lost_lease_does_not_take_the_result_away(
        self, fake: FakeOrchestrator, client: coslice.Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        @client.on_accelerators
        def train() -> str:
            fake.lose("a", "held for an hour")
            return "an hour's work"

        with caplog.at_level(logging.WARNING, "coslice"):
            assert train() == "an hour's work"
        assert any(word in caplog.text for word in ("held for an hour", "not held under epoch 1"))


class TestGenerators:
    def test_it_holds_from_the_first_next_to_exhaustion(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        @client.on_accelerators
        def rollouts() -> Iterator[bool]:
            yield fake.holder("a") is not None
            yield fake.holder("a") is not None

        assert inspect.isgeneratorfunction(rollouts)
        made = rollouts()
        assert fake.count("acquire") == 0
        assert next(made)
        assert fake.holder("a")
        assert list(made) == [True]
        assert fake.holder("a") is None

    def test_send_throw_and_return_reach_the_body(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        @client.on_accelerators
        def echo():  # type: ignore[no-untyped-def]
            got = yield "ready"
            try:
                yield got
            except KeyError:
                return "thrown"

        made = echo()
        assert next(made) == "ready"
        assert made.send("sent") == "sent"
        with pytest.raises(StopIteration, match="thrown"):
            made.throw(KeyError())

    def test_closing_early_yields(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        @client.on_accelerators
        def forever() -> Iterator[int]:
            while True:
                yield 1

        for _ in forever():
            break
        gc.collect()
        fake.until_free("a")

    def test_one_that_was_never_started_never_acquires(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        @client.on_accelerators
        def rollouts() -> Iterator[int]:
            yield 1

        rollouts().close()  # type: ignore[attr-defined]
        assert fake.count("acquire") == 0

    def test_one_caught_in_a_cycle_is_released_by_the_collector(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        @client.on_accelerators
        def rollouts(box: list[object]) -> Iterator[int]:
            yield len(box)

        box: list[object] = []
        box.append(rollouts(box))
        next(box[0])  # type: ignore[call-overload]
        assert fake.holder("a")
        del box
        gc.collect()
        fake.until_free("a")

    def test_one_closed_by_the_collector_in_the_middle_of_another_call(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        @client.on_accelerators
        def rollouts() -> Iterator[int]:
            yield 1

        made = rollouts()
        next(made)
        with client._link()._locked():  # where a collection may strike
            made.close()  # type: ignore[attr-defined]
        fake.until_free("a")

    def test_one_handed_to_another_thread(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        @client.on_accelerators
        def rollouts() -> Iterator[int]:
            yield 1
            yield 2

        made = rollouts()
        next(made)
        thread = threading.Thread(target=lambda: list(made))
        thread.start()
        thread.join(BOUND)
        assert fake.holder("a") is None

    def test_a_later_thread_with_the_number_of_the_one_that_began_it_is_another(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        @client.on_accelerators
        def rollouts() -> Iterator[int]:
            client.yield_()
            yield 1

        made, numbers = rollouts(), list[int]()

        def work() -> None:
            numbers.append(threading.get_ident())
            if len(numbers) == 1:
                next(made)
            elif numbers[-1] == numbers[0] or len(numbers) == 1000:
                client.acquire()

        while fake.count("acquire") < 2:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(BOUND)
        made.close()  # type: ignore[attr-defined]
        assert GATE.active == 1, "what the later thread took is not the generator's to give up"
        client.yield_()


class TestCoroutines:
    async def test_the_lock_is_held_while_the_body_runs(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        @client.on_accelerators
        async def generate() -> list[bool]:
            before = fake.holder("a") is not None
            await asyncio.sleep(0.02)
            return [before, fake.holder("a") is not None]

        assert inspect.iscoroutinefunction(generate)
        assert await generate() == [True, True]

    async def test_waiting_does_not_block_the_loop_and_cancelling_gives_the_place_up(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        give = fake.take("a")

        @client.on_accelerators
        async def generate() -> None:
            raise AssertionError("never granted")

        task = asyncio.create_task(generate())
        await asyncio.to_thread(fake.until_waiting, "a", 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(fake.until_waiting, "a", 0)
        give()

    async def test_tasks_share_the_lease(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        inside = asyncio.Barrier(3)

        @client.on_accelerators
        async def generate() -> None:
            await inside.wait()

        async with asyncio.timeout(BOUND):
            await asyncio.gather(generate(), generate(), generate())
        assert fake.yields_applied == 1

    async def test_async_with(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        async with client.on_accelerators(timeout=BOUND) as grant:
            assert grant.leases[0].group == "a"
            assert fake.holder("a")
        assert fake.holder("a") is None

    async def test_async_generators_hold_from_first_next_to_the_end(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        @client.on_accelerators
        async def rollouts() -> AsyncIterator[str | None]:
            yield fake.holder("a")
            yield fake.holder("a")

        assert inspect.isasyncgenfunction(rollouts)
        assert all([item async for item in rollouts()])
        assert fake.holder("a") is None

    async def test_async_generators_pass_on_what_is_sent_and_thrown_and_close_early(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        ended: list[str] = []

        @client.on_accelerators
        async def echo():  # type: ignore[no-untyped-def]
            try:
                got = yield "ready"
                try:
                    yield got
                except KeyError:
                    yield "thrown"
            finally:
                ended.append("closed")

        made = echo()
        assert await anext(made) == "ready"
        assert await made.asend("sent") == "sent"
        assert await made.athrow(KeyError()) == "thrown"
        assert fake.holder("a")
        await made.aclose()
        assert ended == ["closed"]
        await asyncio.to_thread(fake.until_free, "a")
