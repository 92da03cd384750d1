"""Seeds of the simulated system: nothing is broken, everything struck, and a seed is its own replay."""

from collections import Counter

import pytest

from coslice.proof.chaos import EVENTS, run_seed

SEEDS = range(60)


@pytest.fixture(scope="module")
def outcomes() -> list:
    return [run_seed(seed) for seed in SEEDS]


def test_no_invariant_is_broken_and_everybody_is_served(outcomes: list) -> None:
    assert {o.seed: o.violation for o in outcomes if o.violation} == {}


def test_every_seed_is_a_long_storm(outcomes: list) -> None:
    assert min(o.events for o in outcomes) >= EVENTS


def test_trouble_of_every_kind_strikes(outcomes: list) -> None:
    faults: Counter[str] = Counter()
    for outcome in outcomes:
        faults.update(outcome.faults)
    kinds = {
        "agent hangs",
        "agent killed",
        "agent stream broken",
        "cancelled call",
        "client killed",
        "client stopped",
        "client stream broken",
        "goodbye",
        "job forgotten",
        "job started again",
        "message doubled",
        "message lost",
        "message overtaken",
        "newcomer",
        "node drained",
        "node serves again",
        "nodes changed",
        "orchestrator killed",
        "orchestrator stalled",
        "out of memory",
        "process killed",
        "stranger yields",
    }
    assert kinds <= set(faults)
    assert any(kind.startswith("snapshot ") for kind in faults)
    assert any(kind.startswith("restore ") for kind in faults)


def test_a_seed_replays_exactly() -> None:
    first, again = (run_seed(7, kept=100_000, tell=True) for _ in range(2))
    assert first == again
    assert len(first.story) > EVENTS


def test_a_story_names_events_reasons_and_effects() -> None:
    story = "\n".join(run_seed(3, kept=100_000, tell=True).story)
    assert "AcquireRequested(job=" in story
    assert "why: " in story
    assert "->  Grant(" in story
