"""One-time tickets: how a process proves to the agent which process it is.

gRPC does not say which process is at the other end of a stream; a unix socket does (SO_PEERCRED, by the
kernel's word). So a process first fetches a ticket from the agent's socket and then shows it when it
registers. A ticket is worth one registration, within seconds, of the very process that fetched it: pid, start
time and user. Nobody can register a process that he does not run in.
"""

import os
import secrets
import time
from collections.abc import Callable

from msgspec import Struct

from coslice.agent.processes import start_time


class Ticket(Struct, frozen=True, kw_only=True):
    pid: int
    """As the agent sees it; a process in a container has another number for itself."""
    started: int
    uid: int
    until: float


class NoTicket(Exception):
    """Why none was given, or why one is worth nothing."""


class Tickets:
    """``lifetime`` in seconds; ``limit``: open tickets at most, for all processes together."""

    def __init__(
        self,
        *,
        uid: int,
        lifetime: float = 30.0,
        limit: int = 4096,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._uid, self._lifetime, self._limit, self._now = uid, lifetime, limit, now
        self._open: dict[str, Ticket] = {}

    def issue(self, pid: int, uid: int) -> str:
        """A ticket for the process at the other end of the socket. Raises ``NoTicket``."""
        if uid != self._uid:
            raise NoTicket(f"process {pid} is user {uid}'s, the agent is user {self._uid}'s: use one user")
        started = start_time(pid) if pid > 0 else None
        if started is None:
            raise NoTicket(
                f"the agent does not see the process that asks (pid {pid}): it has ended, or it is in a "
                "container whose processes the agent's own does not see; start the agent with the host's pids"
            )
        now = self._now()
        self._open = {text: ticket for text, ticket in self._open.items() if ticket.until > now}
        if len(self._open) >= self._limit:
            raise NoTicket(f"{self._limit} tickets are open already: register with one, or wait a moment")
        text = secrets.token_urlsafe(24)
        self._open[text] = Ticket(pid=pid, started=started, uid=uid, until=now + self._lifetime)
        return text

    def redeem(self, text: str) -> Ticket | None:
        """The ticket, once; None: it was used, is too old, is made up, or its process has ended."""
        ticket = self._open.pop(text, None)
        if ticket is None or ticket.until <= self._now() or start_time(ticket.pid) != ticket.started:
            return None
        return ticket


def pids_of(pid: int) -> tuple[int, ...]:
    """The process's numbers, from ours inwards to its own container's (``NSpid``, proc_pid_status(5))."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("NSpid:"):
                    return tuple(int(number) for number in line.split()[1:])
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return (pid,) if os.path.exists(f"/proc/{pid}") else ()
