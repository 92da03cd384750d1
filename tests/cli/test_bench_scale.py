"""The load of ``coslice bench scale``: each lock is passed on in turn, and none is held twice."""

from pathlib import Path

from coslice.cli.bench_scale_load import Load
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import OrchestratorConfig


async def test_every_lock_is_passed_on_at_its_moments_and_held_by_one(tmp_path: Path) -> None:
    app = OrchestratorApp(OrchestratorConfig(listen="127.0.0.1:0", store=str(tmp_path / "store.db")))
    await app.start()
    load = Load(app.address, 0, 3, 3, 1)
    try:
        assert await load.connect() == {"jobs": 9}
        ran = await load.run(seconds=1.5, period=0.75, offset=0.0)
        assert ran["troubles"] == []
        assert len(ran["took"]) + ran["missed"] == 6
        assert ran["took"]
        assert all(took > 0 for took in ran["took"])
    finally:
        await app.stop()
        await load.close()
