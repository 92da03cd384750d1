"""Two jobs that only acquire and yield share a device that holds one: the driver moves their processes."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from agent.cuda_world import MIB, PATIENCE, libraries

from coslice.testing.fake_cuda import FakeNode

TURNS = 4
JOB = Path(__file__).with_name("cuda_turns.py")
LONG = Path(__file__).with_name("cuda_long_phase.py")


async def start(node: FakeNode, *words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "coslice.cli.main", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=node.environment(),
    )


async def test_two_jobs_that_register_nothing_take_turns(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    node = FakeNode(tmp_path / "node", libraries=libraries(tmp_path_factory), capacity=16 * MIB)
    up = await start(
        node,
        *("up", "--device", "cuda", "--json", "--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0"),
        *("--state", str(tmp_path / "s"), "--backend", "cuda:margin=0"),
    )
    jobs: list[asyncio.subprocess.Process] = []
    try:
        assert up.stdout is not None
        async with asyncio.timeout(PATIENCE):
            ready = json.loads(await up.stdout.readline())
        address = ("-o", ready["orchestrator"], "--agent", ready["agent"])
        command = (sys.executable, str(JOB), "--bytes", str(10 * MIB), "--turns", str(TURNS))
        jobs = [
            await start(node, "run", *address, "--job", name, "--backend", "cuda", "--", *command)
            for name in ("a", "b")
        ]
        async with asyncio.timeout(2 * PATIENCE):
            said: list[list[bytes]] = [[], []]
            for _ in range(TURNS):  # nobody is done with all its turns before the other has come
                for job in jobs:
                    assert job.stdin is not None
                    job.stdin.write(b"\n")
                for job, lines in zip(jobs, said, strict=True):
                    assert job.stdout is not None
                    lines.append(await job.stdout.readline())
            ends = await asyncio.gather(*(job.communicate() for job in jobs))
        for job, lines, (_, err) in zip(jobs, said, ends, strict=True):
            assert job.returncode == 0, err.decode()
            assert lines == [f"turn {turn}\n".encode() for turn in range(TURNS)]
        assert [call.code for call in node.calls("checkpoint")].count(0) >= 2
        assert [call.code for call in node.calls("restore")].count(0) >= 2
        assert node.poisonings == 0
    finally:
        for process in (*jobs, up):
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def test_a_job_that_does_not_end_its_phase_is_frozen_thawed_and_goes_on(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its phase waits for the other job's last turn, which it has only if the first one gives way."""
    node = FakeNode(tmp_path / "node", libraries=libraries(tmp_path_factory), capacity=6 * MIB)
    journal, done = tmp_path / "s" / "journal.jsonl", tmp_path / "done"
    up = await start(
        node,
        *("up", "--device", "cuda", "--json", "--listen", "127.0.0.1:0", "--agent-listen", "127.0.0.1:0"),
        *("--state", str(tmp_path / "s"), "--backend", "cuda:margin=0", "--set", "max_hold=300ms"),
        *("--policy", "fifo"),
    )
    processes = [up]
    try:
        assert up.stdout is not None
        async with asyncio.timeout(PATIENCE):
            ready = json.loads(await up.stdout.readline())
        address = ("-o", ready["orchestrator"], "--agent", ready["agent"])

        async def run(name: str, *command: str) -> asyncio.subprocess.Process:
            words = ("run", *address, "--job", name, "--backend", "cuda", "--", sys.executable, *command)
            processes.append(await start(node, *words))
            return processes[-1]

        long = await run("long", str(LONG), str(4 * MIB), str(done))
        assert long.stdout is not None
        async with asyncio.timeout(2 * PATIENCE):
            assert await long.stdout.readline() == b"inside\n"
            short = await run("short", str(JOB), "--bytes", str(4 * MIB), "--turns", "2")
            _, err = await short.communicate(b"\n\n")
            assert short.returncode == 0, err.decode()
            done.touch()
            out, err = await long.communicate()
        assert long.returncode == 0, err.decode()
        assert out.decode().startswith("ended after ")
        assert node.poisonings == 0
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        codes = [code for line in lines for code, _ in line.get("reasons", ())]
        assert "frozen" in codes
        assert "thawed" in codes
    finally:
        for process in reversed(processes):
            if process.returncode is None:
                process.terminate()
            await process.wait()
