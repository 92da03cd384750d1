"""What labels say: which groups a node serves, which job a pod is of. The same labels as llm-d's. Pure.

Node ``group.timeslice.io/GROUP: "true"``; pod ``timeslice.io/job-id: JOB`` and ``timeslice.io/group: GROUP``.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from coslice.core.ids import GroupId, JobId, check_name

log = logging.getLogger(__name__)

GROUP_PREFIX = "group.timeslice.io/"
POD_GROUP, POD_JOB = "timeslice.io/group", "timeslice.io/job-id"

Json = Mapping[str, Any]


class Pod(Struct, frozen=True, kw_only=True):
    """A pod of this node that is some job's."""

    uid: str
    name: str
    """``namespace/name``, for people."""
    job: JobId
    group: GroupId
    containers: frozenset[str] = frozenset()
    """Ids of those that run."""


class View(Struct, frozen=True, kw_only=True):
    """What the labels say at one moment."""

    groups: frozenset[GroupId] = frozenset()
    pods: tuple[Pod, ...] = ()
    """By uid."""


def view(node: Json | None, pods: Iterable[Json]) -> View:
    """``node`` None: it was deleted, and serves nothing."""
    found = (pod_of(pod) for pod in pods)
    kept = sorted((pod for pod in found if pod is not None), key=lambda pod: pod.uid)
    return View(groups=frozenset() if node is None else groups_of(node), pods=tuple(kept))


def groups_of(node: Json) -> frozenset[GroupId]:
    names = (key.removeprefix(GROUP_PREFIX) for key, value in _labels(node) if _says_group(key, value))
    return frozenset(GroupId(name) for name in names if _is_name("group", name, "the node"))


def pod_of(pod: Json) -> Pod | None:
    """None: it has no such labels, or has ended."""
    labels, meta, status = dict(_labels(pod)), pod["metadata"], pod.get("status") or {}
    job, group = labels.get(POD_JOB, ""), labels.get(POD_GROUP, "")
    name = f"{meta.get('namespace', '')}/{meta.get('name', '')}"
    if not job or not group or status.get("phase") in ("Succeeded", "Failed"):
        return None
    if not (_is_name("job", job, f"pod {name}") and _is_name("group", group, f"pod {name}")):
        return None
    running = frozenset(
        str(each.get("containerID", "")).rpartition("://")[2]
        for each in status.get("containerStatuses") or ()
        if "running" in (each.get("state") or {})
    )
    return Pod(
        uid=meta["uid"],
        name=name,
        job=JobId(job),
        group=GroupId(group),
        containers=running - frozenset(("",)),
    )


def _says_group(key: str, value: str) -> bool:
    return key.startswith(GROUP_PREFIX) and value == "true"


def _labels(thing: Json) -> Iterable[tuple[str, str]]:
    return (thing["metadata"].get("labels") or {}).items()


def _is_name(kind: str, name: str, whose: str) -> bool:
    try:
        check_name(kind, name)
    except ValueError as error:
        log.warning("a label of %s is ignored: %s", whose, error)
        return False
    return True
