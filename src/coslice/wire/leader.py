"""Finding the leader among several orchestrators: what a standby answers, and whom its caller dials next.

A standby ends every call with ``UNAVAILABLE`` and says in the trailing metadata where the leader is. It is
believed where TLS will show who answers there, and otherwise only if the caller was given that address too.
"""

from collections.abc import Iterable
from typing import Any

from coslice.errors import ConfigError

LEADER = "coslice-leader"
LEADER_FOR_AGENTS = "coslice-leader-agents"
LEADER_ID = "coslice-leader-id"
SILENT = "coslice-silent-leader"
"""Of a caller: the id of a leader that does not answer."""
STANDS_BY = "this orchestrator stands by"
"""How the details of a standby's answer begin."""
FOLLOWS = 3
"""Hints in a row, before the other addresses are tried."""


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
    """Which address to try. Whoever fails there says so with ``failed`` and tries ``address`` again, showing
    ``metadata``."""

    def __init__(self, addresses: str, *, encrypted: bool, key: str = LEADER) -> None:
        self._given = addresses_of(addresses)
        self._encrypted, self._key = encrypted, key
        self._next = self._failed = self._followed = 0
        self._silent = ""
        """The id of a leader that did not answer."""
        self._vain: set[str] = set()
        """Addresses that did not answer in this round."""
        self._lost = False
        self.address = self._given[0]

    @property
    def several(self) -> bool:
        return len(self._given) > 1

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For a stream: a standby that is shown it answers once it knows of another leader."""
        return ((SILENT, self._silent),) if self._silent else ()

    def reached(self) -> None:
        """The leader answered. When it is lost afterwards another one is asked first, if there is one: that
        knows whether the leader is still there."""
        self._begin_round()
        self._silent, self._lost = "", True

    def failed(self, trailers: Iterable[Any] | None = None) -> bool:
        """Nobody answered, or a standby did, with these trailing metadata. True: everybody was asked in
        vain; wait before the next attempt."""
        if self._lost:
            self._lost = False
            if self.address in self._given:
                self._next = self._given.index(self.address)
            self._turn()
            return True
        address, leader = self._told(trailers)
        if address == self.address and self._followed < FOLLOWS:  # elected while we waited there
            self._followed += 1
            return False
        if not address:
            self._vain.add(self.address)
        if address in self._vain:
            self._silent = "" if leader == self._silent else leader  # later once more
        elif address and self._followed < FOLLOWS:
            self._followed += 1
            self.address = address
            return False
        self._turn()
        self._failed += 1
        if self._failed < len(self._given):
            return False
        self._begin_round()
        return True

    def _turn(self) -> None:
        self._next = (self._next + 1) % len(self._given)
        self.address = self._given[self._next]

    def _begin_round(self) -> None:
        self._failed = self._followed = 0
        self._vain = set()

    def _told(self, trailers: Iterable[Any] | None) -> tuple[str, str]:
        """Address and id of the leader; empty if nobody said, or is not believed."""
        told = {str(name): str(value) for name, value in trailers or ()}
        address = told.get(self._key, "")
        if not address or not (self._encrypted or address in self._given):
            return "", ""
        try:
            return addresses_of(address)[0], told.get(LEADER_ID, "")
        except ConfigError:
            return "", ""
