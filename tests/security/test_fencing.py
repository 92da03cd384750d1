"""A token fences one start of a job, a session's id fences its requests, and neither is ever shown."""

import json
from pathlib import Path

import grpc.aio
import pytest
from orchestrator.raw_client import RawClient
from orchestrator.world import World

from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

TOKEN = "a-token-that-nobody-may-see-0123456789"
BOUND = 20.0


async def test_without_the_token_nobody_speaks_for_a_job_that_runs(world: World) -> None:
    await world.start()
    await world.agent()
    holder = await world.client("job-a", incarnation=TOKEN)
    granted = await holder.acquire("pool")
    for guess in ("", "guess", TOKEN[:-1]):
        thief = await world.client("job-a", incarnation=guess)
        assert thief.hello_refused is not None
        assert thief.hello_refused.code == pb.JOB_RUNNING
        assert TOKEN not in str(thief.hello_refused)
    assert (await holder.group("pool")).state == "held"
    await holder.yielded(granted)


async def test_nor_while_its_connection_is_lost(world: World) -> None:
    await world.start()
    await world.agent()
    holder = await world.client("job-a", incarnation=TOKEN)
    await holder.acquire("pool")
    holder.kill()
    await holder.ended.wait()
    thief = await world.client("job-a", incarnation="")
    refused = await thief.refused(await thief.ask("pool"))
    assert refused.code == pb.JOB_RUNNING
    assert (await thief.group("pool")).state == "held"


async def test_what_is_shown_of_a_session_does_not_open_it(world: World) -> None:
    """The fingerprints that status, explain and journal show are no secrets to come back with."""
    await world.start()
    await world.agent()
    holder = await world.client("job-a", incarnation=TOKEN, session="secret-session")
    await holder.acquire("pool")
    status = await holder.group("pool")
    shown = next(job.incarnation for job in status.jobs)
    assert shown
    thief = await world.client("job-a", incarnation=shown)
    assert thief.hello_refused is not None
    assert thief.hello_refused.code == pb.JOB_RUNNING


async def test_a_session_cannot_be_taken_over_with_its_id_alone(world: World) -> None:
    await world.start()
    await world.agent()
    await world.client("job-a", incarnation=TOKEN, session="secret-session")
    thief = await world.client("job-b", incarnation="other", session="secret-session")
    assert thief.hello_refused is not None
    assert thief.hello_refused.code == pb.INVALID
    assert "secret-session" not in str(thief.hello_refused)


@pytest.mark.parametrize("verb", ["confirm", "abandon", "yield"])
async def test_requests_and_leases_of_another_session_cannot_be_touched(world: World, verb: str) -> None:
    """Not even by a session of the same group that knows the request's name and the epoch."""
    await world.start()
    await world.agent()
    holder = await world.client("job-a", incarnation=TOKEN)
    granted = await holder.acquire("pool")
    waiter = await world.client("job-b", incarnation="b")
    waiting = await waiter.ask("pool")
    thief = await world.client("job-c", incarnation="c")
    await thief.ask("pool")
    await thief.until("pool", lambda group: len(group.waiters) == 2)
    if verb == "yield":
        answer = await thief.give(granted)
        assert answer.refused.code in (pb.NOT_HELD, pb.STALE_LEASE)
    elif verb == "abandon":
        await thief.abandon(waiting)
        await thief.abandon("r1")
    else:
        await thief.send(confirm=pb.Confirm(request=waiting))
    await _round_trip(thief)
    status = await holder.group("pool")
    assert (status.state, status.job) == ("held", "job-a")
    assert [one.job for one in status.waiters] == ["job-b", "job-c"]
    await holder.yielded(granted)
    await waiter.granted(waiting)


async def test_a_grant_is_confirmed_by_its_own_session_only(world: World) -> None:
    """Confirmed by somebody else it stays provisional, and is taken back."""
    await world.start(confirm_timeout=1.0)
    await world.agent()
    owner = await world.client("job-a", incarnation=TOKEN)
    request = await owner.ask("pool")
    assert (await owner.answer(request)).HasField("granted")
    thief = await world.client("job-b", incarnation="b")
    own = await thief.ask("pool")
    await thief.send(confirm=pb.Confirm(request=request))
    await thief.granted(own)
    assert not (await thief.group("pool")).waiters


async def test_no_secret_is_shown_or_written(world: World, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    store = tmp_path / "state.db"
    await world.start(journal=str(journal), store=str(store))
    await world.agent()
    session = "the-session-that-nobody-may-see"
    first = await world.client("job-a", incarnation=TOKEN, session=session)
    granted = await first.granted(await first.ask("pool", request="req-1"))
    await first.send(note=pb.Note(name="reward", value=1.0))
    other = await world.client("job-b", incarnation=TOKEN + "b")
    request = await other.ask("pool")
    await other.until("pool", lambda group: len(group.waiters) == 1)
    first.kill()
    await first.ended.wait()
    await first.connect()
    told = "\n".join(await other.explain("pool") + await other.explain("pool", "job-a"))
    seen = str(await other.group("pool")) + told
    await first.yielded(granted)
    await other.granted(request)
    await world.app.stop()
    written = _all_files(tmp_path)
    for secret in (TOKEN, session):
        assert secret not in seen
        assert secret not in written
    assert any("note" in json.loads(line) for line in journal.read_text().splitlines())


async def test_explain_refuses_what_it_cannot_mean(world: World) -> None:
    await world.start()
    await world.agent()
    client = await world.client("job-a")
    await client.acquire("pool")
    async with grpc.aio.insecure_channel(world.app.address) as channel:
        stub = rpc.OrchestratorStub(channel)
        for request, status, word in (
            (pb.ExplainRequest(group="pool", job="nobody"), grpc.StatusCode.NOT_FOUND, "job-a"),
            (pb.ExplainRequest(group="pool", last=-3), grpc.StatusCode.INVALID_ARGUMENT, "-3"),
            (pb.ExplainRequest(group="pool", job="x" * 500), grpc.StatusCode.INVALID_ARGUMENT, "63"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Explain(request, timeout=BOUND)
            assert caught.value.code() is status
            assert word in str(caught.value.details())
            assert len(str(caught.value.details())) < 400


def _all_files(folder: Path) -> str:
    return "".join(path.read_bytes().decode(errors="replace") for path in folder.iterdir())


async def _round_trip(client: RawClient) -> None:
    """What the client has sent before is handled once it has this answer."""
    answer = await client.answer(await client.ask("no-such-group"))
    assert answer.refused.code == pb.UNKNOWN_GROUP
