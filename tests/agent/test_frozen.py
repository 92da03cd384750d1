"""Jobs on a frozen base, real processes: what moves, what host memory it takes, what is lost."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from agent.conftest import GROUP, MIB, PATIENCE, Node, Process, contexts

SCRIPT = Path(__file__).with_name("frozen_job.py")
BASE, ADAPTER = 40, 8
MOST = (BASE + 2 * ADAPTER) * MIB
"""Of host memory: one base, and both adapters, as a file that grows counts for a moment."""


async def lora_job(
    node: Node, name: str, *, need: int = 0, base: int = BASE, adapter: int = ADAPTER, **about: Any
) -> Process:
    assert node.agent is not None
    given = {
        "job": name,
        "group": GROUP,
        "base": base,
        "adapter": adapter,
        "need": need,
        "frozen": {},
    } | about
    path = os.pathsep.join([str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        json.dumps(given),
        env={
            **os.environ,
            "PYTHONPATH": path,
            "COSLICE_AGENT": node.agent.address,
            "COSLICE_INCARNATION": f"run-of-{name}",
        },
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    node.processes.append(Process(process))
    said = await node.processes[-1].until("registered")
    assert said["error"] == ""
    return node.processes[-1]


async def digest(job: Process) -> str:
    job.tell("digest")
    return str((await job.until("did", word="digest"))["digest"])


async def host_held(node: Node) -> int:
    return (await node.status()).groups[0].host_held_bytes


async def test_jobs_on_one_base_have_one_copy_of_it_in_host_memory(node: Node) -> None:
    """Room for one job; host memory for one base, and far too little for two."""
    agent = await node.start(budget=60 * MIB, host=(BASE + 4 * ADAPTER) * MIB)
    frozen = {"frozen": "share"}
    jobs = {"job-a": await lora_job(node, "job-a", frozen=frozen)}
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    before = {"job-a": await digest(jobs["job-a"])}
    jobs["job-b"] = await lora_job(node, "job-b", frozen=frozen)  # set aside: the device is another's
    assert await host_held(node) <= MOST
    for epoch, name in enumerate(("job-b", "job-a") * 2, start=2):
        done = (await node.orchestrator.make_resident(GROUP, name, epoch)).done
        assert done.restored
        assert before.setdefault(name, await digest(jobs[name])) == await digest(jobs[name])
        await jobs[name].do("step")
        before[name] = await digest(jobs[name])
        assert await host_held(node) <= MOST  # the second one needs no base of its own
    assert agent.peak_device_bytes[GROUP] <= 60 * MIB

    await agent.stop()
    await node.run_again(listen=agent.address)
    done = (await node.orchestrator.make_resident(GROUP, "job-b", 10)).done
    assert done.restored
    assert await digest(jobs["job-b"]) == before["job-b"]
    assert await host_held(node) <= MOST  # given back to the new agent, once

    await jobs["job-b"].do("merge")  # from now on a piece of the base is its own, and nobody else's
    before["job-b"] = await digest(jobs["job-b"])
    for epoch, name in ((11, "job-a"), (12, "job-b")):
        assert (await node.orchestrator.make_resident(GROUP, name, epoch)).done.restored
        assert await digest(jobs[name]) == before[name]
    for job in jobs.values():
        job.process.kill()
        await job.ended()
    async with asyncio.timeout(PATIENCE):
        while await host_held(node):  # noqa: ASYNC110  # the agent's notice of an end is told to nobody here
            await asyncio.sleep(0.02)


async def test_where_the_base_can_stay_only_the_adapter_moves(node: Node) -> None:
    """The other job needs what the base leaves free, and no more."""
    need = BASE + ADAPTER + 4
    other = 32
    await node.start(budget=(need + other - ADAPTER) * MIB)
    a = await lora_job(node, "job-a", need=need, frozen={"frozen": "share"})
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    b = await lora_job(node, "job-b", need=other, base=0, adapter=other - 6)
    jobs = {"job-a": a, "job-b": b}
    before = {name: await digest(job) for name, job in jobs.items() if name == "job-a"}
    for epoch, name in enumerate(("job-b", "job-a") * 2, start=2):
        done = (await node.orchestrator.make_resident(GROUP, name, epoch)).done
        assert 0 < done.bytes_out <= 1.01 * ADAPTER * MIB, done.reason
        assert done.bytes_in <= 1.01 * max(ADAPTER, other - 6 if epoch == 2 else 0) * MIB, done.reason
        assert before.setdefault(name, await digest(jobs[name])) == await digest(jobs[name])
        await jobs[name].do("step")
        before[name] = await digest(jobs[name])


async def test_dropped_weights_that_changed_on_disk_lose_that_job_and_no_other(node: Node) -> None:
    """Host memory holds the adapters and not one base: what is dropped needs none."""
    await node.start(budget=60 * MIB, host=4 * ADAPTER * MIB, stuck_grace=0.2)
    files = {name: node.folder / f"{name}.pt" for name in ("job-a", "job-b")}
    jobs = {}
    for epoch, (name, file) in enumerate(files.items(), start=1):
        frozen = {"frozen": "drop", "reread": str(file)}
        jobs[name] = await lora_job(node, name, save=str(file), frozen=frozen)
        assert (await node.orchestrator.make_resident(GROUP, name, epoch)).done.op
    before = await digest(jobs["job-b"])
    back = await node.orchestrator.make_resident(GROUP, "job-a", 3)
    assert back.done.restored, back
    content = bytearray(files["job-b"].read_bytes())
    content[len(content) // 2] ^= 1
    files["job-b"].write_bytes(content)
    lost = (await node.orchestrator.make_resident(GROUP, "job-b", 4)).failed
    assert lost.culprit == "job-b"
    assert "job-b.pt is not what it was when this job registered" in lost.reason
    assert contexts(lost.residency)["job-b"] == "LOST"
    assert (await node.orchestrator.make_resident(GROUP, "job-a", 5)).done.op
    assert before != await digest(jobs["job-a"])
