"""Settings for all tests. Hypothesis runs the same examples every time: what fails, fails for everybody.

``HYPOTHESIS_PROFILE=search`` draws new examples instead, many of them, to find what nobody thought of.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from coslice.gate import GATE

# A test of several processes compiles us once, not in each of them.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that starts us in the background has it ignored, in us and in all that we start: tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "fixed",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", deadline=None, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


SEVERAL_PROCESSES = ("demo", "faults", "cli", "agent", "workload", "client", "security")
"""Folders of tests that take seconds, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: at the end no worker is alone with one."""
    here = Path(__file__).parent
    order = {name: number for number, name in enumerate(SEVERAL_PROCESSES)}
    items.sort(key=lambda item: order.get(item.path.relative_to(here).parts[0], len(order)))


@pytest.fixture(autouse=True)
def no_cores_left_behind() -> Iterator[None]:
    """The gate is the process's: a client with cores would pin the sections of every later test."""
    yield
    GATE.configure(())
