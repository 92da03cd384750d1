"""The load of ``coslice bench scale``: each lock is passed on in turn, and none is held twice."""

import asyncio
import time
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from coslice.cli.bench_scale_load import Lag, Load, apart
from coslice.cli.bench_scale_server import read, summary
from coslice.cli.rpc import orchestrator
from coslice.observe.metric import FINE, histogram
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import OrchestratorConfig
from coslice.orchestrator.metrics import HANDOVER
from coslice.wire.v1 import coslice_pb2 as pb


async def test_every_lock_is_passed_on_at_its_moments_and_held_by_one(tmp_path: Path) -> None:
    app = OrchestratorApp(OrchestratorConfig(listen="127.0.0.1:0", store=str(tmp_path / "store.db")))
    await app.start()
    load = Load(app.address, 0, 3, 3, 1)
    try:
        assert await load.connect() == {"jobs": 9}
        await load.ask()
        async with asyncio.timeout(60):
            # Who is heard is in the queue a moment later, and no status is pushed.
            while await asyncio.to_thread(_queues, app.address) != 3 * [("held", 2)]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        ran = await load.run(begin=time.monotonic(), seconds=1.5, period=0.75, offset=0.0)
        assert ran["troubles"] == []
        assert len(ran["took"]) + ran["missed"] == 6
        assert ran["took"]
        assert all(took > 0 for took in ran["took"])
        assert not load.broken.done()
    finally:
        await load.close()
        await app.stop()


def _queues(address: str) -> list[tuple[str, int]]:
    with orchestrator(address) as stub:
        status = stub.GetStatus(pb.GetStatusRequest())
    return [(group.state, len(group.waiters)) for group in status.groups]


def test_hand_overs_that_the_load_was_late_for_are_told_apart() -> None:
    lag = Lag()
    lag.found = [(0.0, 0.001), (1.0, 0.5), (2.0, 0.0), (3.0, 0.01)]
    took = [(0.1, 0.2), (0.9, 1.1), (1.2, 1.3), (1.4, 2.5), (1.6, 2.9), (2.9, 3.2), (3.1, 3.2)]
    assert list(apart(took, lag.late())) == [(0.1, 0.2), (1.6, 2.9), (3.1, 3.2)]


def test_what_the_orchestrator_timed_is_taken_over_the_time_measured() -> None:
    registry = CollectorRegistry()
    took = histogram(HANDOVER, registry, FINE)
    for _ in range(50):
        took.observe(0.5)  # before
    before = read(generate_latest(registry).decode())
    for _ in range(98):
        took.observe(0.0045)
    took.observe(0.035)
    took.observe(0.08)
    after = read(generate_latest(registry).decode())
    found = summary(before["hand-over"], after["hand-over"])
    assert found["n"] == 100
    assert 4 < found["p50"] < 5
    assert found["p99"] == 40, "at the end of its bucket"
