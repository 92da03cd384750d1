"""How late the event loop of this process comes to what is due: the time that everybody waits for it."""

import asyncio

from prometheus_client import CollectorRegistry

from coslice.observe.metric import FINE, Metric, histogram

LAG = Metric(
    "coslice_loop_lag_seconds", "histogram", "How late the event loop of this process came to a timer."
)
EVERY_S = 0.1


class Lag:
    """``run`` measures until cancelled."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._found = histogram(LAG, registry, FINE)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:  # a loop that stands still tells nobody: only a timer that comes late shows it
            due = loop.time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self._found.observe(max(0.0, loop.time() - due))
