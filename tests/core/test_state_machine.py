"""The page about the state machine is what the machine does."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_generated_from_the_core_and_every_invariant_held_on_the_way() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "state_machine.py"))["document"]()
    page = (ROOT / "docs" / "state-machine.md").read_text()
    assert page == made, "run: make docs"
    edges = set(re.findall(r"^    (\w+) --> (\w+):", page, re.M))
    assert {("Empty", "Held"), ("Held", "Resident"), ("Resident", "Swapping"), ("Swapping", "Held")} <= edges
    assert ("Held", "Empty") not in edges, "who gave the lock back may still have state on the device"
