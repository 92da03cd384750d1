"""The client against the orchestrator itself, in a process of its own that can be killed."""

import asyncio
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from client.fake_server import BOUND
from client.waiting import in_thread, wait_for
from ports import Kept

import coslice
from coslice import errors

SCRIPT = """
    import asyncio, sys
    from coslice.orchestrator.app import OrchestratorApp
    from coslice.orchestrator.config import GroupConfig, OrchestratorConfig
    from coslice.testing.fake_agent import FakeAgent

    async def main(port, store):
        groups = GroupConfig(id="a", rank=1), GroupConfig(id="b", rank=2), GroupConfig(id="empty")
        app = OrchestratorApp(OrchestratorConfig(listen=f"127.0.0.1:{port}", store=store, groups=groups))
        await app.start()
        async with FakeAgent(app.address, groups=("a", "b")):
            print("up", flush=True)
            await app.wait()

    asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


class Orchestrator:
    def __init__(self, store: Path) -> None:
        self._place = Kept()
        self.address = self._place.address
        self._command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(self._place.port), str(store)]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n"

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.communicate(timeout=BOUND)

    def client(self, job: str, **settings: object) -> coslice.Client:
        return coslice.Client(self.address, job=job, groups="a", **settings)  # type: ignore[arg-type]


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Orchestrator]:
    orchestrator = Orchestrator(tmp_path / "coslice.db")
    orchestrator.start()
    yield orchestrator
    orchestrator.kill()


def waiters(client: coslice.Client) -> list[str]:
    return [waiter.job for waiter in client.status("a").groups[0].waiters]


def test_two_jobs_take_turns(real: Orchestrator) -> None:
    with real.client("job-1") as one, real.client("job-2") as two:
        first = one.acquire(timeout=BOUND)
        thread, result = in_thread(lambda: two.acquire(timeout=BOUND))
        wait_for(lambda: waiters(one) == ["job-2"])
        assert one.yield_()
        thread.join(BOUND)
        second = result[0]
        assert isinstance(second, coslice.Grant)
        assert second.leases[0].epoch > first.leases[0].epoch
        assert two.yield_()


def test_a_killed_orchestrator_comes_back_and_nothing_was_lost(real: Orchestrator) -> None:
    with real.client("job-1") as one, real.client("job-2") as two:
        grant = one.acquire(timeout=BOUND)
        thread, result = in_thread(lambda: two.acquire(timeout=2 * BOUND))
        wait_for(lambda: waiters(one) == ["job-2"])
        real.kill()
        assert not one.should_yield()
        real.start()
        wait_for(lambda: waiters(one) == ["job-2"])
        assert one.status("a").groups[0].epoch == grant.leases[0].epoch
        assert not result
        assert one.yield_()
        thread.join(BOUND)
        assert isinstance(result[0], coslice.Grant)
        assert two.yield_()


def test_a_yield_during_an_outage_is_delivered(real: Orchestrator) -> None:
    with real.client("job-1") as one, real.client("job-2") as two:
        one.acquire(timeout=BOUND)
        real.kill()
        assert one.yield_()
        real.start()
        assert two.acquire(timeout=BOUND)


def test_refusals_are_typed_and_name_the_next_step(real: Orchestrator) -> None:
    with real.client("job-1", incarnation="i-1") as one:
        with pytest.raises(errors.UnknownGroup, match="a"):
            one.acquire("nope", timeout=BOUND)
        with pytest.raises(errors.GroupEmpty, match="empty"):
            one.acquire("empty", timeout=BOUND)
        with pytest.raises(errors.UnknownGroup):
            one.status("nope")
        one.acquire("b", timeout=BOUND)
        with pytest.raises(errors.LockOrder):
            one.acquire("a", timeout=BOUND)
        with (
            real.client("job-1", incarnation="i-2") as rival,
            pytest.raises(errors.JobRunning, match="job-1 is running already"),
        ):
            rival.acquire(timeout=BOUND)
        assert one.yield_()


def test_several_groups_and_a_timeout(real: Orchestrator) -> None:
    with real.client("job-1") as one, real.client("job-2") as two:
        assert len(one.acquire(["b", "a"], timeout=BOUND).leases) == 2
        with pytest.raises(errors.AcquireTimeout):
            two.acquire("b", timeout=0.2)
        assert one.yield_("b")
        assert two.acquire("b", timeout=BOUND)
        assert one.yield_()
        assert two.yield_()


def test_the_async_client(real: Orchestrator) -> None:
    async def main() -> None:
        async with (
            coslice.AsyncClient(real.address, job="job-1", groups="a") as one,
            coslice.AsyncClient(real.address, job="job-2", groups="a") as two,
        ):
            await one.acquire(timeout=BOUND)
            waiting = asyncio.create_task(two.acquire(timeout=BOUND))
            with pytest.raises(errors.AcquireTimeout):
                await two.acquire(timeout=0.1)
            assert await one.yield_()
            assert (await waiting).leases[0].epoch == 2
            assert await two.yield_()

    asyncio.run(main())
