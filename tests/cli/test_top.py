"""``coslice top``: its memory of turns, its screen over a live orchestrator, and what scripts get."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
from orchestrator.test_roster import ME, Known
from orchestrator.world import World
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from coslice.cli.top import Wire, top
from coslice.cli.top_app import TopApp
from coslice.cli.top_track import FREE, HELD, SWAP, UNKNOWN, Track
from coslice.errors import ConfigError, OrchestratorUnreachable
from coslice.orchestrator.config import GroupConfig
from coslice.orchestrator.roster import Roster
from coslice.runtime.clock import LoopClock
from coslice.store import Seat, Tenure
from coslice.wire.v1 import coslice_pb2 as pb

BOUND = 30.0


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(stack)


async def start(world: World) -> None:
    await world.start(groups=(GroupConfig(id="pool"), GroupConfig(id="spare")))
    await world.agent(groups=("pool", "spare"), states={"job-a": 1 << 20, "job-b": 1 << 20})


async def until(pilot: Pilot[None], true: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND):
        while not true():  # the screen tells nobody that it was drawn
            await pilot.pause(0.02)


def row(state: str, job: str, since: float) -> pb.GroupStatus:
    return pb.GroupStatus(group="g", state=state, job=job, since=since)


def test_a_strip_shows_what_took_most_of_each_cell() -> None:
    track = Track()
    assert track.strip(10, 10, 2) == [(UNKNOWN, ""), (UNKNOWN, "")]
    track.add(row("held", "a", 2.0), 2.1)
    track.add(row("swapping", "b", 4.0), 4.0)
    track.add(row("held", "b", 5.0), 5.0)
    track.add(row("resident", "b", 8.0), 8.0)
    strip = track.strip(10, 10, 10)
    assert "".join(character for character, _ in strip) == UNKNOWN * 2 + HELD * 2 + SWAP + HELD * 3 + FREE * 2
    assert [job for _, job in strip] == ["", "", "a", "a", "b", "b", "b", "b", "", ""]
    assert track.duty(10, 10) == pytest.approx(5 / 8)
    assert track.duty(10, 4) == pytest.approx(2 / 4)


def test_the_same_status_told_again_changes_nothing() -> None:
    track = Track()
    for now in (2.0, 3.0, 9.0):
        track.add(row("held", "a", 2.0), now)
    assert track.duty(10, 5) == 1.0
    assert len(track._changes) == 1


async def test_the_screen_shows_groups_jobs_and_a_story(world: World) -> None:
    await start(world)
    holder, waiter = await world.client("job-a"), await world.client("job-b")
    granted = await holder.acquire("pool")
    asked = await waiter.ask("pool")
    app = TopApp(Wire(world.app.address))
    async with app.run_test(size=(140, 40)) as pilot:
        groups, jobs = (app.query_one(name, DataTable) for name in ("#groups", "#jobs"))
        await until(pilot, lambda: groups.row_count == 2 and jobs.row_count == 2)
        assert app.chosen == "pool"
        assert [str(groups.get_cell("pool", column)) for column in ("lock", "queue")] == ["held", "1"]
        assert "job-a" in str(groups.get_cell("pool", "job"))
        assert HELD in str(groups.get_cell("pool", "last minute"))
        await pilot.press("tab", "j")
        assert app.job == "job-b"
        await until(pilot, lambda: "job-b has waited" in str(app.query_one("#lines", Static).render()))
        await holder.yielded(granted)
        await waiter.granted(asked)
        await until(pilot, lambda: "job-b" in str(groups.get_cell("pool", "job")))
        await pilot.press("escape", "j")
        assert app.chosen == "spare"
        await pilot.press("slash", *"pool", "enter")
        await until(pilot, lambda: groups.row_count == 1)
        assert app.focused is groups
        await pilot.press("escape")
        await until(pilot, lambda: groups.row_count == 2)
        assert not app.query_one("#filter", Input).display
        await pilot.press("s")
        assert app._order == "trouble"
    assert app._wire.closed.is_set()


async def test_trouble_and_a_lost_orchestrator_are_on_the_screen(world: World) -> None:
    await start(world)
    client = await world.client("job-a")
    await client.acquire("pool")
    app = TopApp(Wire(world.app.address))
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: "pool" in app.rows)
        client.kill()
        await until(pilot, lambda: "connection lost" in str(app.query_one("#about", Static).render()))
        await world.app.stop()
        await until(pilot, lambda: "no orchestrator answers" in str(app.query_one("#head", Static).render()))
        assert "pool" in app.rows  # what was known stays


async def test_a_drained_node_and_who_leads_are_on_the_screen(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    await start(world)
    client = await world.client("job-a")
    service = world.app._service
    assert service is not None
    service._roster = Roster(Known(ME, Seat("a:1", id="a")), ME, Tenure(3), LoopClock())
    await client.stub.Drain(pb.DrainRequest(node="n0", by="ada"))
    app = TopApp(Wire(world.app.address))
    async with app.run_test(size=(140, 40)) as pilot:
        groups = app.query_one("#groups", DataTable)
        await until(pilot, lambda: groups.row_count == 2)
        head = str(app.query_one("#head", Static).render())
        assert "me:1 leads (term 3); standing by: a:1" in head
        assert "1 node drained" in head
        assert "⊘" in str(groups.get_cell("pool", "group"))
        await until(pilot, lambda: "node n0: drained by ada" in str(app.query_one("#about", Static).render()))
        await client.stub.Drain(pb.DrainRequest(node="n0", undo=True))
        await until(pilot, lambda: "drained" not in str(app.query_one("#head", Static).render()))
        await client.stub.Drain(pb.DrainRequest(node="n0", by="ada"))
    await asyncio.to_thread(top, "", address=world.app.address, once=True, as_json=False)
    told = capsys.readouterr().out
    assert "orchestrator me:1 leads" in told
    assert told.count("node n0: drained by ada") == 1
    await asyncio.to_thread(top, "", address=world.app.address, once=True, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert [one["address"] for one in said["orchestrators"]] == ["me:1", "a:1"]
    assert said["groups"][0]["nodes"][0]["out"] == "drained"


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_it_ends_when_it_is_told_to(world: World, key: str) -> None:
    await start(world)
    app = TopApp(Wire(world.app.address))
    async with app.run_test() as pilot:
        await pilot.press("slash") if key == "ctrl+c" else None  # also out of a field
        await pilot.press(key)
        await until(pilot, lambda: app._exit)
    assert app.return_code == 0


async def test_once_and_json_are_for_scripts(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    await start(world)
    client = await world.client("job-a")
    await client.acquire("pool")
    where = {"address": world.app.address, "once": True}
    await asyncio.to_thread(top, "", as_json=True, **where)
    said = json.loads(capsys.readouterr().out)
    assert [(one["group"], one["state"], one["job"]) for one in said["groups"]] == [
        ("pool", "held", "job-a"),
        ("spare", "empty", ""),
    ]
    await asyncio.to_thread(top, "pool", as_json=False, **where)
    told = capsys.readouterr().out
    assert "held" in told
    assert "spare" not in told


async def test_without_textual_it_names_what_to_install(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start(world)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.delitem(sys.modules, "coslice.cli.top_app")
    for name in [name for name in sys.modules if name.startswith("textual.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'coslice\[top\]'"):
        await asyncio.to_thread(top, "", address=world.app.address, once=False, as_json=False)


async def test_who_does_not_answer_is_told_before_a_screen_is_taken() -> None:
    with pytest.raises(OrchestratorUnreachable):
        await asyncio.to_thread(top, "", address="127.0.0.1:1", once=False, as_json=False)
