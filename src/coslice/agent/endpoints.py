"""Addresses of engines: how they are written, and which of them this agent may call.

An agent that posts to any address its callers name is a proxy into the node's network. So: ``http`` or
``https``; this machine's loopback unless the operator allowed the very ``host:port``; no credentials in it.
That the port belongs to the registered processes is checked where it is called. Calls nobody itself.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from msgspec import Struct

from coslice.errors import ConfigError
from coslice.security.addresses import is_loopback

EXAMPLE = "write it as http://127.0.0.1:8000"


class Endpoint(Struct, frozen=True, kw_only=True):
    """Where an engine answers. ``base``: scheme, host, port and path, without a slash at the end."""

    base: str
    host: str
    port: int

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)


def parse_endpoint(text: str) -> Endpoint:
    """Raises ``ConfigError``, which never repeats a password."""
    try:
        url = urlsplit(text.strip())
        port = url.port
    except ValueError:
        raise ConfigError(f"an engine's address cannot be read: {EXAMPLE}") from None
    if url.username is not None or url.password is not None:
        raise ConfigError(
            f"the address of the engine at {url.hostname} has credentials in it, and addresses are logged: "
            "leave them out (an API key is read from VLLM_API_KEY of the engine's own environment)"
        )
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{text!r} is not an engine's address: {EXAMPLE}")
    if url.query or url.fragment:
        raise ConfigError(f"{text!r} has a query or fragment, the address of an engine has none: {EXAMPLE}")
    port = port or (443 if url.scheme == "https" else 80)
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return Endpoint(base=f"{url.scheme}://{host}:{port}{url.path.rstrip('/')}", host=url.hostname, port=port)


def allowed_endpoint(text: str, *, allow: Sequence[str] = ()) -> Endpoint:
    """The endpoint, if it is on loopback or its ``host:port`` is in ``allow``; raises ``ConfigError``."""
    endpoint = parse_endpoint(text)
    name = f"{endpoint.host}:{endpoint.port}"
    if endpoint.loopback or name in allow:
        return endpoint
    raise ConfigError(
        f"the agent calls engines on its own loopback only, not {name}: use "
        f"http://127.0.0.1:{endpoint.port}, or let the operator of the agent allow {name}"
    )
