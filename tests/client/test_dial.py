"""Whom a caller dials next."""

import pytest

from coslice.errors import ConfigError
from coslice.wire.leader import LEADER, LEADER_ID, SILENT, Dial

HINT = ((LEADER, "c:3"),)


def test_each_address_is_tried_before_a_pause() -> None:
    dial = Dial("a:1,b:2,c:3", encrypted=False)
    tried, pauses = [dial.address], []
    for _ in range(5):
        pauses.append(dial.failed())
        tried.append(dial.address)
    assert tried == ["a:1", "b:2", "c:3", "a:1", "b:2", "c:3"]
    assert pauses == [False, False, True, False, False]


def test_a_standby_that_names_the_leader_is_followed_at_once() -> None:
    dial = Dial("a:1,b:2,c:3", encrypted=False)
    assert dial.failed(HINT) is False
    assert dial.address == "c:3"


def told(address: str, leader: str) -> tuple[tuple[str, str], ...]:
    return ((LEADER, address), (LEADER_ID, leader))


@pytest.mark.parametrize(("given", "next_"), [("a:1,b:2,c:3", "b:2"), ("c:3,a:1", "c:3"), ("a:1", "a:1")])
def test_when_the_leader_is_lost_another_is_asked_first(given: str, next_: str) -> None:
    dial = Dial(given, encrypted=True)
    while dial.address != "a:1":
        dial.failed(told("a:1", "it"))
    dial.reached()
    assert dial.failed() is True  # its stream broke: not all at once
    assert dial.address == next_
    dial.failed(told("a:1", "it"))  # it is still there
    assert dial.address == "a:1"


def test_a_leader_that_does_not_answer_is_shown_to_the_standbys() -> None:
    dial = Dial("a:1,b:2,c:3", encrypted=False)
    dial.failed()
    assert (dial.address, dial.metadata) == ("b:2", ())
    dial.failed(told("a:1", "old"))
    assert (dial.address, dial.metadata) == ("c:3", ((SILENT, "old"),))
    assert dial.failed(told("b:2", "new")) is False  # which stood by before, but answered
    assert dial.address == "b:2"
    dial = Dial("c:3,b:2", encrypted=False)
    assert dial.failed(told("c:3", "new")) is False  # elected while we waited there
    assert dial.address == "c:3"
    dial.reached()
    assert dial.metadata == ()


@pytest.mark.parametrize("addresses", ["a:1", "a:1,b:2", "a:1,b:2,c:3"])
def test_hints_are_not_followed_in_circles(addresses: str) -> None:
    dial = Dial(addresses, encrypted=True)
    turns = 0
    while not dial.failed(told(f"{'abc'[turns % 3]}:{turns % 3 + 1}", str(turns))):
        turns += 1
        assert turns < 10


def test_a_leader_that_did_not_answer_is_tried_again_later() -> None:
    dial = Dial("a:1,b:2", encrypted=True)
    tried = []
    for _ in range(12):
        dial.failed(told("x:9", "one") if dial.address != "x:9" else None)
        tried.append(dial.address)
    assert tried.count("x:9") >= 2


@pytest.mark.parametrize(("encrypted", "followed"), [(True, "c:3"), (False, "a:1")])
def test_an_address_that_was_not_given_is_believed_only_with_tls(encrypted: bool, followed: str) -> None:
    dial = Dial("a:1", encrypted=encrypted)
    dial.failed(HINT)
    assert dial.address == followed


@pytest.mark.parametrize("text", ["", "a", "a:b", "a:1,b", ":1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Dial(text, encrypted=False)
