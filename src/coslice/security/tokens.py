"""Tokens: what a job, an agent, a reader or an administrator shows, made and checked with one secret file.

``coslice1.PAYLOAD.MAC``: the payload is JSON (role, name, expiry), the MAC is HMAC-SHA256 over it with the
secret's first key; every key of the file is accepted, so a key can be replaced without a gap. Nothing is
stored of a token; to revoke all of a key's tokens, take the key out of the file.
"""

import base64
import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from coslice.errors import ConfigError
from coslice.security.files import read_secret, write_secret

PREFIX = "coslice1"
JOB, AGENT, READ, ADMIN = "job", "agent", "read", "admin"
ROLES = (JOB, AGENT, READ, ADMIN)
_KEY_BYTES = 32
_TOKEN_MAX = 2048


class InvalidToken(Exception):
    """Why a token is worth nothing. The text never repeats it."""


@dataclass(frozen=True)
class Claims:
    role: str
    name: str
    """Of the job or node it is for; empty for readers and administrators."""
    expires: float
    """Seconds since the epoch."""


def create_secret(path: str | Path) -> None:
    """A new secret file, mode 0600. Raises ``ConfigError`` if there is one already."""
    write_secret(path, secrets.token_hex(_KEY_BYTES).encode() + b"\n")


def read_keys(path: str | Path) -> tuple[bytes, ...]:
    """The keys of a secret file, one a line in hexadecimal. Raises ``ConfigError``."""
    keys = []
    for line in read_secret(path, "token secret").split():
        try:
            key = bytes.fromhex(line.decode("ascii"))
        except ValueError:
            key = b""
        if len(key) < _KEY_BYTES:
            raise ConfigError(
                f"{path} is no token secret: each line is a key of at least {2 * _KEY_BYTES} hexadecimal "
                "digits; make one with `coslice token secret FILE`"
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"{path} holds no key: make one with `coslice token secret FILE`")
    return tuple(keys)


def mint(key: bytes, *, role: str, name: str, expires: float) -> str:
    claims = {"role": role, "name": name, "exp": int(expires), "id": secrets.token_hex(4)}
    payload = _encode(json.dumps(claims, separators=(",", ":")).encode())
    return f"{PREFIX}.{payload}.{_encode(_mac(key, payload))}"


def verify(keys: tuple[bytes, ...], token: str, *, now: float) -> Claims:
    """What the token says. Raises ``InvalidToken``."""
    if len(token) > _TOKEN_MAX:
        raise InvalidToken("it is too long to be a token of coslice")
    prefix, _, rest = token.partition(".")
    payload, _, mac = rest.partition(".")
    if prefix != PREFIX or not payload or not mac:
        raise InvalidToken("it is not a token of coslice")
    shown = mac.encode()  # compared as text: one spelling, and no other, is right
    if not any(hmac.compare_digest(_encode(_mac(key, payload)).encode(), shown) for key in keys):
        raise InvalidToken("it was not made with this secret, or it was changed")
    claims = json.loads(_decode(payload))
    if claims["exp"] <= now:
        raise InvalidToken("it has expired: make another with `coslice token create`")
    return Claims(role=claims["role"], name=claims["name"], expires=float(claims["exp"]))


def _mac(key: bytes, payload: str) -> bytes:
    return hmac.new(key, f"{PREFIX}.{payload}".encode(), hashlib.sha256).digest()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
