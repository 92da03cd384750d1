"""Which processes make up an engine, and which of them listens on its port: from ``/proc`` alone.

An engine is the process that answers on its port and everything below it: API servers fork their engine cores
and workers. Used where an engine registers and by the agent, which calls no address that is not the engine's
own. Knows no engine and sends nothing.
"""

import os
from collections.abc import Callable, Collection

_LISTEN = "0A"
"""TCP state of a listening socket in ``/proc/net/tcp`` (Linux, include/net/tcp_states.h)."""


def tree(pid: int) -> tuple[int, ...]:
    """``pid`` and all its descendants that live now, parents first; empty if it has ended."""
    if _parent(pid) is None:
        return ()
    below = _children if os.path.exists(f"/proc/{pid}/task/{pid}/children") else _looked_up()
    found = [pid]
    for each in found:  # grows while we walk it
        found += [child for child in sorted(below(each)) if _parent(child) is not None]
    return tuple(found)


def _children(pid: int) -> list[int]:
    """By the kernel's own lists (proc_pid_task(5)), which almost every kernel has."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except OSError:  # it has ended meanwhile
        pass
    return found


def _looked_up() -> Callable[[int], list[int]]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent(int(name))) is not None:
            children.setdefault(parent, []).append(int(name))
    return lambda pid: children.get(pid, [])


def listens(pids: Collection[int], port: int) -> bool | None:
    """Does one of these processes listen on this TCP port? None: the system does not let us look."""
    unseen = False
    for pid in pids:
        try:
            inodes = _listening(pid, port)
            if inodes and any(_socket(pid, fd) in inodes for fd in os.listdir(f"/proc/{pid}/fd")):
                return True
        except PermissionError:
            unseen = True
        except OSError:  # it has ended
            continue
    return None if unseen else False


def listener(port: int) -> int | None:
    """The process of this user that listens on the port; the eldest, if forked workers share the socket."""
    try:
        if not _listening(os.getpid(), port):
            return None
    except OSError:
        return None
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        if listens((pid,), port):
            return pid
    return None


def started(pid: int) -> int | None:
    """Start time in clock ticks since boot (proc_pid_stat(5)); None: no such process, or a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[1])


def _stat(pid: int) -> list[str] | None:
    """From field 3 on: what precedes is the name, which may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _listening(pid: int, port: int) -> set[str]:
    """Inodes of the sockets that listen on the port in the network namespace of ``pid``."""
    inodes = set[str]()
    for family in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{pid}/net/{family}") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except FileNotFoundError:  # no IPv6
            continue
        inodes |= {row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port}
    return inodes


def _socket(pid: int, fd: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}").removeprefix("socket:[").removesuffix("]")
    except OSError:
        return ""
