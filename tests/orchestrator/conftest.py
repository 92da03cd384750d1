"""Fixtures of the orchestrator's tests."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from orchestrator.world import World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack)
