"""Which process is at the other end of a TCP connection on this machine, by the kernel's own tables.

Callers of the upstream protocol show no ticket, so this is how the agent learns who they are. A connection
has two rows in ``/proc/net/tcp*``, one for each end; the peer's names its user and its socket, and the
processes that have this socket open are found below ``/proc/PID/fd``. Reads only; answers are exact or there
is none. A proxy in between is the process that is found: nobody can see through it.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import unquote

from msgspec import Struct

from coslice.agent.discovery import procfs
from coslice.agent.processes import start_time

_ESTABLISHED = "01"
"""TCP state in ``/proc/net/tcp`` (Linux, include/net/tcp_states.h)."""

Address = IPv4Address | IPv6Address


class Unidentified(Exception):
    """Why the process at the other end is not known."""


class Peer(Struct, frozen=True, kw_only=True):
    pid: int
    started: int
    """Clock ticks since boot."""


def user_of(peer: str, port: int) -> int:
    """The user whose socket is connected to our ``port``. ``peer`` as gRPC writes it (``ipv4:HOST:PORT``).

    Raises ``Unidentified``."""
    return _row(peer, port)[0]


def process_of(peer: str, port: int) -> Peer:
    """The process that is connected to our ``port``; of several that share the socket, the one that the
    others descend from. Raises ``Unidentified``."""
    user, inode = _row(peer, port)
    holders = sorted(_holders(inode))
    if not holders:
        raise Unidentified(
            f"no process that this agent may look into has the connection from {peer} (user {user}): "
            "run agent and workload as one user, and the agent with the host's process ids"
        )
    eldest = [pid for pid in holders if all(pid in procfs.line(other) for other in holders)]
    if len(eldest) != 1:
        shared = ", ".join(map(str, holders))
        raise Unidentified(f"unrelated processes share the connection from {peer}: {shared}")
    started = start_time(eldest[0])
    if started is None or _row(peer, port)[1] != inode:  # looked at again: a pid alone names nothing
        raise Unidentified(f"the process that connected from {peer} has ended")
    return Peer(pid=eldest[0], started=started)


def _row(peer: str, port: int) -> tuple[int, str]:
    """User and inode of the peer's end."""
    address, peer_port = _parse(peer)
    for local, remote, state, user, inode in _connections():
        if state == _ESTABLISHED and local == (address, peer_port) and remote[1] == port:
            return user, inode
    raise Unidentified(
        f"the connection from {peer} does not begin in this agent's network namespace: connect over loopback "
        "on the agent's own node, without a proxy in between"
    )


def _parse(peer: str) -> tuple[Address, int]:
    """``ipv4:127.0.0.1:5001`` or ``ipv6:[::1]:5001``, percent-encoded."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        raise Unidentified(f"{peer!r} is no TCP address")
    try:
        return _plain(ip_address(host.strip("[]"))), int(port)
    except ValueError:
        raise Unidentified(f"{peer!r} is no TCP address") from None


def _plain(address: Address) -> Address:
    """gRPC speaks IPv4 through IPv6 sockets: one form for both."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _connections() -> Iterator[tuple[tuple[Address, int], tuple[Address, int], str, int, str]]:
    for family in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{family}") as file:
                rows = file.readlines()[1:]
        except FileNotFoundError:  # no IPv6
            continue
        for row in rows:
            fields = row.split()
            yield _end(fields[1]), _end(fields[2]), fields[3], int(fields[7]), fields[9]


def _end(text: str) -> tuple[Address, int]:
    """``0100007F:1F90``: words of 32 bits in the machine's own byte order, then the port."""
    host, _, port = text.partition(":")
    raw = bytes.fromhex(host)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return _plain(ip_address(raw)), int(port, 16)


def _holders(inode: str) -> Iterator[int]:
    wanted = f"socket:[{inode}]"
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError):  # another's, or it has ended
            if any(_link(name, fd) == wanted for fd in os.listdir(f"/proc/{name}/fd")):
                yield int(name)


def _link(pid: str, fd: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:  # closed meanwhile
        return ""
