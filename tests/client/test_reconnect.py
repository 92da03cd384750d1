"""The orchestrator goes away and comes back: places are kept, and nothing happens twice or not at all."""

import random
from collections.abc import Callable

import pytest
from client.fake_server import BOUND, FakeOrchestrator
from client.waiting import in_thread, time_is_up, wait_for

import coslice
from coslice import errors


def test_an_orchestrator_that_is_unavailable_at_first_is_tried_again(
    fake: FakeOrchestrator, client: coslice.Client
) -> None:
    fake.unavailable = 3
    client.acquire()
    assert client.yield_()
    assert fake.unavailable == 0
    assert fake.yields_applied == 1


def test_reconnecting_does_not_draw_from_the_programs_random_numbers(
    fake: FakeOrchestrator, client: coslice.Client
) -> None:
    before = random.getstate()
    fake.unavailable = 2
    client.acquire()
    client.yield_()
    assert random.getstate() == before


def test_one_that_starts_later_is_found(fake: FakeOrchestrator, client: coslice.Client) -> None:
    fake.kill()
    thread, granted = in_thread(client.acquire)
    fake.start()
    thread.join(BOUND)
    assert isinstance(granted[0], coslice.Grant)
    client.yield_()


def test_a_waiter_keeps_its_place_over_a_restart(
    fake: FakeOrchestrator, connect: Callable[..., coslice.Client]
) -> None:
    give = fake.take("a")
    first, second = connect("first"), connect("second")
    first_thread, first_result = in_thread(first.acquire)
    fake.until_waiting("a", 1)
    second_thread, second_result = in_thread(second.acquire)
    fake.until_waiting("a", 2)
    fake.kill()
    fake.start()
    fake.until(lambda: len(fake.hellos) == 4)
    assert len({hello.session for hello in fake.hellos}) == 2
    give()
    first_thread.join(BOUND)
    assert isinstance(first_result[0], coslice.Grant)
    assert not second_result
    assert first.yield_()
    second_thread.join(BOUND)
    assert isinstance(second_result[0], coslice.Grant)
    second.yield_()


@pytest.mark.parametrize("kind", ["acquire", "confirm"])
def test_a_lost_answer_to_an_acquire_costs_one_grant_only(
    fake: FakeOrchestrator, client: coslice.Client, kind: str
) -> None:
    fake.break_after(kind)
    client.acquire()
    assert fake.groups["a"].epoch == 1
    fake.until(lambda: len(fake.hellos) == 2)
    assert client.yield_()
    fake.until_free("a")
    assert (fake.yields_applied, fake.groups["a"].epoch) == (1, 1)


def test_a_yield_whose_answer_is_lost_happens_once_and_succeeds(
    fake: FakeOrchestrator, client: coslice.Client
) -> None:
    client.acquire()
    fake.break_after("yield")
    assert client.yield_()
    fake.until(lambda: fake.count("yield") == 2)
    assert fake.yields_applied == 1
    client.acquire()
    assert client.yield_()


def test_a_yield_during_an_outage_does_not_wait_and_is_delivered_afterwards(
    fake: FakeOrchestrator, client: coslice.Client
) -> None:
    client.acquire()
    fake.kill()
    assert client.yield_()
    fake.start()
    fake.until_free("a")
    assert fake.yields_applied == 1


def test_a_lease_survives_a_restart(fake: FakeOrchestrator, client: coslice.Client) -> None:
    client.acquire()
    fake.kill()
    fake.start()
    fake.until(lambda: len(fake.hellos) == 2)
    assert client.yield_()
    fake.until_free("a")
    assert fake.yields_applied == 1


def test_a_lease_that_ended_during_an_outage_is_reported_lost(
    fake: FakeOrchestrator, client: coslice.Client
) -> None:
    client.acquire()
    fake.kill()
    fake.lose_silently("a")
    fake.start()
    wait_for(client.should_yield)  # true once the welcome said so
    with pytest.raises(errors.LeaseLost):
        client.yield_()


def test_a_request_given_up_during_an_outage_is_withdrawn_afterwards(
    fake: FakeOrchestrator, client: coslice.Client
) -> None:
    give = fake.take("a")
    thread, result = in_thread(lambda: client.acquire("a", timeout=BOUND))
    fake.until_waiting("a", 1)
    fake.kill()
    time_is_up(client)
    thread.join(BOUND)
    assert isinstance(result[0], errors.AcquireTimeout)
    fake.start()
    client.note("still here")
    fake.until(lambda: fake.count("abandon") == 1)
    assert not fake.groups["a"].queue
    give()


def test_a_grant_that_comes_too_late_is_given_back(
    fake: FakeOrchestrator, connect: Callable[..., coslice.Client]
) -> None:
    client = connect()
    client.acquire("b")
    give = fake.take("c")
    thread, result = in_thread(lambda: client.acquire("c", timeout=BOUND))
    fake.until_waiting("c", 1)
    fake.kill()
    give()  # granted while the client cannot hear of it
    time_is_up(client)
    thread.join(BOUND)
    assert isinstance(result[0], errors.AcquireTimeout)
    fake.start()
    fake.until_free("c")
    assert client.yield_("b")


def test_an_outage_longer_than_allowed_ends_the_wait(
    fake: FakeOrchestrator, connect: Callable[..., coslice.Client]
) -> None:
    fake.take("a")
    client = connect()
    thread, result = in_thread(client.acquire)
    fake.until_waiting("a", 1)
    with client._link()._locked() as session:  # from now on: a busy machine takes longer to connect
        (claim,) = session._claims
        claim.reconnect_timeout = claim.connect_timeout = 0.2
    fake.kill()
    thread.join(BOUND)
    assert isinstance(result[0], errors.OrchestratorUnreachable)


def test_notes_of_an_outage_are_delivered_afterwards(fake: FakeOrchestrator, client: coslice.Client) -> None:
    fake.kill()
    client.note("reward", 1.0)
    client.note("reward", 2.0)
    fake.start()
    fake.until(lambda: fake.count("note") == 2)
    assert [note.value for note in fake.contents("note")] == [1.0, 2.0]
