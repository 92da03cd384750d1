"""State as bytes: JSON with the kind of machine and its schema version, so that old state is upgraded, not
guessed.

A state written by a newer coslice is refused by name; one of another kind too.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from coslice.errors import ConfigError

S = TypeVar("S")
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


class _Envelope(msgspec.Struct, frozen=True):
    kind: str
    schema: int
    state: msgspec.Raw


class Codec(Generic[S]):
    """``upgrades[n]`` turns the plain form of schema ``n`` into that of ``n + 1``."""

    def __init__(
        self, type_: type[S], *, kind: str, schema: int = 1, upgrades: Mapping[int, Upgrade] | None = None
    ) -> None:
        self.kind, self.schema = kind, schema
        self._type = type_
        self._upgrades = dict(upgrades or {})
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(type_)
        empty = self._encoder.encode(_Envelope(kind, schema, msgspec.Raw(b"")))
        self._head = empty[:-1]  # every state is written in between
        self._envelope = msgspec.json.Decoder(_Envelope)

    def encode(self, state: S) -> bytes:
        return self._head + self._encoder.encode(state) + b"}"

    def decode(self, data: bytes) -> S:
        """Raises ``ConfigError`` if the bytes are not a state of this kind that this version understands."""
        try:
            envelope = self._envelope.decode(data)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"not a saved state: {error}") from error
        if envelope.kind != self.kind:
            raise ConfigError(f"this is the saved state of a {envelope.kind!r}, not of a {self.kind!r}")
        if envelope.schema > self.schema:
            raise ConfigError(
                f"the saved state of this {self.kind} has schema {envelope.schema} and this coslice "
                f"knows up to {self.schema}: use the newer coslice that wrote it"
            )
        try:
            if envelope.schema == self.schema:
                return self._decoder.decode(envelope.state)
            return self._upgrade(envelope)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"the saved state of this {self.kind} is damaged: {error}") from error

    def _upgrade(self, envelope: _Envelope) -> S:
        plain: dict[str, Any] = msgspec.json.decode(envelope.state)
        for schema in range(envelope.schema, self.schema):
            if schema not in self._upgrades:
                raise ConfigError(f"no way from schema {schema} of a saved {self.kind} to {schema + 1}")
            plain = self._upgrades[schema](plain)
        return msgspec.convert(plain, self._type)
