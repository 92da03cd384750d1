"""Work of a second thread that computes in Python, beside an event loop that must not wait for it."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_S = 0.0001
SERVER_S = 0.0005
"""Of a server: its store's thread has to win the interpreter back from a busy loop after every commit, and
everybody who waits for the commit waits for that."""
_lock = threading.Lock()
_inside: list[float] = []
"""Of each that is inside: what was in force before the first of them."""


@contextmanager
def computing() -> Iterator[None]:
    """Around what computes in a thread. Python lets one keep the interpreter for 5 ms at a time, which is
    more than a hand-over takes, and the loop asks for it many times in each: less, as long as this lasts."""
    with _lock:
        _inside.append(_inside[0] if _inside else sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        with _lock:
            before = _inside.pop()
            if not _inside:
                sys.setswitchinterval(before)
