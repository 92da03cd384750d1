"""The defects of ``make mutants`` can still be put back: what each replaces is in the core, once."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MUTANTS = runpy.run_path(str(ROOT / "tools" / "mutants.py"))["MUTANTS"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_can_be_put_back(mutant: Any) -> None:
    for module, old, _ in mutant.edits:
        text = (ROOT / "src" / "coslice" / "core" / f"{module}.py").read_text()
        assert text.count(old) == 1, f"{module}.py: {old!r}"
