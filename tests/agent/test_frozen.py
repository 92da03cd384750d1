"""Jobs on a frozen base, real processes: what moves, what host memory it takes, what is lost."""

import asyncio
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.conftest import GROUP, MIB, PATIENCE, Node, Process, contexts
from forked import AsyncForked

from coslice.agent.buffers import BufferServer, HostBuffers
from coslice.agent.tickets import Tickets
from coslice.workload.shared import SharedCopy

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
    process = await AsyncForked.start(
        SCRIPT,
        json.dumps(given),
        env={**os.environ, "COSLICE_AGENT": node.agent.address, "COSLICE_INCARNATION": f"run-of-{name}"},
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


@dataclass
class Member:
    buffer: str
    sleeps: bool = False


async def test_a_copy_is_given_only_to_registered_processes_that_name_it_and_taken_only_if_sealed(
    tmp_path: Path,
) -> None:
    buffers = HostBuffers(10 * MIB)
    members = {"first": Member("g/a/1"), "second": Member("g/b/2")}
    path = tmp_path / "b.sock"
    server = BufferServer(path, buffers, lambda token, pid: members.get(token), Tickets(uid=os.getuid()))
    await server.start()
    name, other = "a" * 64, "b" * 64

    async def ask(token: str, digest: str, size: int = 4 * MIB, fd: int | None = None, **said: bool) -> Any:
        def call() -> Any:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(PATIENCE)
                connection.connect(str(path))
                line = json.dumps({"token": token, "share": digest, "bytes": size, **said}).encode() + b"\n"
                socket.send_fds(connection, [line], [] if fd is None else [fd])
                data, fds, _, _ = socket.recv_fds(connection, 65536, 1)
            inodes = [os.fstat(each).st_ino for each in fds]
            for each in fds:
                os.close(each)
            return json.loads(data).get("code", ""), inodes

        return await asyncio.to_thread(call)

    def copy(*, sealed: bool = True, size: int = 4 * MIB) -> int:
        if sealed:
            whole = SharedCopy.make(size, lambda address: None)
            fd = os.dup(whole.fd)
            whole.close()
            return fd
        fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        return fd

    made, again = copy(), copy()
    assert await ask("first", name) == ("", [])  # nobody has made it: make it
    assert await ask("first", name, fd=copy(sealed=False)) == ("INVALID", [])
    assert await ask("first", name, size=MIB, fd=made) == ("INVALID", [])
    assert buffers.held == 0
    assert await ask("first", name, fd=made) == ("", [])
    there = ("", [os.fstat(made).st_ino])
    assert await ask("second", name, fd=again) == there  # made twice at once: the first one counts
    assert buffers.held == 4 * MIB
    assert await ask("nobody", name) == ("INVALID", [])
    assert await ask("second", name[:-1]) == ("INVALID", [])
    assert await ask("second", name, size=MIB) == ("INVALID", [])
    assert await ask("second", other, size=7 * MIB) == ("NO_ROOM", [])
    buffers.leave_shared("g/a/1")
    assert await ask("second", name) == there
    buffers.leave_shared("g/b/2")
    assert buffers.held == 0
    os.close(made), os.close(again)
    await server.stop()
    buffers.close()
