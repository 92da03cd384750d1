"""The processes of pods, by their cgroups: each container's first process, whose end is the container's."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from coslice.agent.discovery import cgroups, procfs
from coslice.agent.topology.labels import Pod


def uid_of(pid: int) -> str:
    """Of the pod that a process is in; empty: in none, or it has ended."""
    return cgroups.placement(pid).pod


def main_processes(pods: Iterable[Pod], *, proc: Path = procfs.PROC) -> Mapping[str, Mapping[int, int]]:
    """Start times by pid, by uid of the pod; of the containers that run. The agent must see the node's
    processes (``hostPID``)."""
    wanted = {(pod.uid, container) for pod in pods for container in pod.containers}
    oldest: dict[tuple[str, str], tuple[int, int]] = {}
    for entry in os.listdir(proc) if wanted else ():
        if not entry.isdigit():
            continue
        place = cgroups.placement(int(entry), proc=proc)
        key = (place.pod, place.container)
        if key not in wanted or (found := procfs.process(int(entry), proc=proc)) is None:
            continue
        if found.state not in ("Z", "X"):
            oldest[key] = min(oldest.get(key, (found.started, found.pid)), (found.started, found.pid))
    result: dict[str, dict[int, int]] = {}
    for (uid, _), (started, pid) in sorted(oldest.items()):
        result.setdefault(uid, {})[pid] = started
    return result
