"""A Kubernetes API with behaviour, without a cluster: what clients get wrong about the real one, it does.

Every object has uid and resourceVersion; an update or delete of a stale one is a 409; lists take label and
field selectors and pages; watches go on from a resourceVersion, send bookmarks, and end with 410 when that
version was compacted away. ``Cluster`` is the state; ``FakeKubernetes`` serves it over HTTP. Knows no
schemas: any resource under any group is stored as it is sent.
https://kubernetes.io/docs/reference/using-api/api-concepts/
"""

import copy
import json
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

Object = dict[str, Any]
Where = tuple[str, str, str]
"""API group and version (``v1``, ``apps/v1``), plural, namespace ("" for none)."""
MAX_CONFIG_MAP = 1 << 20


class ApiError(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def status(self) -> Object:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": self.code,
            "reason": self.reason,
            "message": str(self),
        }


class Event(Struct, frozen=True):
    version: int
    type: str
    where: Where
    object: Object
    before: Object | None = None


class Cluster:
    """Thread-safe. Everything returned is a copy."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._objects: dict[tuple[Where, str], Object] = {}
        self._version = 1
        self._history: list[Event] = []
        self._compacted = 0
        self._watchers: set[queue.SimpleQueue[Event | None]] = set()
        self.writes = 0

    # ── verbs ──────────────────────────────────────────────────────────────

    def get(self, where: Where, name: str) -> Object:
        with self._lock:
            return copy.deepcopy(self._there(where, name))

    def list(self, where: Where, labels: str = "", fields: str = "") -> tuple[list[Object], int]:
        """In the order of namespaces and names, with the version they are as of. An empty namespace: all."""
        wanted = selector(labels, fields)
        with self._lock:
            found = [
                copy.deepcopy(thing)
                for (at, _), thing in sorted(self._objects.items(), key=lambda item: item[0])
                if _matches(at, where) and wanted(thing)
            ]
            return found, self._version

    def create(self, where: Where, thing: Object) -> Object:
        with self._lock:
            meta = thing.setdefault("metadata", {})
            if not meta.get("name") and meta.get("generateName"):
                meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
            name = str(meta.get("name", ""))
            if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name):
                raise ApiError(422, "Invalid", f"metadata.name: Invalid value: {name!r}")
            if (where, name) in self._objects:
                raise ApiError(409, "AlreadyExists", f"{where[1]} {name!r} already exists")
            if where[2]:
                meta["namespace"] = where[2]
            meta["uid"] = str(uuid.uuid4())
            meta["creationTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            return self._put(where, name, thing, None)

    def replace(self, where: Where, name: str, thing: Object) -> Object:
        with self._lock:
            there = self._there(where, name)
            meta = thing.setdefault("metadata", {})
            given = meta.get("resourceVersion")
            if given and given != there["metadata"]["resourceVersion"]:
                raise ApiError(
                    409,
                    "Conflict",
                    f"Operation cannot be fulfilled on {where[1]} {name!r}: the object has been modified",
                )
            for kept in ("uid", "creationTimestamp", "name", "namespace"):
                if kept in there["metadata"]:
                    meta[kept] = there["metadata"][kept]
            if _content(thing) == _content(there):
                return copy.deepcopy(there)  # nothing changes, not even the version
            return self._put(where, name, thing, there)

    def patch(self, where: Where, name: str, changes: Object) -> Object:
        """A JSON merge patch."""
        with self._lock:
            there = self._there(where, name)
            return self.replace(where, name, _merged(copy.deepcopy(there), changes))

    def delete(self, where: Where, name: str, preconditions: Object | None = None) -> Object:
        with self._lock:
            there = self._there(where, name)
            for key, value in (preconditions or {}).items():
                if value and there["metadata"].get(key) != value:
                    raise ApiError(409, "Conflict", f"the {key} in the precondition ({value}) is not current")
            del self._objects[(where, name)]
            self._version += 1
            gone = copy.deepcopy(there)
            gone["metadata"]["resourceVersion"] = str(self._version)
            self._tell(Event(self._version, "DELETED", where, gone, there))
            return gone

    # ── watching ───────────────────────────────────────────────────────────

    def watch(
        self,
        where: Where,
        since: str,
        *,
        labels: str = "",
        fields: str = "",
        bookmarks: bool = False,
        bookmark_s: float = 1.0,
        timeout_s: float = 300.0,
    ) -> Iterator[Object]:
        """Events after the version ``since``, as they come. Ends after ``timeout_s`` or ``drop_watches``."""
        wanted = selector(labels, fields)
        news: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        with self._lock:
            start = int(since) if since.isdigit() else self._version
            if start < self._compacted:
                gone = ApiError(410, "Expired", f"too old resource version: {since} ({self._compacted})")
                yield {"type": "ERROR", "object": gone.status()}
                return
            backlog = [event for event in self._history if event.version > start]
            self._watchers.add(news)
        deadline = time.monotonic() + timeout_s
        try:
            for event in backlog:
                yield from _seen(event, where, wanted)
            while (left := deadline - time.monotonic()) > 0:
                try:
                    told = news.get(timeout=min(left, bookmark_s))
                except queue.Empty:
                    if bookmarks:
                        yield self._bookmark(where)
                    continue
                if told is None:
                    return
                yield from _seen(told, where, wanted)
        finally:
            with self._lock:
                self._watchers.discard(news)

    def compact(self) -> None:
        """Forget the history: a watch from before gets 410."""
        with self._lock:
            self._history.clear()
            self._compacted = self._version

    def drop_watches(self) -> None:
        with self._lock:
            for watcher in self._watchers:
                watcher.put(None)

    # ── details ────────────────────────────────────────────────────────────

    def _there(self, where: Where, name: str) -> Object:
        found = self._objects.get((where, name))
        if found is None:
            raise ApiError(404, "NotFound", f"{where[1]} {name!r} not found")
        return found

    def _put(self, where: Where, name: str, thing: Object, before: Object | None) -> Object:
        if where[1] == "configmaps":
            size = sum(len(v) for v in (thing.get("data") or {}).values())
            size += sum(len(v) * 3 // 4 for v in (thing.get("binaryData") or {}).values())
            if size > MAX_CONFIG_MAP:
                raise ApiError(422, "Invalid", f"[]: Too long: must have at most {MAX_CONFIG_MAP} bytes")
        self._version += 1
        self.writes += 1
        thing = copy.deepcopy(thing)
        thing["metadata"]["resourceVersion"] = str(self._version)
        self._objects[(where, name)] = thing
        kind = "ADDED" if before is None else "MODIFIED"
        self._tell(Event(self._version, kind, where, copy.deepcopy(thing), before))
        return copy.deepcopy(thing)

    def _tell(self, event: Event) -> None:
        self._history.append(event)
        for watcher in self._watchers:
            watcher.put(event)

    def _bookmark(self, where: Where) -> Object:
        with self._lock:
            version = {"metadata": {"resourceVersion": str(self._version)}, "apiVersion": where[0]}
            return {"type": "BOOKMARK", "object": version}


def _matches(at: Where, where: Where) -> bool:
    return at[:2] == where[:2] and (not where[2] or at[2] == where[2])


def _content(thing: Object) -> Object:
    meta = {key: value for key, value in thing["metadata"].items() if key != "resourceVersion"}
    return {**thing, "metadata": meta}


def _merged(there: Any, changes: Any) -> Any:
    if not isinstance(changes, dict):
        return changes
    result = there if isinstance(there, dict) else {}
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result


def _seen(event: Event, where: Where, wanted: Callable[[Object], bool]) -> Iterator[Object]:
    """What a watch with a selector sees: an object that begins to match is added, one that ceases is
    deleted."""
    if not _matches(event.where, where):
        return
    is_now = event.type != "DELETED" and wanted(event.object)
    was = event.before is not None and wanted(event.before)
    if not (is_now or was):
        return
    kind = "MODIFIED" if is_now and was else "ADDED" if is_now else "DELETED"
    yield {"type": kind, "object": copy.deepcopy(event.object)}


# ── selectors ──────────────────────────────────────────────────────────────

_SET = re.compile(r"^\s*([^\s!=,()]+)\s+(in|notin)\s+\(([^)]*)\)\s*$")


def selector(labels: str, fields: str) -> Callable[[Object], bool]:
    tests = [_label(part) for part in re.split(r",(?![^(]*\))", labels) if part.strip()]
    tests += [_field(part) for part in fields.split(",") if part.strip()]
    return lambda thing: all(test(thing) for test in tests)


def _label(part: str) -> Callable[[Object], bool]:
    def of(thing: Object) -> dict[str, str]:
        return thing["metadata"].get("labels") or {}

    if found := _SET.match(part):
        key, word, listed = found[1], found[2], {value.strip() for value in found[3].split(",")}
        if word == "in":
            return lambda thing: of(thing).get(key) in listed
        return lambda thing: of(thing).get(key) not in listed
    key, sign, value = (
        (piece.strip() for piece in re.split(r"(!=|==|=)|$", part.strip() + " ", maxsplit=1)[:3])
        if "=" in part
        else (part.strip(), "", "")
    )
    if sign == "!=":
        return lambda thing: of(thing).get(key) != value
    if sign:
        return lambda thing: of(thing).get(key) == value
    if key.startswith("!"):
        return lambda thing: key[1:] not in of(thing)
    return lambda thing: key in of(thing)


def _field(part: str) -> Callable[[Object], bool]:
    path, sign, value = re.split(r"(!=|==|=)", part.strip(), maxsplit=1)

    def reach(thing: Object) -> str:
        found: Any = thing
        for step in path.split("."):
            found = found.get(step, {}) if isinstance(found, dict) else {}
        return "" if found == {} else str(found)

    return lambda thing: (reach(thing) == value) is (sign != "!=")


def dumps(thing: object) -> bytes:
    return json.dumps(thing).encode()
