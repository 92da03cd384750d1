"""A background task never dies unseen."""

import asyncio

import pytest

from coslice.runtime.supervisor import Crashed, Supervisor
from coslice.store.election import Deposed
from coslice.testing.virtual_time import run_virtual


async def _break(after: float) -> None:
    await asyncio.sleep(after)
    raise KeyError("a defect")


def test_a_crash_is_logged_by_name_and_ends_wait(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        supervisor = Supervisor("orchestrator")
        supervisor.start("group pool", _break(after=3600))
        supervisor.start("listener", asyncio.sleep(1e6))
        with pytest.raises(Crashed, match="orchestrator/group pool") as told:
            await supervisor.wait()
        assert isinstance(told.value.__cause__, KeyError)
        assert told.value.data == {"task": "orchestrator/group pool"}
        await supervisor.stop()
        assert supervisor.tasks == ()

    run_virtual(main())
    assert "orchestrator/group pool broke" in caplog.text


@pytest.mark.parametrize(
    ("error", "level", "traced"),
    [(Deposed, "INFO", False), (Deposed, "DEBUG", True), (KeyError, "INFO", True)],
)
def test_an_error_that_says_what_is_wrong_comes_without_the_way_to_it(
    error: type[Exception], level: str, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken() -> None:
        raise error("another orchestrator was elected")

    async def main() -> None:
        supervisor = Supervisor("orchestrator")
        supervisor.start("group pool", broken())
        with pytest.raises(Crashed):
            await supervisor.wait()

    caplog.set_level(level, logger="coslice.runtime.supervisor")
    run_virtual(main())
    assert ("Traceback" in caplog.text) is traced


def test_a_crash_before_anybody_waits_is_still_told() -> None:
    async def main() -> None:
        supervisor = Supervisor("agent")
        supervisor.start("early", _break(after=0))
        await asyncio.sleep(10)
        with pytest.raises(Crashed):
            await supervisor.wait()

    run_virtual(main())


def test_a_task_that_is_done_or_cancelled_is_no_crash() -> None:
    async def main() -> None:
        supervisor = Supervisor("agent")
        supervisor.start("done", asyncio.sleep(1))
        supervisor.start("cancelled", asyncio.sleep(1e6)).cancel()
        waiting = asyncio.create_task(supervisor.wait())
        await asyncio.sleep(3600)
        assert not waiting.done()
        assert supervisor.tasks == ()
        waiting.cancel()

    run_virtual(main())


def test_stop_is_bounded_and_names_who_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    async def stubborn() -> None:
        for _ in range(2):
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        supervisor = Supervisor("agent")
        task = supervisor.start("stubborn", stubborn())
        await asyncio.sleep(1)
        await asyncio.wait_for(supervisor.stop(grace=5), timeout=6)
        task.cancel()
        await asyncio.wait([task])

    run_virtual(main())
    assert "agent/stubborn did not stop" in caplog.text
