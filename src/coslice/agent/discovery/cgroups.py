"""Which container and pod a process is in, by ``/proc/PID/cgroup``; and how much memory its cgroup leaves.

Ids are taken from whole path components and compared for equality: a pod whose UID begins like another's is
another pod. Knows cgroups v1, v2 and the hybrid of both, and the names that systemd and cgroupfs drivers
give.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

_CONTAINER = re.compile(
    r"^(?:(?:docker|cri-containerd|containerd|crio|libpod|nerdctl)-)?([0-9a-f]{64})(?:\.scope)?$"
)
"""``<id>`` (cgroupfs), ``cri-containerd-<id>.scope`` (systemd). crio's monitor, ``crio-conmon-``, is none."""
_POD = re.compile(
    r"^(?:kubepods(?:-burstable|-besteffort)?-)?pod"
    r"([0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12})(?:\.slice)?$"
)
_UNLIMITED = 1 << 60
"""v1 writes "no limit" as the largest number of pages."""


class Placement(Struct, frozen=True, kw_only=True):
    """Empty where there is none."""

    pod: str = ""
    """UID in its usual form, with dashes."""
    container: str = ""


def placement_of(text: str) -> Placement:
    """From the content of ``/proc/PID/cgroup`` (cgroups(7)): the deepest container and pod on any line."""
    pod = container = ""
    for _, path in _paths(text):
        for part in path.split("/"):
            for piece in part.split(":"):  # containerd's systemd form without a driver is slice:prefix:id
                if found := _CONTAINER.match(piece):
                    container = found[1]
            if found := _POD.match(part):
                pod = _dashed(found[1])
    return Placement(pod=pod, container=container)


def placement(pid: int, *, proc: Path = Path("/proc")) -> Placement:
    """Of a process that has ended: nothing."""
    return placement_of(groups_of(pid, proc=proc))


def groups_of(pid: int, *, proc: Path = Path("/proc")) -> str:
    """The process's cgroups, as the kernel writes them; empty if it has ended."""
    try:
        return (proc / str(pid) / "cgroup").read_text()
    except OSError:
        return ""


def memory_left(text: str, *, sys: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that these cgroups and those above them still allow; None: no limit is known."""
    left = [room for folder, names in _memory_folders(text, sys) for room in _rooms(folder, names, sys)]
    return max(0, min(left)) if left else None


def frozen(text: str, *, sys: Path = Path("/sys/fs/cgroup")) -> bool:
    """Are the processes of these cgroups stopped by a freezer (v1 or v2), their own or one above?"""
    for controllers, path in _paths(text):
        if "freezer" in controllers:
            folders = _upwards(f"{sys}/freezer{path}", sys)
            if any(_read(f"{folder}/freezer.state") in ("FROZEN", "FREEZING") for folder in folders):
                return True
        elif not controllers:
            folders = _upwards(f"{_unified(sys)}{path}", sys)
            if any(_read(f"{folder}/cgroup.freeze") == "1" for folder in folders):
                return True
    return False


def _paths(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            yield tuple(filter(None, fields[1].split(","))), fields[2]


def _memory_folders(text: str, sys: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    for controllers, path in _paths(text):
        if "memory" in controllers:
            yield f"{sys}/memory{path}", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif not controllers:
            yield f"{_unified(sys)}{path}", ("memory.max", "memory.current")


def _rooms(folder: str, names: tuple[str, str], sys: Path) -> Iterator[int]:
    for each in _upwards(folder, sys):
        limit = _read(f"{each}/{names[0]}")
        if limit.isdigit() and int(limit) < _UNLIMITED:
            yield int(limit) - int(_read(f"{each}/{names[1]}") or 0)


def _unified(sys: Path) -> Path:
    """Where the v2 tree is: by itself, or beside v1 in ``unified``."""
    hybrid = sys / "unified"
    return hybrid if hybrid.is_dir() else sys


def _upwards(folder: str, root: Path) -> Iterator[str]:
    """The folder and those above it, below the root."""
    while len(folder) > len(str(root)):
        yield folder
        folder = folder.rpartition("/")[0]


def _read(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode().strip()
    except OSError:
        return ""


def _dashed(uid: str) -> str:
    digits = uid.replace("-", "").replace("_", "")
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
