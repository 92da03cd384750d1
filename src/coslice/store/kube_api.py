"""The Kubernetes API over HTTP, as far as the store and the election need it: objects of one namespace, with
their resourceVersion, and a watch.

Retries nothing: only the caller knows what a lost answer means. Inside a pod it uses the service account's
token, which is read again for each request because the kubelet renews it. Needs httpx (``coslice[ha]``).
https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

import os
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import msgspec

from coslice.errors import ConfigError
from coslice.store.base import NoAnswer, StoreError
from coslice.store.kube_location import KubeLocation
from coslice.store.sockets import KEEPALIVE

Json = dict[str, Any]

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT = 5.0
_WATCH_S = 300
CONFIG_MAPS, LEASES = "api/v1", "apis/coordination.k8s.io/v1"
_PLURALS = {CONFIG_MAPS: "configmaps", LEASES: "leases"}


class Stale(StoreError):
    """409: the object is another than the caller knows, or exists already."""


class Missing(StoreError):
    """404: there is no such object."""


class Expired(StoreError):
    """410: the version to go on from is no longer known. Begin anew."""


class KubeApi:
    """Opens connections when it is first asked something."""

    def __init__(self, location: KubeLocation) -> None:
        self.location = location
        self._http: httpx.AsyncClient | None = None

    async def get(self, kind: str, name: str, *, timeout: float = _TIMEOUT) -> Json:
        return await self._ask("GET", self._path(kind, name), timeout=timeout)

    async def list(self, kind: str, **query: str) -> Json:
        return await self._ask("GET", self._path(kind), query=query, timeout=_TIMEOUT)

    async def create(self, kind: str, thing: Json, *, timeout: float = _TIMEOUT) -> Json:
        return await self._ask("POST", self._path(kind), body=thing, timeout=timeout)

    async def replace(self, kind: str, thing: Json, *, timeout: float = _TIMEOUT) -> Json:
        """Only where ``thing`` has the current resourceVersion."""
        name = str(thing["metadata"]["name"])
        return await self._ask("PUT", self._path(kind, name), body=thing, timeout=timeout)

    async def delete(self, kind: str, name: str, version: str) -> Json:
        body = {"kind": "DeleteOptions", "preconditions": {"resourceVersion": version}}
        return await self._ask("DELETE", self._path(kind, name), body=body, timeout=_TIMEOUT)

    async def watch(self, kind: str, name: str, version: str) -> AsyncGenerator[Json, None]:
        """What happens to one object after ``version``, bookmarks included, until the server or the
        connection ends it. Raises ``Expired``."""
        query = {"fieldSelector": f"metadata.name={name}", "timeoutSeconds": str(_WATCH_S)}
        async with aclosing(self.watch_at(self._path(kind), version, query)) as events:
            async for event in events:
                yield event

    async def list_at(self, path: str, query: dict[str, str]) -> Json:
        """Of any resource, in all namespaces if the path names none."""
        return await self._ask("GET", path, query=query, timeout=_TIMEOUT)

    async def watch_at(self, path: str, version: str, query: dict[str, str]) -> AsyncGenerator[Json, None]:
        """As ``watch``, for what the query selects."""
        query = {**query, "watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        try:
            request = self._client().stream(
                "GET",
                path,
                params=query,
                headers=self._headers(),
                timeout=httpx.Timeout(5.0, read=None),
            )
            async with request as answer:
                if not answer.is_success:
                    raise _refused(answer.status_code, (await answer.aread())[:300].decode("utf8", "replace"))
                async for line in answer.aiter_lines():
                    event: Json = msgspec.json.decode(line)
                    if event.get("type") == "ERROR":
                        status = event.get("object", {})
                        raise _refused(int(status.get("code", 0)), str(status.get("message", "")))
                    yield event
        except (httpx.TransportError, msgspec.DecodeError):
            return

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    def _path(self, kind: str, name: str = "") -> str:
        path = f"/{kind}/namespaces/{self.location.namespace}/{_PLURALS[kind]}"
        return f"{path}/{name}" if name else path

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            base = self.location.api or _in_cluster()
            ca = self.location.ca or ("" if self.location.api else str(_ACCOUNT / "ca.crt"))
            verify: ssl.SSLContext | bool = False
            if base.startswith("https:"):
                try:
                    verify = ssl.create_default_context(cafile=ca or None)
                except (OSError, ssl.SSLError) as error:
                    why = error.strerror or error
                    raise ConfigError(f"cannot use {ca}, the CA of the Kubernetes API: {why}") from error
            limits = httpx.Limits(max_connections=32)
            transport = httpx.AsyncHTTPTransport(verify=verify, socket_options=KEEPALIVE, limits=limits)
            self._http = httpx.AsyncClient(base_url=base, transport=transport, timeout=None, trust_env=False)
        return self._http

    def _headers(self) -> dict[str, str]:
        token = self.location.token_file or str(_ACCOUNT / "token")
        if self.location.api and not self.location.token_file:
            return {}
        try:
            return {"authorization": f"Bearer {Path(token).read_text().strip()}"}
        except OSError as error:
            if not self.location.api:
                _in_cluster()  # that there is none says more
            why = f"cannot read {token}, the token for the Kubernetes API ({error.strerror})"
            raise ConfigError(f"{why}: name another with token_file=FILE") from error

    def check(self) -> None:
        """Raises ``ConfigError`` where nothing can be asked before somebody mends the configuration."""
        self._client()
        self._headers()

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        body: Json | None = None,
        query: dict[str, str] | None = None,
        timeout: float,
    ) -> Json:
        content = msgspec.json.encode(body) if body is not None else None
        headers = {**self._headers(), "content-type": "application/json"}
        try:
            answer = await self._client().request(
                method, path, params=query, content=content, headers=headers, timeout=timeout
            )
            told: Json = msgspec.json.decode(answer.content) if answer.content else {}
        except (httpx.TransportError, msgspec.DecodeError) as error:
            why = str(error) or type(error).__name__
            raise NoAnswer(
                f"the Kubernetes API at {self._client().base_url} does not answer: {why}"
            ) from error
        if answer.is_success:
            return told
        raise _refused(answer.status_code, str(told.get("message", answer.text[:200])))


def _refused(code: int, message: str) -> StoreError:
    kinds = {404: Missing, 409: Stale, 410: Expired}
    if code in kinds:
        return kinds[code](message)
    # 429: too busy. 5xx: the server or its etcd is not there; what became of a write is unknown.
    if code == 429 or code >= 500:
        return NoAnswer(f"the Kubernetes API answers {code}: {message}")
    hint = " (see docs/high-availability.md for the rights it needs)" if code in (401, 403) else ""
    return StoreError(f"the Kubernetes API refuses with {code}: {message}{hint}")


def _in_cluster() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise ConfigError(
            "this is no pod of a Kubernetes cluster: say where its API is, as in --store "
            "kubernetes://NAMESPACE?api=URL or --topology kubernetes?api=URL (kubectl proxy offers "
            "http://127.0.0.1:8001)"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
