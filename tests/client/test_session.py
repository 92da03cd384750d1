"""The session protocol without IO: whatever is lost on the wire, both sides agree in the end."""

from collections import deque
from queue import SimpleQueue

import pytest
from client.fake_server import FakeOrchestrator
from hypothesis import given
from hypothesis import strategies as st

from coslice import errors
from coslice.client.session import Claim, Session
from coslice.wire.v1 import coslice_pb2 as pb

GROUPS = ("a", "b")


class Wire:
    """A session and an orchestrator, and messages under way that can be delivered one by one or lost."""

    def __init__(self) -> None:
        self.server = FakeOrchestrator(*GROUPS)
        self.session = Session(pb.Hello(job="j", session="s"), address="nowhere:1")
        self.to_server: deque[pb.ClientMessage] = deque()
        self.to_client: SimpleQueue[pb.ServerMessage | None] = SimpleQueue()
        self.session.connecting(now=0)
        self.open()

    def open(self) -> None:
        self.to_client = SimpleQueue()
        self.session.opened()
        self.collect()

    def collect(self) -> None:
        self.to_server.extend(self.session.outgoing)
        self.session.outgoing = []

    def break_(self) -> None:
        """All that is under way is lost, and the session connects again."""
        self.to_server.clear()
        self.server._streams.clear()
        self.session.closed(now=0, trouble="broken")
        self.open()

    def up(self) -> bool:
        """Deliver one message to the orchestrator."""
        if not self.to_server:
            return False
        message = self.to_server.popleft()
        if message.HasField("hello"):
            self.server.greet(message.hello, self.to_client)
        else:
            self.server.hear("s", message)
        return True

    def down(self) -> bool:
        """Deliver one message to the client."""
        if self.to_client.empty():
            return False
        message = self.to_client.get()
        assert message is not None
        self.session.received(message)
        self.collect()
        return True

    def settle(self) -> None:
        while self.up() or self.down():
            pass

    def want(self, *groups: str, **limits: float) -> Claim:
        defaults = {"started": 0.0, "connect_timeout": 10.0, "reconnect_timeout": 60.0}
        claim = Claim(groups=groups, wake=lambda: None, **(defaults | limits))  # type: ignore[arg-type]
        self.session.want(claim)
        self.collect()
        return claim

    def end(self, claim: Claim) -> None:
        """Yield or give up, whichever it is."""
        self.session.withdraw(claim, "the test ended it")
        self.collect()


ACTIONS = (
    "want a",
    "want b",
    "want a b",
    "end first",
    "end last",
    "up",
    "down",
    "settle",
    "break",
    "other",
    "lose",
)


@given(st.lists(st.sampled_from(ACTIONS), max_size=60))
def test_both_sides_agree_in_the_end(actions: list[str]) -> None:
    wire, claims, others = Wire(), [], []
    for action in actions:
        match action.split():
            case ["want", *groups]:
                claims.append(wire.want(*groups))
            case ["end", which] if claims:
                wire.end(claims.pop(0 if which == "first" else -1))
            case ["up"]:
                wire.up()
            case ["down"]:
                wire.down()
            case ["settle"]:
                wire.settle()
            case ["break"]:
                wire.break_()
            case ["other"] if wire.server.groups["a"].holder is None:
                others.append(wire.server.take("a"))
            case ["lose"] if wire.server.holder("a") == "s":
                wire.server.lose("a", "expired")
    for give in others:
        give()
    wire.break_()
    wire.settle()
    assert agree(wire)
    assert all(claim.settled or claim.error for claim in claims)
    for claim in claims:
        wire.end(claim)
    wire.settle()
    assert agree(wire)
    assert all(lock.holder is None and not lock.queue for lock in wire.server.groups.values())
    assert not wire.session._claims
    assert not wire.session._asks
    assert not wire.session._givings


def agree(wire: Wire) -> bool:
    """The client holds, confirmed, exactly what the orchestrator has it down for, at the same epochs."""
    # A request for two groups may have one of them already, which its client is not told yet.
    partial = set(wire.session._asks)
    books = {
        name: lock.epoch
        for name, lock in wire.server.groups.items()
        if lock.holder is not None and lock.holder[0] == "s" and lock.holder[1] not in partial
    }
    holds = wire.session._holds
    confirmed = all(hold.request in wire.server.confirmed for hold in holds.values())
    return confirmed and books == {name: hold.lease.epoch for name, hold in holds.items()}


def test_a_grant_that_nobody_wants_any_more_is_given_back() -> None:
    wire = Wire()
    claim = wire.want("a")
    while wire.up():
        pass
    assert wire.server.holder("a")
    wire.end(claim)
    wire.settle()
    assert wire.server.holder("a") is None
    assert not wire.server.confirmed


def test_of_a_shared_request_what_nobody_wants_any_more_is_given_back() -> None:
    wire = Wire()
    both, only_a = wire.want("a", "b"), wire.want("a")
    wire.end(both)
    wire.settle()
    assert only_a.settled
    assert wire.server.holder("a") == "s"
    assert wire.server.holder("b") is None


def test_a_refusal_for_anothers_group_does_not_fail_who_only_joined() -> None:
    wire = Wire()
    bad, good = wire.want("a", "nope"), wire.want("a")
    wire.settle()
    with pytest.raises(errors.UnknownGroup):
        wire.session.patience(bad, now=0)
    assert wire.session.patience(good, now=0) is None


@pytest.mark.parametrize(
    ("now", "started", "expected"),
    [(9.9, 0.0, None), (10.0, 0.0, errors.OrchestratorUnreachable), (100.0, 95.0, None)],
)
def test_how_long_an_orchestrator_may_stay_silent(
    now: float, started: float, expected: type[Exception] | None
) -> None:
    wire = Wire()
    claim = wire.want("a", started=started)
    if expected is None:
        wait = wire.session.patience(claim, now=now)
        assert wait is not None
        assert wait > 0
    else:
        with pytest.raises(expected):
            wire.session.patience(claim, now=now)


def test_an_orchestrator_that_answered_before_is_given_longer() -> None:
    wire = Wire()
    wire.settle()
    claim = wire.want("a")
    wire.session.closed(now=100, trouble="gone")
    assert wire.session.patience(claim, now=159) == pytest.approx(1.0)
    with pytest.raises(errors.OrchestratorUnreachable, match="gone"):
        wire.session.patience(claim, now=160)
