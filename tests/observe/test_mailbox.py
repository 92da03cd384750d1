"""What a viewer is sent: everything in its order, or, when it fell behind, a snapshot; of bounded size."""

from hypothesis import given
from hypothesis import strategies as st

from coslice.observe.mailbox import Mailbox


def test_it_begins_with_a_snapshot_and_keeps_nothing_until_then() -> None:
    mailbox = Mailbox()
    mailbox.put(b"a")
    assert mailbox.behind
    assert mailbox.take() == b""
    mailbox.caught_up()
    assert not mailbox
    mailbox.put(b"b")
    mailbox.put(b"c")
    assert mailbox.take() == b"bc"
    assert not mailbox


@given(st.lists(st.integers(0, 40), max_size=200), st.integers(1, 10), st.integers(10, 100))
def test_a_slow_viewer_costs_a_bounded_amount_and_misses_nothing_without_a_snapshot(
    story: list[int], messages: int, size: int
) -> None:
    """0: it reads; anything else: a message of that size. What it reads after a snapshot is unbroken."""
    mailbox = Mailbox(messages, size)
    mailbox.caught_up()
    told, last = 0, 0
    for entry in story:
        if entry:
            told += 1
            mailbox.put(b"%d," % told + b" " * entry)
            assert mailbox.bytes <= size
            continue
        if mailbox.behind:
            mailbox.caught_up()
            last = told
        for piece in mailbox.take().replace(b" ", b"").split(b",")[:-1]:
            assert int(piece) == last + 1
            last += 1
        assert last == told
