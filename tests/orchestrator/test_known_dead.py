"""An agent that saw a process end spares everybody the grace that its lost session would have had."""

from orchestrator.world import World

from coslice.security import fingerprint
from coslice.wire.v1 import coslice_pb2 as pb


def end_of(job: str, pid: int) -> pb.EndedProcess:
    """As an agent says it: tokens of clients are fingerprints behind every edge."""
    return pb.EndedProcess(job=job, incarnation=fingerprint.incarnation("one"), pid=pid, start_time=pid)


async def test_a_killed_holder_and_waiter_are_not_waited_for(world: World) -> None:
    """RB1, C4: far sooner than the session's grace, which never ends in this test."""
    await world.start(session_grace=3600)
    agent = await world.agent()
    a = await world.client("job-a", pid=7, node="n0.example.org")
    b = await world.client("job-b", pid=8, node="n0")
    c = await world.client("job-c")
    await a.acquire("pool")
    await b.ask("pool")
    await c.until("pool", lambda s: [w.job for w in s.waiters] == ["job-b"])
    last = await c.ask("pool")
    await c.until("pool", lambda s: [w.job for w in s.waiters] == ["job-b", "job-c"])
    a.kill()
    b.kill()
    agent.ended += [end_of("job-b", 8), end_of("job-a", 7)]
    agent.push("pool")
    await c.granted(last)
    status = await c.group("pool")
    assert [record.job for record in status.jobs] == ["job-c"]


async def test_a_process_that_ended_is_believed_only_once_its_stream_is_gone(world: World) -> None:
    await world.start(session_grace=3600)
    agent = await world.agent()
    a = await world.client("job-a", pid=7, node="n0")
    b = await world.client("job-b")
    granted = await a.acquire("pool")
    waits = await b.ask("pool")
    agent.ended.append(end_of("job-a", 7))
    agent.push("pool")
    await a.yielded(granted)
    await b.granted(waits)
