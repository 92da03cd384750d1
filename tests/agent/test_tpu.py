"""The tpu backend against a fake tool with the contract of the real one."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from agent.cuda_world import look_again
from agent.process_world import lone_member, node_context

from coslice.agent.backends import tpu
from coslice.agent.backends.base import MoveError
from coslice.agent.backends.process_guard import guard_of, is_locked
from coslice.agent.members import Member
from coslice.errors import ConfigError
from coslice.store import Store, make_store

FAKES = Path(__file__).parents[1] / "fakes"
PATIENCE = 30.0


class TpuWorld:
    def __init__(self, folder: Path) -> None:
        self.folder, self.node, self.devices = folder, folder / "node", folder / "vfio"
        for path in (self.node, self.devices):
            path.mkdir(exist_ok=True)
        self.processes: list[asyncio.subprocess.Process] = []
        self.members: list[Member] = []
        self.store: Store | None = None
        self.backend: tpu.TpuBackend

    async def start(self, **settings: object) -> tpu.TpuBackend:
        if self.store is not None:
            await self.backend.close()
            await self.store.close()
        self.store = make_store(self.folder / "agent.sqlite", flush=False)
        context = node_context(self.folder, self.store, await self.store.load())
        chosen = {
            "program": str(FAKES / "tpucheckpoint"),
            "devices": str(self.devices),
            "lock_file": str(self.node / "lock"),
            "gate_seconds": 0.2,
            **settings,
        }
        self.backend = tpu.make(context, chosen)
        await self.backend.start()
        return self.backend

    async def job(self, name: str, *devices: int) -> list[Member]:
        members = []
        for device in devices:
            path = self.devices / str(device)
            path.touch()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(FAKES / "tpu_job.py"), str(self.node), str(path)),
                stdout=asyncio.subprocess.PIPE,
            )
            self.processes.append(process)
            assert process.stdout is not None
            async with asyncio.timeout(PATIENCE):
                assert await process.stdout.readline() == b"ready\n"
            members.append(lone_member(name, process.pid, backend="tpu"))
        self.members += members
        return members

    async def agent(self, ops: str, members: list[Member]) -> asyncio.subprocess.Process:
        """Another agent on the same state, in a process that a test may kill."""
        await self.backend.close()
        assert self.store is not None
        await self.store.close()
        self.store = None
        pids = ",".join(str(member.pid) for member in members)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, str(self.folder), ops, pids),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def working(self, members: list[Member]) -> bool:
        """Does a tool work on them?"""
        return is_locked(guard_of(self.folder / "run" / "calls", min(member.pid for member in members)))

    def where(self, members: list[Member]) -> list[str]:
        return [(self.node / str(member.pid)).read_text() for member in members]

    def calls(self) -> list[str]:
        path = self.node / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def fail(self, action: str, pid: int) -> None:
        with (self.node / "fail").open("a") as file:
            file.write(f"{action} {pid}\n")

    async def stop(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        for member in self.members:
            member.close()
        await self.backend.close()
        assert self.store is not None
        await self.store.close()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TpuWorld]:
    made = TpuWorld(tmp_path)
    monkeypatch.setenv("COSLICE_FAKE_TPU", str(made.node))
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not done():
            await look_again()


def ids(members: list[Member]) -> str:
    return ",".join(str(pid) for pid in sorted(member.pid for member in members))


async def test_a_slice_leaves_and_comes_back_in_one_call_each(world: TpuWorld) -> None:
    job = await world.job("a", 0, 1)
    await world.backend.snapshot(job, op="1")
    assert world.where(job) == ["parked"] * 2
    await world.backend.restore(job, op="2")
    assert world.where(job) == ["attached"] * 2
    assert world.calls() == [f"checkpoint {ids(job)}", f"restore {ids(job)}"]


@pytest.mark.parametrize("content", [None, "no program"])
async def test_a_tool_that_cannot_be_started_costs_nobody_its_state(
    world: TpuWorld, tmp_path: Path, content: str | None
) -> None:
    """It is being replaced while the job is parked: the restore is asked for again."""
    job, tool = await world.job("a", 0), tmp_path / "tool"
    await world.backend.snapshot(job, op="1")
    if content is not None:
        tool.write_text(content)
        tool.chmod(0o700)
    await world.start(program=str(tool))
    with pytest.raises(MoveError, match=r"is not found|cannot be started") as caught:
        await world.backend.restore(job, op="2")
    assert not caught.value.lost
    await world.start()
    await world.backend.restore(job, op="3")
    assert world.where(job) == ["attached"]


async def test_two_jobs_take_turns_on_the_same_chips(world: TpuWorld) -> None:
    a = await world.job("a", 0)
    await world.backend.snapshot(a, op="1")
    b = await world.job("b", 0)
    for turn in range(2):
        await world.backend.snapshot(b, op=f"{turn}/b")
        await world.backend.restore(a, op=f"{turn}/a")
        await world.backend.snapshot(a, op=f"{turn}/a/out")
        await world.backend.restore(b, op=f"{turn}/b/in")
    assert world.where(b) == ["attached"]


async def test_the_lock_file_is_cleared(world: TpuWorld) -> None:
    job = await world.job("a", 0)
    await world.backend.snapshot(job, op="1")
    assert not (world.node / "lock").exists()


async def test_a_checkpoint_that_failed_is_tried_once_more_for_those_it_failed_for(world: TpuWorld) -> None:
    job = await world.job("a", 0, 1)
    world.fail("checkpoint", job[1].pid)
    await world.backend.snapshot(job, op="1")
    assert world.calls() == [f"checkpoint {ids(job)}", f"checkpoint {job[1].pid}"]
    assert world.where(job) == ["parked"] * 2


async def test_a_restore_is_never_asked_for_twice(world: TpuWorld) -> None:
    job = await world.job("a", 0)
    await world.backend.snapshot(job, op="1")
    world.fail("restore", job[0].pid)
    for attempt in ("2", "3"):
        with pytest.raises(MoveError) as caught:
            await world.backend.restore(job, op=attempt)
        assert caught.value.lost
    assert world.calls().count(f"restore {job[0].pid}") == 1


async def test_nothing_is_restored_while_a_device_is_in_use(world: TpuWorld) -> None:
    a = await world.job("a", 0)
    await world.backend.snapshot(a, op="1")
    b = await world.job("b", 0)
    with pytest.raises(MoveError, match="in use by another") as caught:
        await world.backend.restore(a, op="2")
    assert not caught.value.lost
    assert [call for call in world.calls() if call.startswith("restore")] == []
    await world.backend.snapshot(b, op="3")
    await world.backend.restore(a, op="4")
    assert world.where(a) == ["attached"]


async def test_a_rendezvous_that_never_completes_is_a_fault(world: TpuWorld) -> None:
    await world.start(restore_seconds=0.2)
    job = await world.job("a", 0)
    (world.node / "slice").write_text("2")
    await world.backend.snapshot(job, op="1")
    with pytest.raises(MoveError, match="rendezvous") as caught:
        await world.backend.restore(job, op="2")
    assert caught.value.lost


async def test_what_was_parked_is_known_to_the_next_agent(world: TpuWorld) -> None:
    job = await world.job("a", 0)
    await world.backend.snapshot(job, op="1")
    await world.start()
    assert world.backend.holds(job)
    seen = await world.backend.probe(job)
    assert (seen.live, seen.parked) == (0, 1)
    await world.backend.restore(job, op="2")
    assert world.where(job) == ["attached"]


@pytest.mark.parametrize("action", ["checkpoint", "restore"])
async def test_a_tool_that_outlives_its_agent_is_waited_for(world: TpuWorld, action: str) -> None:
    """The agent is killed while the tool works; what that comes to counts, and nothing is asked twice."""
    job = await world.job("a", 0, 1)
    if action == "restore":
        await world.backend.snapshot(job, op="0")
    (world.node / "hold").touch()
    agent = await world.agent("snapshot,restore" if action == "restore" else "snapshot", job)
    await until(lambda: any(call.startswith(action) for call in world.calls()))
    agent.kill()
    await agent.wait()
    await world.start()
    assert world.backend.holds(job)
    for move in (world.backend.snapshot, world.backend.restore):
        with pytest.raises(MoveError, match="out of reach until it ends") as caught:
            await move(job, op="1")
        assert not caught.value.lost
    (world.node / "hold").unlink()
    await until(lambda: not world.working(job))
    await world.backend.restore(job, op="2")
    assert world.where(job) == ["attached"] * 2
    assert [call.split()[0] for call in world.calls()] == ["checkpoint", "restore"]


async def test_without_the_tool_a_snapshot_says_what_is_missing(world: TpuWorld) -> None:
    await world.start(program="no-such-tool")
    job = await world.job("a", 0)
    with pytest.raises(MoveError, match="no-such-tool is not found"):
        await world.backend.snapshot(job, op="1")
    assert world.where(job) == ["attached"]


async def test_settings_that_make_no_sense_are_refused(world: TpuWorld) -> None:
    for settings in (
        {"timeout": 3},
        {"restore_seconds": "soon"},
        {"gate_seconds": 0},
        {"gate_seconds": "nan"},
    ):
        with pytest.raises(ConfigError, match="backend tpu"):
            await world.start(**settings)
        await world.start()
    assert os.access(FAKES / "tpucheckpoint", os.X_OK)


async def main(folder: str, ops: str, pids: str) -> None:
    """An agent's backend in a process of its own, to be killed."""
    world = TpuWorld(Path(folder))
    await world.start()
    members = [lone_member("a", int(pid), backend="tpu") for pid in pids.split(",")]
    for op in ops.split(","):
        await getattr(world.backend, op)(members, op=op)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
