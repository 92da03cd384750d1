"""HTTP for people and Prometheus: ``/metrics``, ``/healthz``, ``/readyz`` and what else the board has.

Runs in the event loop of the process. The same rule as for every other port: what other machines can reach
needs TLS and tokens (any valid token may read), or is refused; metrics name jobs. The two health pages say
nothing of jobs and are open to all, for probes that have no token; so is a page's empty form, which asks for
one.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from coslice.errors import ConfigError
from coslice.observe.board import Board
from coslice.security import listening
from coslice.security.addresses import split_address
from coslice.security.listening import LOCAL_ONLY, Security
from coslice.security.served import Served
from coslice.security.tokens import InvalidToken, verify

log = logging.getLogger(__name__)
TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN = ("/healthz", "/readyz")
GRACE_S = 1
"""For answers that are under way when the process stops."""


class HttpServer:
    """``start`` once, ``stop`` once; ``address`` is known in between."""

    def __init__(self, board: Board, listen: str, security: Security = LOCAL_ONLY) -> None:
        self._board, self._listen, self._security = board, listen, security
        self._served = Served(security.tls, security.token_secret)
        self._ssl: ssl.SSLContext | None = None
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._lag: asyncio.Task[None] | None = None
        self.address = ""
        """``host:port`` as really bound."""

    @property
    def url(self) -> str:
        return f"{'https' if self._security.tls is not None else 'http'}://{self.address}"

    async def start(self) -> None:
        """Raises ``ConfigError`` for an address that cannot be listened on, or may not be."""
        security, (host, port) = self._security, split_address(self._listen)
        listening.check("metrics page", self._listen, host, security)
        self._served.read()
        bound = _bind(host, port)
        port = bound.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        config = uvicorn.Config(
            make_app(self._board, self._served),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        config.load()
        if security.tls is not None:
            config.ssl = self._ssl = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._ssl.load_cert_chain(security.tls.cert, security.tls.key)
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([bound]), name="http")
        self._task.add_done_callback(_ended)
        self._lag = asyncio.create_task(self._board.lag.run(), name="loop lag")
        log.info("metrics at %s/metrics", self.url)

    def reload(self) -> tuple[str, ...]:
        """Read token secret and certificates again; returns what changed. Raises ``ConfigError``, and goes on
        with what it had."""
        changed = self._served.read()
        if self._ssl is not None and self._security.tls is not None:
            try:
                self._ssl.load_cert_chain(self._security.tls.cert, self._security.tls.key)
            except OSError as error:  # changed since they were looked at
                raise ConfigError(f"{self._security.tls.cert} cannot be used: {error}") from None
        return changed

    async def stop(self) -> None:
        """Idempotent."""
        if self._server is None or self._task is None or self._lag is None:
            return
        self._server.should_exit = True
        self._lag.cancel()
        await asyncio.wait([self._task, self._lag])


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the command line's


def _ended(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the metrics page broke: %s", error, exc_info=error)


def make_app(board: Board, served: Served) -> Starlette:
    """``served``: its keys are those that tokens are checked with; none: no token is asked for."""

    async def metrics(_: Request) -> Response:
        return _Blocks(board.exposition())

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")  # the event loop answers

    async def readyz(_: Request) -> Response:
        waiting = board.waiting_for()
        lines = [f"{part}: {why}\n" for part, why in waiting.items()]
        return PlainTextResponse("".join(lines) or "ready\n", status_code=503 if waiting else 200)

    async def further(scope: Scope, receive: Receive, send: Send) -> None:
        await Router(board.routes)(scope, receive, send)  # apps may be made after this one

    own: list[BaseRoute] = [
        Route("/metrics", metrics),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Mount("/", app=further),
    ]
    return Starlette(routes=own, middleware=[Middleware(_Guard, served=served, open_too=board.open)])


class _Blocks(Response):
    """The metrics, each block sent once it is written, while somebody reads. (Starlette's own way imports a
    library of tasks at the first scrape, for 25 ms.)"""

    media_type = TEXT

    def __init__(self, blocks: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._blocks = blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        gone = asyncio.create_task(_gone(receive))
        try:
            async with contextlib.aclosing(self._blocks):
                async for block in self._blocks:
                    if gone.done():  # it may ask again: what nobody reads would only make that slower
                        return
                    await send({"type": "http.response.body", "body": block, "more_body": True})
        finally:
            gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    """Returns once the client is."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Guard:
    """Any valid token may read, as over gRPC."""

    def __init__(self, app: ASGIApp, served: Served, open_too: set[str]) -> None:
        self._app, self._served, self._open_too = app, served, open_too

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = (
            scope["type"] == "http" and self._served.keys and scope["path"] not in (*OPEN, *self._open_too)
        )
        why = self._problem(Headers(scope=scope).get("authorization", "")) if asked else ""
        app = PlainTextResponse(f"{why}\n", 401, {"WWW-Authenticate": "Bearer"}) if why else self._app
        await app(scope, receive, send)

    def _problem(self, shown: str) -> str:
        scheme, _, token = shown.partition(" ")
        if scheme.lower() != "bearer":
            return "a token is needed here: make one with `coslice token create --role read --secret FILE`"
        try:
            verify(self._served.keys, token.strip(), now=time.time())
        except InvalidToken as error:
            return f"the token is not accepted: {error}"
        return ""


def _bind(host: str, port: int) -> socket.socket:
    """Listening already, so that nobody who reads the address is refused."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen(128)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} for metrics: {error.strerror}. Choose another port (0: any)"
        ) from None
    bound.setblocking(False)
    return bound
