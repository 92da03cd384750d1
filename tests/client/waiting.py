"""Helpers for tests that wait, each with a bound."""

import threading
import time
from collections.abc import Callable

from client.fake_server import BOUND

import coslice


def in_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run it in a thread; the list gets its result or its exception."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def time_is_up(client: coslice.Client) -> None:
    """For its acquires, now, and not when a busy machine comes to it."""
    with client._link()._locked() as session:
        for claim in session._claims:
            claim.deadline = time.monotonic()
            claim.wake()


def wait_for(condition: Callable[[], bool]) -> None:
    """What the orchestrator pushes arrives without anything to wait on in the client's interface."""
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
