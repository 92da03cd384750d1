"""The one call that others need: a scenario in, its figures (and, if wanted, its journal) out."""

import os
from pathlib import Path

from coslice.errors import ConfigError
from coslice.runtime.journal import Journal
from coslice.security.files import open_private
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
        _empty(Path(journal))
        book = Journal(journal, orchestrator="simulation")
        book.open(0.0)
    try:
        engine = Engine(scenario, journal=book, judge=judge, gate=gate)
        engine.run(progress)
    finally:
        if book is not None:
            book.close()
    return report(engine, policy=scenario.policy)


def _empty(journal: Path) -> None:
    """Not by removing it: whoever is root removes a device, too."""
    try:
        file = open_private(journal, os.O_WRONLY)
        try:
            os.ftruncate(file, 0)
        finally:
            os.close(file)
    except OSError as error:
        raise ConfigError(f"cannot write the journal {journal}: {error.strerror}") from None
