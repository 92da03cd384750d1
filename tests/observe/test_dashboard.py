"""The dashboard's stream of a live orchestrator: what it tells, to whom, and what is left of a viewer."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent.conftest import MIB
from observe.conftest import GROUP, Machine
from orchestrator.raw_client import RawClient
from orchestrator.test_roster import ME, Known

from coslice.cli.security import make_token
from coslice.observe.board import Board
from coslice.observe.http import HttpServer
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import GroupConfig, OrchestratorConfig
from coslice.orchestrator.live import SLICE, Live
from coslice.orchestrator.roster import FRESH_S, Roster
from coslice.runtime.clock import LoopClock
from coslice.security import tokens
from coslice.security.listening import Security
from coslice.store import Seat, Tenure
from coslice.testing.fake_agent import FakeAgent
from coslice.wire.v1 import coslice_pb2 as pb

BOUND = 30.0


class Viewer:
    """Reads the stream as the page does, and insists on numbers without a gap."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.groups: dict[str, dict[str, Any]] = {}
        self.seq = -1
        self.orchestrator = ""
        self.seats: list[tuple[str, bool, int]] = []
        self.snapshots = 0

    async def read(self) -> str:
        """One event; its kind."""
        kind = ""
        async with asyncio.timeout(BOUND):
            async for line in self._lines:
                if line.startswith("event: "):
                    kind = line[7:]
                elif line.startswith("data: "):
                    self._take(kind, json.loads(line[6:]))
                    return kind
        raise EOFError

    def _take(self, kind: str, message: dict[str, Any]) -> None:
        if kind == "snapshot":
            self.snapshots += 1
            self.groups = {}
        else:
            assert message["seq"] == self.seq + 1
        self.seq, self.orchestrator = message["seq"], message["orchestrator"]
        self.seats = [(one["address"], one["leads"], one["term"]) for one in message["seats"]]
        for told in message["groups"]:
            group = self.groups.setdefault(told["row"]["group"], {"past": [], "queue": [], "log": []})
            group["row"], group["open"] = told["row"], told["open"]
            for kept in ("past", "queue", "log"):
                group[kept] += told[kept]
        for gone in message["gone"]:
            del self.groups[gone]

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await self.read()


@asynccontextmanager
async def viewing(url: str, **options: Any) -> AsyncIterator[Viewer]:
    async with (
        httpx.AsyncClient(base_url=url, timeout=BOUND, **options) as http,
        http.stream("GET", "/dashboard/events") as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        yield Viewer(answer.aiter_lines())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND):
        while not true():  # noqa: ASYNC110  the server learns of a viewer's end from its socket alone
            await asyncio.sleep(0.01)


def live_of(machine: Machine) -> Live:
    assert machine.orchestrator.live is not None
    return machine.orchestrator.live


async def test_real_hand_overs_are_told_without_a_gap(machine: Machine) -> None:
    await machine.start(budget=12 * MIB)
    jobs = [await machine.client(name) for name in ("job-a", "job-b")]
    for name in ("job-a", "job-b"):
        await machine.workload(name, size=8 * MIB)
    async with viewing(machine.http.url) as viewer:
        assert await viewer.read() == "snapshot"
        assert viewer.groups[GROUP]["row"]["waiting"] == []
        lease = await jobs[0].acquire(GROUP)
        asked = await jobs[1].ask(GROUP)
        seen = viewer.groups[GROUP]
        await viewer.until(lambda: seen["row"]["waiting"] == ["job-b"])
        assert (seen["row"]["state"], seen["row"]["job"]) == ("held", "job-a")
        assert {(one["kind"], one["job"]) for one in seen["open"]} == {
            ("held", "job-a"),
            ("waiting", "job-b"),
        }
        assert [one["reason"] for one in seen["row"]["jobs"] if one["job"] == "job-b"] != [""]
        async with httpx.AsyncClient(base_url=machine.http.url) as http:
            story = (await http.get("/dashboard/story", params={"group": GROUP, "job": "job-b"})).json()
            assert "job-b has waited" in story["lines"][0]
            nobody = await http.get("/dashboard/story", params={"group": GROUP, "job": "nobody"})
            assert (nobody.status_code, "knows no job nobody" in nobody.json()["error"]) == (404, True)
        await jobs[0].yielded(lease)
        await jobs[1].yielded(await jobs[1].granted(asked))
        await viewer.until(lambda: seen["row"]["state"] == "resident")
        ended = [(one["kind"], one["job"]) for one in seen["past"]]
        assert [each for each in ended if each[0] == "held"] == [("held", "job-a"), ("held", "job-b")]
        assert ("waiting", "job-b") in ended
        swap = next(one for one in seen["past"] if (one["kind"], one["job"]) == ("swapping", "job-b"))
        assert swap["bytes"] == 16 * MIB
        assert any(one["code"] == "granted_swapped" for one in seen["log"])
        async with viewing(machine.http.url) as second:  # who comes later is told what was before
            await second.read()
            assert second.groups[GROUP]["past"] == seen["past"]
            assert second.groups[GROUP]["queue"] == seen["queue"]


