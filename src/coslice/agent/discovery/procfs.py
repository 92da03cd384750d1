"""Processes as ``/proc`` shows them: state, parents, environment, namespaces. Reads only.

Functions about a process that has ended return None or nothing; they never raise for it.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

PROC = Path("/proc")


class Process(Struct, frozen=True, kw_only=True):
    pid: int
    group: int
    """Its thread group: differs from ``pid`` if that is the id of a mere thread."""
    parent: int
    state: str
    """One letter of proc_pid_stat(5): R, S, D, T (stopped), t (traced), Z, …"""
    started: int
    """Clock ticks since boot."""
    namespaced: tuple[int, ...]
    """Its pid in every pid namespace, ours first and its own last."""


def process(pid: int, *, proc: Path = PROC) -> Process | None:
    try:
        stat, status = _read(f"{proc}/{pid}/stat"), _read(f"{proc}/{pid}/status")
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold spaces and parentheses
    return Process(
        pid=pid,
        group=_numbers(status, b"\nTgid:", pid)[0],
        parent=int(fields[1]),
        state=fields[0].decode(),
        started=int(fields[19]),
        namespaced=_numbers(status, b"\nNSpid:", pid),
    )


def _numbers(status: bytes, key: bytes, default: int) -> tuple[int, ...]:
    _, found, rest = status.partition(key)
    return tuple(map(int, rest.partition(b"\n")[0].split())) if found else (default,)


def host_pid(pid: int, started: int, *, proc: Path = PROC) -> int | None:
    """The pid here of a process that knows itself as ``pid`` in a pid namespace below ours.

    Start times are the same in all pid namespaces. None if no process, or more than one, fits.
    """
    found = [
        seen.pid
        for entry in os.listdir(proc)
        if entry.isdigit()
        and (seen := process(int(entry), proc=proc)) is not None
        and seen.started == started
        and seen.namespaced[-1] == pid
    ]
    return found[0] if len(found) == 1 else None


def line(pid: int, *, proc: Path = PROC) -> Iterator[int]:
    """The process, its parent, and so on up to the first process of this pid namespace."""
    for _ in range(256):  # a chain is short; the bound is for a /proc that changes while it is read
        if pid <= 0:
            return
        yield pid
        try:
            stat = _read(f"{proc}/{pid}/stat")
        except OSError:
            return
        pid = int(stat[stat.rindex(b")") + 2 :].split()[1])


def environment(pid: int, *, proc: Path = PROC) -> Mapping[str, str]:
    """As it was when the program started (environ in proc_pid_environ(5)); empty if we may not read it."""
    try:
        data = _read(f"{proc}/{pid}/environ")
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if b"=" in entry)
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def has_set(pid: int, name: str, *, proc: Path = PROC) -> bool:
    """Has it this variable in its environment? False if we may not look."""
    try:
        return b"\0" + name.encode() + b"=" in b"\0" + _read(f"{proc}/{pid}/environ")
    except OSError:
        return False


def has_mapped(pid: int, path: str, *, proc: Path = PROC) -> bool:
    """Has it a file mapped whose path begins so? False if we may not look."""
    try:
        return b" " + path.encode() in _read(f"{proc}/{pid}/maps")
    except OSError:
        return False


def sees_every_process(*, proc: Path = PROC) -> bool:
    """Is this the machine's own pid namespace? The kernel fixes its number (``PROC_PID_INIT_INO``)."""
    try:
        return (proc / "self" / "ns" / "pid").stat().st_ino == 0xEFFFFFFC
    except OSError:
        return False


def available_memory(*, proc: Path = PROC) -> int:
    """Bytes that can be had without swapping (``MemAvailable``)."""
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()
