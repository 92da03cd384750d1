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


def test_a_leader_that_does_not_answer_is_shown_to_the_next_standby() -> None:
    dial = Dial("a:1,b:2,c:3", encrypted=False)
    dial.failed()  # the stream to a broke
    assert dial.address == "b:2"
    dial.failed(((LEADER, "a:1"), (LEADER_ID, "old")))
    assert (dial.address, dial.metadata) == ("a:1", ())
    dial.failed()
    assert (dial.address, dial.metadata) == ("c:3", ((SILENT, "old"),))
    assert dial.failed(((LEADER, "c:3"), (LEADER_ID, "new"))) is False  # it was elected meanwhile
    assert dial.address == "c:3"
    dial.reached()
    assert dial.metadata == ()


def test_hints_are_not_followed_in_circles() -> None:
    dial = Dial("a:1,b:2,c:3", encrypted=False)
    turns = 0
    while not dial.failed(((LEADER, "abc"[turns % 3] + ":" + "123"[turns % 3]), (LEADER_ID, str(turns)))):
        turns += 1
        assert turns < 10


def test_a_leader_that_did_not_answer_is_tried_again_later() -> None:
    dial = Dial("a:1,b:2", encrypted=True)
    hint = ((LEADER, "x:9"), (LEADER_ID, "one"))
    tried = []
    for _ in range(8):
        dial.failed(hint if dial.address != "x:9" else None)
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
