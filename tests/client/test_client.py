"""``Client`` against an orchestrator with behaviour: one session, counted re-entry, bounds, typed errors."""

import signal
import threading
from collections.abc import Callable

import pytest
from client.fake_server import BOUND, FakeOrchestrator
from client.waiting import wait_for

import coslice
from coslice import errors
from coslice.gate import GATE


def start(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_grant_says_what_was_leased(fake: FakeOrchestrator, client: coslice.Client) -> None:
    grant = client.acquire()
    assert [(lease.group, lease.epoch) for lease in grant.leases] == [("a", 1)]
    assert grant.waited_s == 0.5
    assert not grant.restored
    assert fake.holder("a")
    assert client.yield_()
    assert fake.holder("a") is None


def test_constructing_a_client_dials_nothing(fake: FakeOrchestrator, client: coslice.Client) -> None:
    client.on_accelerators(lambda: None)
    assert not client.should_yield()
    assert fake.hellos == []


def test_the_grant_is_confirmed(fake: FakeOrchestrator, client: coslice.Client) -> None:
    client.acquire()
    fake.until(lambda: len(fake.confirmed) == 1)
    client.yield_()


def test_what_the_client_says_of_itself(
    fake: FakeOrchestrator, connect: Callable[..., coslice.Client]
) -> None:
    import os

    client = connect(incarnation="i-1", rank=3, world=4, need=77)
    client.acquire(phase="train")
    client.yield_()
    hello, asked = fake.hellos[0], fake.contents("acquire")[0]
    assert (hello.job, hello.incarnation, hello.rank, hello.pid) == ("job-1", "i-1", 3, os.getpid())
    assert hello.start_time > 0
    assert (asked.world, asked.need_bytes, asked.phase) == (4, 77, "train")


class TestReentry:
    def test_only_the_last_exit_yields(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        client.acquire()
        client.acquire()
        assert client.yield_() is False
        assert fake.holder("a")
        assert client.yield_() is True
        assert fake.count("acquire") == fake.yields_applied == 1

    def test_two_clients_of_a_job_in_one_process_share_the_lease(
        self, fake: FakeOrchestrator, connect: Callable[..., coslice.Client]
    ) -> None:
        one, other = connect(), connect()
        one.acquire()
        other.acquire()
        assert one.yield_() is False
        assert other.yield_() is True
        assert len(fake.hellos) == 1

    def test_a_closed_client_does_not_end_the_session_of_another(
        self, fake: FakeOrchestrator, connect: Callable[..., coslice.Client]
    ) -> None:
        one, other = connect(), connect()
        one.acquire()
        other.acquire()
        one.close()
        assert fake.holder("a")
        assert other.yield_() is True

    def test_threads_that_acquire_at_once_share_one_request(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        give = fake.take("a")
        inside = threading.Barrier(3)

        def work() -> None:
            with client.on_accelerators():
                inside.wait(BOUND)

        threads = [start(work), start(work)]
        fake.until_waiting("a", 1)
        give()
        inside.wait(BOUND)
        for thread in threads:
            thread.join(BOUND)
        fake.until_free("a")
        assert fake.count("acquire") == 1

    def test_many_threads_in_and_out(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        seen: list[bool] = []

        @client.on_accelerators
        def work() -> None:
            with client.on_accelerators(group=["a", "b"]):
                seen.append(None not in (fake.holder("a"), fake.holder("b")))

        threads = [start(lambda: [work() for _ in range(20)]) for _ in range(6)]
        for thread in threads:
            thread.join(BOUND)
        assert seen == [True] * 120
        fake.until_free("a")
        fake.until_free("b")
        assert GATE.active == 0
        assert fake.yields_applied == fake.groups["a"].epoch + fake.groups["b"].epoch

    def test_a_thread_that_gives_up_does_not_take_the_others_request_along(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        give = fake.take("a")
        granted = threading.Event()

        def patient() -> None:
            client.acquire(timeout=BOUND)
            granted.set()
            client.yield_()

        thread = start(patient)
        fake.until_waiting("a", 1)
        with pytest.raises(errors.AcquireTimeout):
            client.acquire(timeout=0)
        assert fake.count("abandon") == 0
        give()
        assert granted.wait(BOUND)
        thread.join(BOUND)

    def test_the_gate_is_entered_with_the_lock_and_left_before_it(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        assert GATE.active == 0
        client.acquire()
        assert GATE.active == 1
        client.yield_()
        assert GATE.active == 0

    def test_a_yield_inside_a_section_gives_way_and_an_acquire_resumes_it(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        with client.on_accelerators():
            assert client.yield_()
            assert fake.holder("a") is None
            client.acquire()
            assert fake.holder("a")
        assert fake.holder("a") is None
        assert GATE.active == 0


class TestSeveralGroups:
    def test_they_are_one_request(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        grant = client.acquire(["b", "a"])
        assert {lease.group for lease in grant.leases} == {"a", "b"}
        assert fake.count("acquire") == 1
        client.yield_()
        assert fake.holder("a") is fake.holder("b") is None

    def test_one_of_them_can_be_given_up_first(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        client.acquire(["a", "b"])
        assert client.yield_("a")
        assert fake.holder("a") is None
        assert fake.holder("b")
        assert GATE.active == 1
        assert client.yield_()
        assert fake.holder("b") is None
        assert GATE.active == 0

    def test_what_is_held_already_is_not_asked_for_again(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        client.acquire("a")
        client.acquire(["a", "b"])
        assert [list(asked.groups) for asked in fake.contents("acquire")] == [["a"], ["b"]]
        assert client.yield_() is False  # b is given up, a is held by the outer acquire
        assert fake.holder("b") is None
        assert client.yield_() is True

    def test_breaking_the_order_is_refused_and_keeps_what_was_held(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        client.acquire("b")
        with pytest.raises(errors.LockOrder):
            client.acquire("a")
        assert fake.holder("b")
        client.yield_()


class TestBounds:
    def test_an_acquire_that_times_out_leaves_no_waiter(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        fake.take("b")
        client.acquire("a")  # the stream is there: what is asked from now on arrives
        with pytest.raises(errors.AcquireTimeout, match="coslice explain b"):
            client.acquire("b", timeout=0.05)
        fake.until(lambda: fake.count("abandon") == 1)
        assert not fake.groups["b"].queue
        client.yield_()

    def test_an_interrupted_acquire_leaves_no_waiter(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        fake.take("a")
        main = threading.get_ident()

        def interrupt() -> None:
            fake.until_waiting("a", 1)
            signal.pthread_kill(main, signal.SIGINT)  # as ctrl-c: it also ends a wait

        thread = start(interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.acquire(timeout=BOUND)
        thread.join(BOUND)
        fake.until(lambda: not fake.groups["a"].queue)
        assert GATE.active == 0

    @pytest.mark.timeout(BOUND)
    def test_nobody_listening_is_reported_with_how_to_start_one(self) -> None:
        client = coslice.Client("127.0.0.1:1", job="j", groups="a", connect_timeout=0.2)
        with pytest.raises(errors.OrchestratorUnreachable, match=r"127\.0\.0\.1:1.*coslice up"):
            client.acquire()
        client.close()

    def test_an_orchestrator_that_never_welcomes_is_unreachable(
        self, fake: FakeOrchestrator, connect: Callable[..., coslice.Client]
    ) -> None:
        fake.silent = True
        with pytest.raises(errors.OrchestratorUnreachable):
            connect(connect_timeout=0.3).acquire()

    @pytest.mark.parametrize("timeout", [-1, float("nan")])
    def test_a_timeout_that_is_none_is_refused(self, client: coslice.Client, timeout: float) -> None:
        with pytest.raises(errors.ConfigError, match="timeout"):
            client.acquire(timeout=timeout)

    def test_status_of_an_absent_orchestrator_is_bounded(self) -> None:
        client = coslice.Client("127.0.0.1:1", job="j")
        with pytest.raises(errors.OrchestratorUnreachable, match="coslice up"):
            client.status(timeout=1.0)


class TestRefusals:
    def test_an_unknown_group_names_the_known_ones(self, client: coslice.Client) -> None:
        with pytest.raises(errors.UnknownGroup, match="a,b,c") as refusal:
            client.acquire("nope")
        assert refusal.value.data["known_groups"] == "a,b,c"
        assert GATE.active == 0

    def test_after_a_refusal_nothing_is_held(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        client.acquire("a")
        with pytest.raises(errors.UnknownGroup):
            client.acquire(["a", "nope"])
        assert client.yield_() is True
        assert fake.holder("a") is None

    def test_a_refused_session_is_the_callers_error_and_the_next_call_tries_again(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        from coslice.wire.v1 import coslice_pb2 as pb

        fake.refuse_hello = pb.Refused(
            code=pb.JOB_RUNNING, message="job-1 runs already, pid 7", data={"pid": "7"}
        )
        with pytest.raises(errors.JobRunning) as refusal:
            client.acquire()
        assert refusal.value.data["pid"] == "7"
        fake.refuse_hello = None
        client.acquire()
        assert client.yield_()

    def test_a_yield_without_a_lease(self, client: coslice.Client) -> None:
        with pytest.raises(errors.NotHeld, match="acquire"):
            client.yield_()

    def test_yielding_again_is_harmless(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        client.acquire()
        assert client.yield_()
        assert client.yield_()
        assert fake.yields_applied == 1

    def test_no_group_at_all(self, connect: Callable[..., coslice.Client]) -> None:
        with pytest.raises(errors.ConfigError, match="COSLICE_GROUP"):
            connect(groups=()).acquire()

    def test_status_of_an_unknown_group(self, client: coslice.Client) -> None:
        with pytest.raises(errors.UnknownGroup, match="a,b,c"):
            client.status("nope")


class TestLostLeases:
    def test_a_lost_lease_is_told_once_with_its_reason(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        client.acquire()
        fake.lose("a", "held for an hour")
        wait_for(client.should_yield)
        with pytest.raises(errors.LeaseLost, match="held for an hour") as lost:
            client.yield_()
        assert lost.value.data == {"group": "a", "epoch": "1", "reason": "held for an hour"}
        assert client.yield_()
        assert GATE.active == 0
        assert fake.count("yield") == 0

    def test_after_it_the_lock_can_be_taken_again(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        client.acquire()
        fake.lose("a", "overrun")
        wait_for(client.should_yield)
        with client.on_accelerators() as grant:  # nested, but the outer lease is no more
            assert grant.leases[0].epoch == 2
            assert fake.holder("a")
        assert fake.holder("a") is None
        with pytest.raises(errors.LeaseLost):
            client.yield_()

    def test_a_yield_that_crosses_the_loss_says_so(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        client.acquire()
        fake.lose_silently("a")
        with pytest.raises(errors.LeaseLost):
            client.yield_()

    def test_should_yield_when_somebody_waits(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        client.acquire()
        assert not client.should_yield()
        fake.ask_to_yield("a")
        wait_for(client.should_yield)
        assert client.should_yield("a")
        assert not client.should_yield("b")
        client.yield_()
        assert not client.should_yield()


class TestAside:
    def test_a_note_reaches_the_orchestrator(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        client.note("reward", 0.25, step=7, text="of 8")
        fake.until(lambda: fake.count("note") == 1)
        note = fake.contents("note")[0]
        assert (note.name, note.value, note.step, note.text) == ("reward", 0.25, 7, "of 8")

    def test_a_note_never_raises(self, client: coslice.Client) -> None:
        client.note("reward", "high")  # type: ignore[arg-type]
        with coslice.Client("127.0.0.1:1", job="j") as nobody:
            nobody.note("reward", 1.0)

    def test_status(self, fake: FakeOrchestrator, client: coslice.Client) -> None:
        client.acquire()
        status = client.status("a")
        assert [(group.group, group.state) for group in status.groups] == [("a", "held")]
        assert len(client.status().groups) == 3
        client.yield_()

    def test_closing_gives_everything_back_at_once(
        self, fake: FakeOrchestrator, client: coslice.Client
    ) -> None:
        client.acquire(["a", "b"])
        client.close()
        fake.until(lambda: fake.count("goodbye") == 1)
        assert fake.holder("a") is fake.holder("b") is None
        assert GATE.active == 0
