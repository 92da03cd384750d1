"""The one call that others need: a scenario in, its figures (and, if wanted, its journal) out."""

from pathlib import Path

from coslice.runtime.journal import Journal
from coslice.simulate.engine import Engine, Progress
from coslice.simulate.gate import Gate
from coslice.simulate.report import Report, report
from coslice.simulate.spec import Scenario


def simulate(
    scenario: Scenario,
    *,
    journal: str | Path | None = None,
    judge: bool = False,
    progress: Progress | None = None,
    gate: Gate | None = None,
) -> Report:
    """Run ``scenario`` to its end. ``journal``: a file in the format of a live run, replaced if it is there.
    ``judge``: check the core's invariants after every step. ``gate``: who may keep jobs from the locks.
    Raises ``ConfigError`` for a bad scenario."""
    book = None
    if journal is not None:
        Path(journal).unlink(missing_ok=True)
        book = Journal(journal, orchestrator="simulation")
        book.open(0.0)
    try:
        engine = Engine(scenario, journal=book, judge=judge, gate=gate)
        engine.run(progress)
    finally:
        if book is not None:
            book.close()
    return report(engine, policy=scenario.policy)
