"""Secrets of clients become fingerprints at the edge: nothing behind it can leak what it does not have.

An incarnation's token and a session's id are what a client proves itself with. Orchestrator and agent hash
them as they arrive; store, journal, status, messages and logs know the fingerprints only.
"""

import hashlib

_DIGITS = 20
"""80 bits: a second token with the same fingerprint cannot be searched for."""


def incarnation(token: str) -> str:
    """``i`` and 20 hexadecimal digits; a caller without a token stays one without."""
    return _of("i", token) if token else ""


def session(secret: str) -> str:
    return _of("s", secret)


def _of(kind: str, secret: str) -> str:
    return kind + hashlib.sha256(f"coslice {kind} {secret}".encode()).hexdigest()[:_DIGITS]
