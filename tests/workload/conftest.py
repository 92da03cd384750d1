from collections.abc import Iterator
from typing import Any

import pytest

from coslice.gate import GATE
from coslice.workload import Handle, register


@pytest.fixture
def registered() -> Iterator[Any]:
    """``register`` without an environment; whatever was registered is brought back and closed afterwards."""
    handles: list[Handle] = []

    def call(*args: Any, **kwargs: Any) -> Handle:
        handles.append(register(*args, env={}, **kwargs))
        return handles[-1]

    yield call
    for handle in handles:
        if handle.parked:
            handle.restore()
        handle.close()
    assert not GATE.closed
