"""Who may call what: one table for each server, and what is in no table is the administrator's.

``Guard`` is a gRPC interceptor: it checks the token of every call before its handler runs and leaves the
caller in ``caller()``. Streams that say their job in their first message check it themselves, with
``problem``. Without a secret there are no tokens, and every local caller is served; only what needs a proven
administrator stays closed.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from coslice.security.served import Served
from coslice.security.tokens import ADMIN, AGENT, JOB, READ, Claims, InvalidToken, verify

OPEN = "open"
"""Anybody: health checks."""
ANY = READ
"""Any valid token."""
INBAND = "inband"
"""The handler answers with a refusal of its own kind: it asks ``problem``."""

HEALTH = {f"/grpc.health.v1.Health/{name}": OPEN for name in ("Check", "Watch", "List")}
REFLECTION = {
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo": ANY for version in ("v1", "v1alpha")
}


@dataclass(frozen=True)
class Caller:
    """``claims`` None: no secret is configured, or the token was none (``why`` says so)."""

    claims: Claims | None = None
    why: str = ""

    @property
    def proven_admin(self) -> bool:
        return self.claims is not None and self.claims.role == ADMIN

    def problem(self, role: str, name: str = "") -> str:
        """Why this caller may not act in that role, for that job or node; empty: it may."""
        if self.why:
            return self.why
        if self.claims is None or self.claims.role == ADMIN:
            return ""
        if role == READ:
            return ""
        if self.claims.role != role:
            return f"this needs a token for the role {role}, and the one shown is for {self.claims.role}"
        if self.claims.name != name:
            return f"the token is for {role} {self.claims.name}, not for {name}: use that {role}'s own"
        return ""


_LOCAL = Caller()
_CALLER: ContextVar[Caller] = ContextVar("coslice_caller", default=_LOCAL)


def caller() -> Caller:
    """Who makes the call that is being served here."""
    return _CALLER.get()


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """``rules``: method → role. ``served.keys`` empty: no tokens are asked for."""

    def __init__(
        self,
        rules: Mapping[str, str],
        served: Served,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._rules, self._served, self._now = {**HEALTH, **REFLECTION, **rules}, served, now

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        need = self._rules.get(handler_call_details.method, ADMIN)
        if self._served.keys and need != OPEN:
            found = self._caller(handler_call_details.invocation_metadata)
            _CALLER.set(found)
            if need != INBAND and (problem := found.problem(need)):
                status = grpc.StatusCode.UNAUTHENTICATED if found.why else grpc.StatusCode.PERMISSION_DENIED
                return _refusing(status, problem)
        return await continuation(handler_call_details)

    def _caller(self, metadata: Any) -> Caller:
        for key, value in metadata or ():
            if key == "authorization":
                scheme, _, token = str(value).partition(" ")
                if scheme.lower() != "bearer":
                    return Caller(why="the authorization is no bearer token: set COSLICE_TOKEN")
                try:
                    return Caller(verify(self._served.keys, token.strip(), now=self._now()))
                except InvalidToken as error:
                    return Caller(why=f"the token is not accepted: {error}")
        return Caller(
            why="a token is needed here: make one with `coslice token create JOB`, and give it with "
            "COSLICE_TOKEN or COSLICE_TOKEN_FILE"
        )


def agent_problem(context: Any, node: str, *, tls: bool) -> str:
    """Why the caller may not attach as the agent of ``node``; empty: it may.

    With TLS its certificate must name the node; without, and with tokens, its token.
    """
    if not tls:
        return caller().problem(AGENT, node)
    names = certified_names(context)
    if not names:
        return "an agent shows a certificate: it attaches at the orchestrator's own address for agents"
    if node in names or node in {name.partition(".")[0] for name in names}:
        return ""
    return f"the certificate is for {', '.join(sorted(names))}, not for node {node}: use that node's own"


def certified_names(context: Any) -> set[str]:
    """The names in the caller's certificate, which the CA vouches for; none without one."""
    found: Mapping[str, Any] = context.auth_context() or {}
    keys = ("x509_common_name", "x509_subject_alternative_name")
    return {name.decode("utf-8", "replace") for key in keys for name in found.get(key, ()) if name}


def _refusing(status: grpc.StatusCode, why: str) -> Any:
    async def refuse(_messages: Any, context: Any) -> None:
        await context.abort(status, why)

    return grpc.stream_stream_rpc_method_handler(refuse)


__all__ = [
    "ADMIN",
    "AGENT",
    "ANY",
    "INBAND",
    "JOB",
    "OPEN",
    "Caller",
    "Guard",
    "agent_problem",
    "caller",
    "certified_names",
]
