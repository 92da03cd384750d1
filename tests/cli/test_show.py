"""What ``coslice status`` says of several orchestrators."""

import asyncio
import functools
import io
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import pytest
from orchestrator.world import World
from rich.console import Console

from coslice.cli.rpc import group_status
from coslice.cli.show import _page, show_explain
from coslice.errors import OrchestratorUnreachable
from coslice.store import Seat
from coslice.wire.upstream import timeslice_orchestrator_pb2 as up
from coslice.wire.upstream.timeslice_orchestrator_pb2_grpc import TimeSliceOrchestratorServiceStub
from coslice.wire.v1 import coslice_pb2 as pb


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack)


def text_of(state: pb.GetStatusResponse) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(_page(state))
    return captured.get()


def test_status_begins_with_who_leads_and_who_stands_by() -> None:
    leader = pb.OrchestratorStatus(address="a:1", leads=True, since_s=61, lease_left_s=4.25, term=3)
    others = [pb.OrchestratorStatus(address=address) for address in ("b:1", "c:1")]
    page = text_of(pb.GetStatusResponse(orchestrators=[leader, *others]))
    assert page.startswith(
        "orchestrator a:1 leads for 61 s (term 3, lease 4.2 s left); standing by: b:1, c:1\n"
    )
    assert "standing by: nobody" in text_of(pb.GetStatusResponse(orchestrators=[leader]))
    assert "orchestrator" not in text_of(pb.GetStatusResponse())


async def test_a_standby_names_the_leader(world: World) -> None:
    """That one is not among the addresses given, so without TLS it is not followed there."""
    app = await world.start(store="etcd://127.0.0.1:1/nobody")
    assert app._election is not None
    await app._standing.stop()
    app._election.hearsay.leader = Seat("leader:1", id="it")
    with pytest.raises(OrchestratorUnreachable, match="stands by; the leader is at leader:1"):
        await asyncio.to_thread(group_status, app.address)


async def test_of_several_addresses_one_that_is_silent_is_passed_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was cut off refuses nothing: only time tells."""
    monkeypatch.setattr("coslice.cli.rpc.TIMEOUT", 2.0)
    app = await world.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        state = await asyncio.to_thread(group_status, f"{host}:{port},{app.address}")
    assert [group.group for group in state.groups] == ["pool"]


async def test_explain_prints_names_as_they_are(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Between colons, a terminal's library takes some of them for pictures."""
    await world.start()
    await world.agent()
    async with grpc.aio.insecure_channel(world.app.address) as channel:
        stub: Any = TimeSliceOrchestratorServiceStub(channel)
        await stub.Acquire(up.AcquireRequest(job_id="a", group_id="pool"), timeout=30.0)
        await stub.Yield(up.YieldRequest(job_id="a", group_id="pool"), timeout=30.0)
    show = functools.partial(show_explain, "pool", job="", last=20, as_json=False)
    await asyncio.to_thread(show, address=world.app.address)
    assert "session upstream:a:pool of a is over" in capsys.readouterr().out
