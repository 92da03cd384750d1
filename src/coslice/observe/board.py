"""The board of one process: its metrics, whether it is ready, and further pages. Served by ``observe.http``.

An app adds what it has when it is made; one board may carry several apps (``coslice up``).
"""

import asyncio
import importlib.metadata
from collections.abc import AsyncGenerator, Awaitable, Callable
from itertools import chain

import prometheus_client
from prometheus_client import CollectorRegistry
from starlette.routing import BaseRoute

from coslice.observe.exposition import pieces
from coslice.observe.lag import Lag
from coslice.observe.metric import Metric, Readings, Source
from coslice.observe.process import Process

BLOCK = 64 << 10
"""Characters that go out together."""
INFO = Metric("coslice_info", "gauge", "Always 1; the version that runs here.", ("version",))


class Board:
    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # series nobody asks for
        self.registry = CollectorRegistry()
        """Counters and histograms register themselves here."""
        self.registry.register(Process())
        self.lag = Lag(self.registry)
        self._readings = Readings()
        self.before: list[Callable[[], Awaitable[None]]] = []
        """Done before the values are read, and bounded: where they are not in this process."""
        self.ready: dict[str, Callable[[], str]] = {}
        """By part: why it is not ready; empty: it is."""
        self.routes: list[BaseRoute] = []
        """Further pages. They are served to whoever may read the metrics."""
        self.open: set[str] = set()
        """Paths of those that everybody may read: they must say nothing of jobs."""
        version = importlib.metadata.version("coslice")
        self.add(Source((INFO,), lambda: None, lambda _: [(INFO, (version,), 1.0)]))

    def add(self, source: Source) -> None:
        """Values that are read when somebody asks."""
        self._readings.sources.append(source)

    async def exposition(self) -> AsyncGenerator[bytes, None]:
        """All metrics in Prometheus' text format, as the states are now, in blocks. In the loop's own thread,
        a piece between any two turns of the loop: one of its own would take the interpreter from each of
        them."""
        for ask in self.before:
            await ask()
        block, size = [], 0
        for piece in pieces(chain(self._readings.gather(), self.registry.collect())):
            block.append(piece)
            size += len(piece)
            if size >= BLOCK:
                yield "".join(block).encode()
                block, size = [], 0
            await asyncio.sleep(0)
        yield "".join(block).encode()

    def waiting_for(self) -> dict[str, str]:
        """The parts that are not ready, each with why."""
        found = {part: why() for part, why in self.ready.items()}
        return {part: why for part, why in found.items() if why}
