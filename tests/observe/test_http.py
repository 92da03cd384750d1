"""The pages themselves: who may read them, where they may be served, and what they say while things start."""

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from coslice.cli.security import make_certs, make_token
from coslice.errors import ConfigError
from coslice.observe.board import Board
from coslice.observe.http import HttpServer
from coslice.observe.metric import Metric, Source
from coslice.orchestrator.app import OrchestratorApp
from coslice.orchestrator.config import OrchestratorConfig
from coslice.security import tokens
from coslice.security.listening import LOCAL_ONLY, Security, make_tls
from coslice.testing.fake_kubernetes_http import FakeKubernetes


@asynccontextmanager
async def pages(board: Board, security: Security = LOCAL_ONLY) -> AsyncIterator[httpx.AsyncClient]:
    server = HttpServer(board, "127.0.0.1:0", security)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url) as client:
            yield client
    finally:
        await server.stop()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    tokens.create_secret(tmp_path / "secret")
    return tmp_path / "secret"


async def test_health_is_open_and_everything_else_needs_a_token(secret: Path) -> None:
    board = Board()
    board.routes.append(Route("/page", lambda _: PlainTextResponse("hello")))
    async with pages(board, Security(token_secret=str(secret))) as http:
        assert [(await http.get(path)).status_code for path in ("/healthz", "/readyz")] == [200, 200]
        for path in ("/metrics", "/page", "/no-such-page"):
            refused = await http.get(path)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer"), path
            assert "coslice_info" not in refused.text
        for role, name in (("read", ""), ("job", "job-a"), ("admin", "")):
            shown = {"Authorization": f"Bearer {make_token(name, secret=secret, role=role, ttl='1h')}"}
            assert (await http.get("/metrics", headers=shown)).status_code == 200
            assert (await http.get("/page", headers=shown)).text == "hello"
        expired = make_token("", secret=secret, role="read", ttl="1h")[:-3]
        assert (await http.get("/metrics", headers={"Authorization": f"Bearer {expired}"})).status_code == 401


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates need openssl")
async def test_beyond_loopback_it_speaks_tls_and_wants_a_token(tmp_path: Path, secret: Path) -> None:
    make_certs(tmp_path / "certs", names=("localhost",), nodes=())
    tls = make_tls(*(str(tmp_path / "certs" / name) for name in ("server.pem", "server.key", "ca.pem")))
    server = HttpServer(Board(), "0.0.0.0:0", Security(tls, str(secret)))
    await server.start()
    try:
        at = f"localhost:{server.address.rpartition(':')[2]}"
        trusted = ssl.create_default_context(cafile=str(tmp_path / "certs" / "ca.pem"))
        async with httpx.AsyncClient(verify=trusted, base_url=f"https://{at}") as http:
            token = make_token("", secret=secret, role="read", ttl="1h")
            shown = {"Authorization": f"Bearer {token}"}
            assert (await http.get("/metrics")).status_code == 401
            assert "coslice_info" in (await http.get("/metrics", headers=shown)).text
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://{at}/metrics")
    finally:
        await server.stop()


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
async def test_beyond_loopback_it_is_refused_without_tls_and_tokens(address: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics page would listen .* other machines"):
        await HttpServer(Board(), address).start()


async def test_insecure_says_that_everybody_may_read() -> None:
    server = HttpServer(Board(), "0.0.0.0:0", Security(insecure=True))
    await server.start()
    try:
        async with httpx.AsyncClient() as http:
            port = server.address.rpartition(":")[2]
            assert (await http.get(f"http://127.0.0.1:{port}/metrics")).status_code == 200
    finally:
        await server.stop()


async def test_a_port_that_is_taken_is_told_and_leaves_nothing_behind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = HttpServer(Board(), f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"in use.*another port"):
            await server.start()
        await server.stop()


async def test_it_is_ready_once_the_orchestrator_is() -> None:
    async with AsyncExitStack() as stack:
        board = Board()
        app = OrchestratorApp(OrchestratorConfig(listen="127.0.0.1:0", stop_grace=0.2), board=board)
        http = await stack.enter_async_context(pages(board))
        before = await http.get("/readyz")
        assert (before.status_code, before.text) == (503, "orchestrator: it is starting\n")
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200
        await app.start()
        stack.push_async_callback(app.stop)
        assert (await http.get("/readyz")).status_code == 200


async def exposed(board: Board) -> bytes:
    return b"".join([block async for block in board.exposition()])


async def test_whoever_stands_by_says_so() -> None:
    board = Board()
    nowhere = "etcd://127.0.0.1:1/nobody"  # nobody is ever elected there
    config = OrchestratorConfig(listen="127.0.0.1:0", stop_grace=0.2, store=nowhere)
    app = OrchestratorApp(config, board=board)
    await app.start()
    try:
        assert b"coslice_leader 0.0" in await exposed(board)
    finally:
        await app.stop()


async def test_for_a_client_that_went_away_no_more_metrics_are_written() -> None:
    board, big = Board(), Metric("big", "gauge", "More than lies in a connection's buffers.", ("name",))
    went_on = False

    def rest() -> None:
        nonlocal went_on
        went_on = True

    values = [(big, (f"{number}{'x' * 50_000}",), 1.0) for number in range(400)]
    board.add(Source((big,), lambda: None, lambda _: values))
    board.add(Source((), rest, lambda _: ()))
    async with pages(board) as http:
        reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
        await reader.readuntil(b"xxx")
        writer.transport.abort()
    assert not went_on


async def test_the_leader_tells_how_many_stand_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coslice.orchestrator.roster.FRESH_S", 0.0)

    async def until(line: bytes) -> None:
        async with asyncio.timeout(30):
            while line not in (await exposed(boards[0])).split(b"\n"):  # noqa: ASYNC110  the API tells nobody who came
                await asyncio.sleep(0.02)

    with FakeKubernetes() as api:
        place = f"kubernetes://here/t?api={api.url}"
        config = OrchestratorConfig(listen="127.0.0.1:0", stop_grace=0.2, store=place)
        boards = [Board(), Board()]
        leader, standby = (OrchestratorApp(config, board=board) for board in boards)
        await leader.start()
        try:
            await until(b"coslice_leader 1.0")
            await until(b"coslice_standbys 0.0")
            await standby.start()
            try:
                await until(b"coslice_standbys 1.0")
                assert b"\ncoslice_standbys " not in await exposed(boards[1])
            finally:
                await standby.stop()
            await until(b"coslice_standbys 0.0")
        finally:
            await leader.stop()
