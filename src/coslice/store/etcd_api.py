"""etcd's v3 API as JSON over HTTP (its own gateway, the same port), as far as the store and the election need
it.

Knows the members and moves on when one does not answer; retries nothing else, because only the caller knows
what a lost answer means. Needs httpx (``pip install 'coslice[ha]'``).
https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/
"""

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import httpx
import msgspec

from coslice.errors import ConfigError
from coslice.security.files import read_secret
from coslice.store.base import NoAnswer, StoreError
from coslice.store.etcd_location import EtcdLocation
from coslice.store.sockets import KEEPALIVE

Json = dict[str, Any]


class EtcdApi:
    """Opens connections when it is first asked something."""

    def __init__(self, location: EtcdLocation) -> None:
        self.location = location
        scheme = "https" if location.tls else "http"
        self._bases = [f"{scheme}://{host}/v3/" for host in location.hosts]
        self._at = 0
        self._moved = asyncio.Event()
        self._http: httpx.AsyncClient | None = None
        self._token = ""

    @property
    def members(self) -> int:
        return len(self._bases)

    async def call(self, path: str, body: Json, *, timeout: float) -> Json:
        """One answer. Each member is asked once, for at most ``timeout`` seconds.

        Raises ``NoAnswer``, or ``StoreError`` with etcd's own words where it refuses.
        """
        trouble = "nobody was asked"
        for _ in self._bases:
            base = self._bases[self._at]
            try:
                async with asyncio.timeout(timeout):
                    return await self._ask(base + path, body)
            except (httpx.TransportError, TimeoutError, NoAnswer) as error:
                trouble = f"{base}: {str(error) or type(error).__name__}"
            self._move(base)
        raise NoAnswer(f"no member of etcd answers ({trouble})")

    async def watch(self, body: Json) -> AsyncGenerator[Json, None]:
        """What a member tells, message by message, until it or the connection ends, or another member has to
        be asked instead."""
        moved = self._moved
        with contextlib.suppress(httpx.TransportError, msgspec.DecodeError):
            request = self._client().stream(
                "POST",
                self._bases[self._at] + "watch",
                content=msgspec.json.encode({"create_request": body}),
                headers=await self._headers(self._bases[self._at]),
                timeout=httpx.Timeout(5.0, read=None),
            )
            async with request as answer:
                lines = answer.aiter_lines()
                while (line := await _first(lines, moved)) is not None:
                    message: Json = msgspec.json.decode(line)
                    if "result" not in message:
                        return
                    yield message["result"]

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    def _move(self, base: str) -> None:
        if self._bases[self._at] == base:  # else somebody moved on already
            self._at = (self._at + 1) % len(self._bases)
            self._moved.set()
            self._moved = asyncio.Event()

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            transport = httpx.AsyncHTTPTransport(verify=self._tls(), socket_options=KEEPALIVE)
            self._http = httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)
        return self._http

    def _tls(self) -> ssl.SSLContext | bool:
        where = self.location
        if not where.tls:
            return False
        try:
            context = ssl.create_default_context(cafile=where.ca or None)
            if where.cert:
                context.load_cert_chain(where.cert, where.key or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"cannot use the certificates for etcd: {error}") from error
        return context

    async def _headers(self, base: str) -> dict[str, str]:
        where = self.location
        if not where.user:
            return {}
        if not self._token:
            password = read_secret(where.password_file, "password of etcd").decode().strip()
            login = {"name": where.user, "password": password}
            answer = await self._post(base + "auth/authenticate", login, {})
            self._token = str(answer["token"])
        return {"authorization": self._token}

    async def _ask(self, url: str, body: Json) -> Json:
        base = url[: url.index("/v3/") + 4]
        try:
            return await self._post(url, body, await self._headers(base))
        except _TokenOver:
            self._token = ""
            return await self._post(url, body, await self._headers(base))

    async def _post(self, url: str, body: Json, headers: dict[str, str]) -> Json:
        answer = await self._client().post(url, content=msgspec.json.encode(body), headers=headers)
        try:
            told: Json = msgspec.json.decode(answer.content)
        except msgspec.DecodeError:
            told = {}
        if answer.is_success and told:
            return told
        error = told.get("error") or told.get("message") or answer.text[:200]
        if isinstance(error, dict):  # of a stream
            error = error.get("message", error)
        if "invalid auth token" in str(error) and headers:
            raise _TokenOver(str(error))
        # 503: no leader, or stopping. 504 and "timed out": nobody knows what became of it.
        if answer.status_code in (502, 503, 504) or "timed out" in str(error) or "no leader" in str(error):
            raise NoAnswer(str(error))
        raise StoreError(f"etcd at {url} refuses: {error}")


class _TokenOver(Exception):
    pass


async def _first(lines: AsyncIterator[str], moved: asyncio.Event) -> str | None:
    """The next line; None once there is none, or ``moved``."""
    line = asyncio.ensure_future(anext(lines, None))
    move = asyncio.ensure_future(moved.wait())
    try:
        await asyncio.wait((line, move), return_when=asyncio.FIRST_COMPLETED)
        return line.result() if line.done() else None
    finally:
        for task in (line, move):
            task.cancel()
        await asyncio.gather(line, move, return_exceptions=True)


def encoded(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def decoded(text: str) -> bytes:
    return base64.b64decode(text)


def after_prefix(prefix: str) -> str:
    """The end of the range of all keys with that prefix, encoded."""
    raw = prefix.encode()
    return encoded(raw[:-1] + bytes([raw[-1] + 1]))
