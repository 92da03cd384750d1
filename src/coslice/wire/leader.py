"""Finding the leader among several orchestrators: what a standby answers, and whom its caller dials next.

A standby ends every call with ``UNAVAILABLE`` and says in the trailing metadata where the leader is. It is
believed where TLS will show who answers there, and otherwise only if the caller was given that address too.
"""

from collections.abc import Iterable
from typing import Any

from coslice.errors import ConfigError

LEADER = "coslice-leader"
LEADER_FOR_AGENTS = "coslice-leader-agents"


def addresses_of(text: str) -> tuple[str, ...]:
    """``host:port`` or ``unix:path``, or several of them, comma-separated. Raises ``ConfigError``."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in found:
        host, _, port = address.rpartition(":")
        number = port.isascii() and port.isdigit() and int(port) < 65536
        if not address.startswith("unix:") and not (host and number):
            raise ConfigError(f"{address[:80]!r} is no orchestrator address: use host:port")
    if not found:
        raise ConfigError("no orchestrator address was given: use host:port, or several with commas between")
    return found


class Dial:
    """Which address to try. Whoever fails there says so with ``failed`` and tries ``address`` again."""

    def __init__(self, addresses: str, *, encrypted: bool, key: str = LEADER) -> None:
        self._given = addresses_of(addresses)
        self._encrypted, self._key = encrypted, key
        self._next = 0
        self._tried = 0
        self._followed = False
        self.address = self._given[0]

    @property
    def several(self) -> bool:
        return len(self._given) > 1

    def reached(self) -> None:
        """The leader answered. When it is lost afterwards, that is a failure like the others."""
        self._tried, self._followed = 0, False

    def failed(self, trailers: Iterable[Any] | None = None) -> bool:
        """Nobody answered, or a standby did, with these trailing metadata. True: everybody was asked in
        vain; wait before the next attempt."""
        hint = self._hint(trailers)
        if hint and hint != self.address and not self._followed:
            self.address, self._followed = hint, True
            return False
        self._next = (self._next + 1) % len(self._given)
        self.address = self._given[self._next]
        self._tried += 1
        if self._tried < len(self._given):
            return False
        self._tried, self._followed = 0, False
        return True

    def _hint(self, trailers: Iterable[Any] | None) -> str:
        for name, value in trailers or ():
            if name == self._key and (self._encrypted or value in self._given):
                try:
                    return addresses_of(str(value))[0]
                except ConfigError:
                    return ""
        return ""