async def test_nothing_is_heard_or_kept_before_somebody_looks_or_after_the_last_left(
    machine: Machine,
) -> None:
    await machine.start(budget=12 * MIB)
    live, client = live_of(machine), await machine.client("job-a")
    live.linger = 0.0
    observer = machine.orchestrator._observer
    assert observer.live is None
    async with viewing(machine.http.url) as viewer:
        await viewer.read()
        assert (live.viewers, live.looking, observer.live is not None) == (1, True, True)
        await client.yielded(await client.acquire(GROUP))
        await viewer.read()
    await until(lambda: not live.viewers and not live.looking)
    assert observer.live is None
    assert live._groups == {}
    await client.yielded(await client.acquire(GROUP))
    assert (live._unheard, live._dirty) == ([], {})


async def test_a_viewer_that_falls_behind_is_given_a_snapshot(machine: Machine) -> None:
    await machine.start(budget=12 * MIB)
    live, client = live_of(machine), await machine.client("job-a")
    stream = live.follow()
    viewer = Viewer(_lines(stream))
    await viewer.read()
    (mailbox,) = live._viewers
    mailbox._max_messages = 0
    lease = await client.acquire(GROUP)
    await until(lambda: mailbox.behind)
    mailbox._max_messages = 400
    assert await viewer.read() == "snapshot"
    await viewer.until(lambda: viewer.groups[GROUP]["row"]["state"] == "held")
    await client.yielded(lease)
    await viewer.until(lambda: viewer.groups[GROUP]["row"]["state"] == "resident")
    await stream.aclose()
    assert live.viewers == 0


async def test_many_groups_are_told_in_slices_between_which_others_have_the_loop() -> None:
    names = [f"group-{n:02}" for n in range(3 * SLICE + 1)]
    config = OrchestratorConfig(
        listen="127.0.0.1:0", stop_grace=0.2, groups=tuple(GroupConfig(id=name) for name in names)
    )
    app = OrchestratorApp(config, board=Board())
    await app.start()
    agent, client = FakeAgent(app.address, groups=names), RawClient(app.address, "job-a")
    try:
        await agent.start()
        await client.connect()
        assert app.live is not None
        stream = app.live.follow()
        viewer = Viewer(_lines(stream))
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        for name in names[:15]:
            await client.acquire(name)
        busy = asyncio.create_task(others())
        await viewer.read()
        assert turns >= 4, "one for each slice"
        assert list(viewer.groups) == names
        for name in names[15:]:  # told as changes, a slice at a time, without a gap
            await client.acquire(name)
        await viewer.until(lambda: all(seen["row"]["state"] == "held" for seen in viewer.groups.values()))
        busy.cancel()
        status = await client.stub.GetStatus(pb.GetStatusRequest())
        assert [(group.group, group.state) for group in status.groups] == [(name, "held") for name in names]
        await stream.aclose()
    finally:
        await client.close()
        await agent.stop()
        await app.stop()


async def _lines(stream: AsyncIterator[bytes]) -> AsyncIterator[str]:
    async for piece in stream:
        for line in piece.decode().splitlines():
            yield line


async def test_faults_and_lost_connections_are_in_the_rows(machine: Machine) -> None:
    await machine.start(budget=12 * MIB)
    client = await machine.client("job-a")
    await client.acquire(GROUP)
    async with viewing(machine.http.url) as viewer:
        await viewer.read()
        client.kill()
        seen = viewer.groups[GROUP]
        await viewer.until(lambda: any("connection lost" in said for said in seen["row"]["trouble"]))
        assert any(one["code"] == "session_lost" for one in seen["log"])


