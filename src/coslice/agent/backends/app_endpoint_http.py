"""One engine's HTTP, with a deadline on everything and errors that say what may have happened.

No proxies, no redirects, no reuse of connections (a connection that the server closed meanwhile would look
like a crash), and no answer longer than we are willing to read.
"""

import asyncio
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from coslice.agent.endpoints import Endpoint
from coslice.errors import ConfigError

if TYPE_CHECKING:
    import httpx

ANSWER_LIMIT = 8 << 20
CONNECT_SECONDS = 5.0
Params = Sequence[tuple[str, str]]


class NoAnswer(Exception):
    """``sent``: the engine may have done what it was asked to. ``late``: it did not answer in time."""

    def __init__(self, message: str, *, sent: bool, late: bool = False) -> None:
        super().__init__(message)
        self.sent, self.late = sent, late


class Answer(Struct, frozen=True):
    status: int
    text: str

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def missing(self) -> bool:
        """This build has no such route."""
        return self.status in (404, 405)

    def json(self) -> Any:
        """None if it is not JSON."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    def word(self) -> str:
        """For messages: status and the beginning of the text."""
        return f"{self.status} {self.text[:200].strip()}".strip()


def load_httpx() -> Any:
    try:
        return importlib.import_module("httpx")
    except ModuleNotFoundError:
        raise ConfigError(
            "engines are driven over HTTP, and httpx is not installed: pip install 'coslice[engines]'"
        ) from None


class EngineHttp:
    def __init__(self, endpoint: Endpoint, *, key: str = "") -> None:
        """``key``: the engine's API key, if it wants one."""
        self.endpoint = endpoint
        self._httpx = load_httpx()
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client: httpx.AsyncClient | None = None

    async def get(self, path: str, *, timeout: float = 10.0) -> Answer:
        return await self.ask("GET", path, timeout=timeout)

    async def post(
        self, path: str, *, params: Params = (), body: object = None, timeout: float = 10.0
    ) -> Answer:
        return await self.ask("POST", path, params=params, body=body, timeout=timeout)

    async def ask(
        self, method: str, path: str, *, params: Params = (), body: object = None, timeout: float
    ) -> Answer:
        """Raises ``NoAnswer``; any status is an answer."""
        httpx, what = self._httpx, f"{method} {path} at {self.endpoint.base}"
        if self._client is None:
            self._client = httpx.AsyncClient(
                trust_env=False,
                follow_redirects=False,
                headers=self._headers,
                limits=httpx.Limits(max_keepalive_connections=0),
            )
        seconds = httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS))
        extra: Mapping[str, Any] = {} if body is None else {"json": body}
        try:
            async with (
                asyncio.timeout(timeout),
                self._client.stream(
                    method, self.endpoint.base + path, params=list(params), timeout=seconds, **extra
                ) as response,
            ):
                data = b""
                async for chunk in response.aiter_bytes():
                    data += chunk
                    if len(data) > ANSWER_LIMIT:
                        raise NoAnswer(f"{what}: the answer does not end", sent=True)
                return Answer(response.status_code, data.decode(errors="replace"))
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise NoAnswer(f"nobody listens at {self.endpoint.base}", sent=False) from None
        except (TimeoutError, httpx.TimeoutException):
            raise NoAnswer(f"{what} was not answered within {timeout:g} s", sent=True, late=True) from None
        except httpx.HTTPError as error:
            raise NoAnswer(f"{what} broke off ({type(error).__name__})", sent=True) from None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None
