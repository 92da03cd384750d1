"""Jobs on one frozen base have it on the device once: what is counted, what outlives whom, what is equal."""

import asyncio
import os

import pytest
from agent.conftest import GROUP, MIB, PATIENCE, Node, Process, contexts
from agent.test_frozen import ADAPTER, BASE, digest, lora_job

from coslice.agent.common import CommonCopies
from coslice.agent.host import AnonymousMemory
from coslice.agent.members import Member, Members
from coslice.agent.tiers.shared import NotShareable
from coslice.core.ids import GroupId, Incarnation, JobId, MemberId
from coslice.workload.shared import SharedCopy

NEED = BASE + ADAPTER + 10
SHARE = {"frozen": "share"}


async def on_device(node: Node) -> int:
    return (await node.status()).groups[0].device_used_bytes


def copies(node: Node) -> set[int]:
    """The files in which the agent has what jobs share on the device."""
    assert node.agent is not None
    return {os.fstat(copy.fd).st_ino for copy in node.agent._parts.common._copies.values()}


async def ended(node: Node, job: Process) -> None:
    job.process.kill()
    await job.ended()


async def test_they_take_turns_with_their_adapters_and_the_base_stays_until_the_last_is_gone(
    node: Node,
) -> None:
    """Room for the base and one of the jobs: whose own state leaves, and not the base."""
    agent = await node.start(budget=(NEED + 4) * MIB)
    jobs = {"job-a": await lora_job(node, "job-a", need=NEED, frozen=SHARE)}
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    jobs["job-b"] = await lora_job(node, "job-b", need=NEED, frozen=SHARE)  # set aside
    before = {"job-a": await digest(jobs["job-a"])}
    (first,) = copies(node)
    for epoch, name in enumerate(("job-b", "job-a") * 10, start=2):
        done = (await node.orchestrator.make_resident(GROUP, name, epoch)).done
        assert done.restored
        assert 0 < done.bytes_out <= 1.01 * ADAPTER * MIB, done.reason
        assert done.bytes_in <= 1.01 * ADAPTER * MIB, done.reason
        assert before.setdefault(name, await digest(jobs[name])) == await digest(jobs[name])
        await jobs[name].do("step")
        before[name] = await digest(jobs[name])
        assert BASE * MIB < await on_device(node) <= NEED * MIB  # once
        assert copies(node) == {first}
    assert agent.peak_device_bytes[GROUP] <= (NEED + 4) * MIB

    await jobs["job-a"].do("merge")  # writes to the base: to pages of its own
    merged = await digest(jobs["job-a"])
    assert (await node.orchestrator.make_resident(GROUP, "job-b", 30)).done.restored
    assert await digest(jobs["job-b"]) == before["job-b"]
    assert (await node.orchestrator.make_resident(GROUP, "job-a", 31)).done.restored
    assert await digest(jobs["job-a"]) == merged

    await ended(node, jobs["job-a"])  # in the middle of its turn
    assert (await node.orchestrator.make_resident(GROUP, "job-b", 32)).done.restored
    assert await digest(jobs["job-b"]) == before["job-b"]
    await ended(node, jobs["job-b"])
    async with asyncio.timeout(PATIENCE):
        while await on_device(node):  # noqa: ASYNC110  # the agent's notice of an end is told to nobody here
            await asyncio.sleep(0.02)


async def test_they_stay_together_where_it_fits_once_and_it_leaves_for_a_stranger_and_returns(
    node: Node,
) -> None:
    """Room for both with one base, and far too little with two. The stranger's base is another."""
    budget = 2 * NEED - BASE
    agent = await node.start(budget=budget * MIB)
    jobs = {"job-a": await lora_job(node, "job-a", need=NEED, frozen=SHARE)}
    await node.orchestrator.make_resident(GROUP, "job-a", 1)
    jobs["job-b"] = await lora_job(node, "job-b", need=NEED, frozen=SHARE)
    before = {}
    for epoch, name in enumerate(("job-b", "job-a", "job-b"), start=2):
        done = (await node.orchestrator.make_resident(GROUP, name, epoch)).done
        assert done.bytes_out == 0, done.reason
        before[name] = await digest(jobs[name])
    assert contexts(done.residency) == {"job-a": "LIVE", "job-b": "LIVE"}
    assert f"- {BASE} MiB in common" in done.reason
    for job in jobs.values():
        # Memory is told by what grew since a process registered. malloc's page with each piece of the base
        # went when that was shared: 160 KiB of each job, which its working memory is more than.
        await job.do("work")
    assert (BASE + 2 * ADAPTER) * MIB <= await on_device(node) <= budget * MIB
    for job in jobs.values():
        await job.do("rest")

    await jobs["job-a"].do("merge")  # from now on a piece of the base is its own, and moves as such
    before["job-a"] = await digest(jobs["job-a"])

    await agent.stop()  # what they share lives on in them
    agent = await node.run_again(listen=agent.address)
    stranger = {"seed": 7, "frozen": SHARE, "need": budget - 6}  # beside what parked processes keep
    jobs["job-c"] = await lora_job(node, "job-c", **stranger)
    done = (await node.orchestrator.make_resident(GROUP, "job-c", 10)).done
    assert done.restored, done.reason
    assert contexts(done.residency) == {"job-a": "SAVED", "job-b": "SAVED", "job-c": "LIVE"}
    assert await on_device(node) <= NEED * MIB, "the base of the others is there too"
    before["job-c"] = await digest(jobs["job-c"])
    for epoch, name in enumerate(("job-b", "job-a", "job-c"), start=11):
        assert (await node.orchestrator.make_resident(GROUP, name, epoch)).done.restored
        assert await digest(jobs[name]) == before[name]
        assert await on_device(node) <= budget * MIB
    assert agent.peak_device_bytes[GROUP] <= budget * MIB


def member(name: str) -> Member:
    return Member(
        id=MemberId(name),
        job=JobId(name),
        incarnation=Incarnation(name),
        group=GroupId(GROUP),
        pid=os.getpid(),
        started=1,
        memory=AnonymousMemory(os.getpid()),
    )


def test_a_copy_lives_while_somebody_has_it_or_is_about_to() -> None:
    members = Members()
    first, second = member("first"), member("second")
    for each in (first, second):
        members.add(each)
    there, name, size = CommonCopies(members), "a" * 64, 4 * MIB

    def made() -> int:
        whole = SharedCopy.make(size, lambda address: None)
        fd = os.dup(whole.fd)
        whole.close()
        return fd

    def trim(*wanted: str) -> int:
        there.trim(GroupId(GROUP), wanted.__contains__)
        return there.bytes(GroupId(GROUP))

    loose = os.memfd_create("loose")
    os.ftruncate(loose, size)
    with pytest.raises(NotShareable, match="not a sealed"):
        there.use(first, name, size, loose)
    assert there.use(first, name, size, None) is None
    assert there.use(first, name, size, made()) is None
    assert there.use(second, name, size, made()) is not None  # made twice at once: the first one counts
    with pytest.raises(NotShareable):
        there.use(second, name, size - 4096, None)
    assert trim() == size
    there.away(first, name, size, for_good=False)
    assert trim() == size
    there.away(second, name, size, for_good=False)
    assert trim(name) == size
    assert trim() == 0
    assert there.use(first, name, size, made()) is None
    members.remove(first)  # its process ended
    assert trim() == 0

    second.mapped.add(name)  # given out by an agent before this one
    with pytest.raises(NotShareable, match="has not come back"):
        there.use(first, name, size, None)
    assert there.use(second, name, size, made()) is None
    assert there.use(first, name, size, None) is not None
    first.close(), second.close()
    there.close()