async def test_who_leads_and_who_stands_by_is_told_as_it_changes(machine: Machine) -> None:
    await machine.start(budget=12 * MIB)
    live = live_of(machine)
    assert live.source is not None
    known = Known(ME, Seat("b:1", id="b"), Seat("a:1", id="a"))
    live.source._roster = Roster(known, ME, Tenure(3), LoopClock())
    async with viewing(machine.http.url) as viewer:
        await viewer.until(lambda: viewer.seats == [("me:1", True, 3), ("a:1", False, 0), ("b:1", False, 0)])
        known.seats.pop()  # one dies
        live.source._roster._asked -= FRESH_S
        await live._look_who_leads()
        await viewer.until(lambda: viewer.seats == [("me:1", True, 3), ("b:1", False, 0)])
        live._leader = lambda: "b:1"
        live.lead(None)
        await viewer.until(lambda: viewer.orchestrator == "")
        assert viewer.seats == [("b:1", True, 0)]


async def test_who_cannot_be_asked_who_stands_by_is_logged_once_and_asked_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await machine.start(budget=12 * MIB)
    live = live_of(machine)
    assert live.source is not None
    known = Known(ME, Seat("a:1", id="a"))
    live.source._roster = Roster(known, ME, Tenure(3), LoopClock())
    answers, refused = known.candidates, asyncio.Event()

    async def refuses() -> list[Seat]:
        known.asked += 1
        if known.asked == 3:
            refused.set()
        raise RuntimeError("no password")

    known.candidates = refuses  # type: ignore[method-assign]
    monkeypatch.setattr("coslice.orchestrator.live.REFRESH_S", 0.01)
    async with viewing(machine.http.url) as viewer, asyncio.timeout(BOUND):
        await refused.wait()
        told = [record for record in caplog.records if record.name == "coslice.orchestrator.live"]
        assert [record.getMessage() for record in told] == [
            "the dashboard cannot tell who stands by (it asks again): RuntimeError: no password"
        ]
        known.candidates = answers  # type: ignore[method-assign]
        await viewer.until(lambda: viewer.seats == [("me:1", True, 3), ("a:1", False, 0)])


async def test_a_drained_node_is_in_the_rows_and_is_no_trouble(machine: Machine) -> None:
    await machine.start(budget=12 * MIB)
    client = await machine.client("job-a")
    lease = await client.acquire(GROUP)
    async with viewing(machine.http.url) as viewer:
        await viewer.read()
        seen = viewer.groups[GROUP]
        await client.stub.Drain(pb.DrainRequest(node="node-0", by="ada", reason="fan"))
        await viewer.until(lambda: seen["row"]["nodes"][0]["out"] == "draining")
        assert seen["row"]["nodes"][0]["drained"] == "drained by ada (fan); job-a finishes its turn"
        await client.yielded(lease)
        await viewer.until(lambda: seen["row"]["nodes"][0]["out"] == "drained")
        assert seen["row"]["trouble"] == []
        await client.stub.Drain(pb.DrainRequest(node="node-0", undo=True))
        await viewer.until(lambda: seen["row"]["nodes"][0]["out"] == "")


async def test_streams_end_when_the_orchestrator_stops(machine: Machine) -> None:
    await machine.start(budget=12 * MIB)
    async with viewing(machine.http.url) as viewer:
        await viewer.read()
        await machine.orchestrator.stop()
        try:
            while await viewer.read():
                pass
        except EOFError:
            pass
    assert not live_of(machine).looking


async def test_the_form_is_open_and_says_nothing_and_what_fills_it_needs_a_token(tmp_path: Path) -> None:
    tokens.create_secret(tmp_path / "secret")
    board = Board()
    app = OrchestratorApp(OrchestratorConfig(listen="127.0.0.1:0", stop_grace=0.2), board=board)
    server = HttpServer(board, "127.0.0.1:0", Security(token_secret=str(tmp_path / "secret")))
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url) as http:
            for path in ("/", *(f"/dashboard/{name}" for name in ("drawing.js", "feed.js", "dashboard.css"))):
                answer = await http.get(path)
                assert answer.status_code == 200, path
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert "http" not in answer.text.replace("http://www.w3.org/2000/svg", ""), path
            for path in ("/dashboard/events", "/dashboard/story?group=g"):
                assert (await http.get(path)).status_code == 401
            assert (await http.post("/")).status_code == 405
            token = make_token("", secret=tmp_path / "secret", role="read", ttl="1h")
        async with viewing(server.url, headers={"Authorization": f"Bearer {token}"}) as viewer:
            await viewer.read()
            assert (viewer.orchestrator, viewer.groups) == ("", {})  # nobody leads yet
            await app.start()
            await viewer.until(lambda: viewer.orchestrator == app.instance)
    finally:
        await app.stop()
        await server.stop()
