"""Fixtures of the orchestrator's tests."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from orchestrator.world import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """An SQLite file that does not exist yet."""
    return str(tmp_path / "state.db")
