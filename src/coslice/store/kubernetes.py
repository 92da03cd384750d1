"""State in the Kubernetes API: a ConfigMap for each value, written only at the resourceVersion that we know.

There is no transaction over several objects, so the leader is fenced object by object. Every object carries
the *term* of who wrote it last. Whoever is elected writes its own term into all of them before it serves
(``load``); from then on the resourceVersions that its predecessor knows are stale, and each of its writes is
a 409. A *new* object has no version to be stale: so after creating one the leader asks whether the Lease is
still its own, and acts only then. If it is not, the object counts for nothing: the Lease remembers the last
term that was taken over completely, and what carries an older one is removed by the next leader.

Who changes only labels or annotations (an admission webhook, a person) does not stand in the way: a 409 on an
object whose content is what we know is tried again at its new version. ConfigMaps hold at most 1 MiB each.
"""

import asyncio
import base64
import hashlib
import re
from collections import defaultdict
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import msgspec

from coslice.store.again import answered, pauses
from coslice.store.base import Conflict, NoAnswer, StoreError
from coslice.store.election import Deposed, Tenure
from coslice.store.kube_api import CONFIG_MAPS, Expired, Json, KubeApi, Missing, Stale

Entries = dict[str, tuple[bytes, int]]
T = TypeVar("T")

LABEL = "coslice-store"
_AT_ONCE = 16
_PAGE = "200"


class Fence(Protocol):
    """The election that a store rests on."""

    tenure: Tenure
    floor: int
    """Objects of older terms count for nothing."""

    async def confirm(self) -> None:
        """Returns if this process led at a moment after the call began; else raises ``Deposed``."""
        ...

    async def taken_over(self) -> None:
        """From now on nothing of an older term counts."""
        ...


class _Thing(msgspec.Struct, frozen=True):
    """One object. ``writes`` counts: an update without a change would get no new version. ``version`` is what
    the caller knows it by; ``at`` its resourceVersion now."""

    key: str
    value: bytes
    term: int
    writes: int
    version: int
    at: str


class KubernetesStore:
    """See ``Store``. ``fence`` None: no election, compare-and-swap alone; what is older than the term
    ``floor`` does not count then either, and silence of ``patience`` seconds is ``NoAnswer``."""

    def __init__(
        self, api: KubeApi, *, fence: Fence | None = None, floor: int = 0, patience: float = 30.0
    ) -> None:
        self._api, self._fence, self._floor, self._patience = api, fence, floor, patience
        self._prefix = api.location.prefix
        self._known: dict[str, _Thing] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._open = self._closed = False

    async def load(self) -> Entries:
        self._check_open()
        await self._settled()
        while True:
            with suppress(Expired):
                found = await self._list()
                break
        if self._fence is not None:
            found = await self._take_over(self._fence, found)
        found = [thing for thing in found if thing.term >= self._floor]
        self._known = {thing.key: thing for thing in found}
        self._open = True
        return {key: (thing.value, thing.version) for key, thing in sorted(self._known.items())}

    async def save(self, key: str, value: bytes, *, expect: int) -> int:
        return await self._put(self._save(key, bytes(value), expect))

    async def delete(self, key: str, *, expect: int) -> None:
        await self._put(self._delete(key, expect))

    async def close(self) -> None:
        self._closed = True
        await self._settled()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")

    async def _settled(self) -> None:
        """What was accepted is done."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _put(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """A write goes on when its caller is cancelled."""
        if self._closed or not self._open:
            work.close()
            self._check_open()
            raise StoreError("the store is not open: call load() first")
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    def _pauses(self) -> Iterator[float]:
        """For as long as another try makes sense."""
        until = asyncio.get_running_loop().time() + self._patience
        for pause in pauses():
            if self._fence is not None:
                self._fence.tenure.check()
            elif asyncio.get_running_loop().time() > until:
                raise NoAnswer(f"the Kubernetes API took no write for {self._patience:g} s")
            yield pause

    @property
    def _term(self) -> int:
        return self._fence.tenure.term if self._fence is not None else 0

    # ── reading ────────────────────────────────────────────────────────────

    async def _list(self) -> list[_Thing]:
        found: list[_Thing] = []
        tenure = self._fence.tenure if self._fence is not None else None
        query = {"labelSelector": f"{LABEL}={self._prefix}", "limit": _PAGE}
        while True:
            page = await answered(lambda: self._api.list(CONFIG_MAPS, **query), tenure, self._patience)
            found += [_thing(item) for item in page["items"]]
            query["continue"] = page.get("metadata", {}).get("continue", "")
            if not query["continue"]:
                return found

    async def _there(self, key: str) -> _Thing | None:
        for pause in self._pauses():
            try:
                thing = _thing(await self._api.get(CONFIG_MAPS, self._name(key)))
            except Missing:
                return None
            except NoAnswer:
                await asyncio.sleep(pause)
                continue
            if self._fence is not None and thing.term > self._term:
                self._fence.tenure.end("another orchestrator was elected")
                raise Deposed("refused: another orchestrator took this over")
            return thing
        raise AssertionError("the pauses go on until they raise")

    # ── taking over ────────────────────────────────────────────────────────

    async def _take_over(self, fence: Fence, found: list[_Thing]) -> list[_Thing]:
        """Write our term into everything that counts, so that nobody before us can write it any more."""
        await asyncio.gather(*(self._discard(thing) for thing in found if thing.term < fence.floor))
        ours = [thing for thing in found if thing.term >= fence.floor]
        taken = await asyncio.gather(*(self._take(thing) for thing in ours))
        await fence.taken_over()
        return [thing for thing in taken if thing is not None]

    async def _take(self, thing: _Thing) -> _Thing | None:
        """A last write of the predecessor may come in between: then that is what we take over."""
        there: _Thing | None = thing
        async with self._room:
            for pause in self._pauses():
                if there is None or there.term == self._term:
                    return there
                if there.term > self._term:
                    assert self._fence is not None
                    self._fence.tenure.end("another orchestrator was elected")
                    continue
                try:
                    body = self._body(there.key, there.value, there)
                    return _thing(await self._api.replace(CONFIG_MAPS, body))
                except (Stale, Missing, NoAnswer):
                    await asyncio.sleep(pause)
                    there = await self._there(thing.key)
        raise AssertionError("the pauses go on until they raise")

    async def _discard(self, thing: _Thing) -> None:
        """Left by one who was deposed while it created it. If this fails the next leader does it."""
        async with self._room:
            with suppress(StoreError):
                await self._api.delete(CONFIG_MAPS, self._name(thing.key), thing.at)

    # ── writing ────────────────────────────────────────────────────────────

    async def _save(self, key: str, value: bytes, expect: int) -> int:
        async with self._locks[key], self._room:
            known = self._check(key, expect)
            if known is None:
                thing = await self._create(key, value)
                if self._fence is not None:
                    await self._fence.confirm()
            else:
                thing = await self._replace(known, value)
            self._known[key] = thing
            return thing.version

    async def _delete(self, key: str, expect: int) -> None:
        async with self._locks[key], self._room:
            known = self._check(key, expect)
            if known is None:
                raise Conflict(key, expected=expect, found=0)
            doubt = False
            for pause in self._pauses():
                try:
                    await self._api.delete(CONFIG_MAPS, self._name(key), known.at)
                    break
                except Missing:
                    if not doubt:
                        del self._known[key]
                        raise Conflict(key, expected=expect, found=0) from None
                    break
                except Stale:
                    known = self._again(known, await self._there(key))
                except NoAnswer:
                    doubt = True
                await asyncio.sleep(pause)
            del self._known[key]

    def _check(self, key: str, expect: int) -> _Thing | None:
        known = self._known.get(key)
        found = known.version if known is not None else 0
        if found != expect:
            raise Conflict(key, expected=expect, found=found)
        return known

    async def _create(self, key: str, value: bytes) -> _Thing:
        doubt = False
        for pause in self._pauses():
            try:
                return _thing(await self._api.create(CONFIG_MAPS, self._body(key, value)))
            except NoAnswer:
                doubt = True
            except Stale:
                there = await self._there(key)
                if there is not None and doubt and (there.value, there.term) == (value, self._term):
                    return there
                if there is not None and self._fence is not None and there.term < self._fence.floor:
                    await self._discard(there)
                elif there is not None:
                    raise Conflict(key, expected=0, found=there.version) from None
            await asyncio.sleep(pause)
        raise AssertionError("the pauses go on until they raise")

    async def _replace(self, known: _Thing, value: bytes) -> _Thing:
        doubt = False
        for pause in self._pauses():
            try:
                return _thing(await self._api.replace(CONFIG_MAPS, self._body(known.key, value, known)))
            except NoAnswer:
                doubt = True
            except (Stale, Missing):
                there = await self._there(known.key)
                if there is not None and doubt and (there.value, there.term) == (value, self._term):
                    return there
                known = self._again(known, there)
            await asyncio.sleep(pause)
        raise AssertionError("the pauses go on until they raise")

    def _again(self, known: _Thing, there: _Thing | None) -> _Thing:
        """What to try again at, if nothing but labels changed. Raises ``Conflict`` otherwise, and knows that
        from then on."""
        if there is not None and (there.value, there.term) == (known.value, known.term):
            self._known[known.key] = again = msgspec.structs.replace(known, at=there.at)
            return again
        if there is None:
            self._known.pop(known.key, None)
        else:
            self._known[known.key] = there
        found = there.version if there is not None else 0
        raise Conflict(known.key, expected=known.version, found=found)

    def _body(self, key: str, value: bytes, known: _Thing | None = None) -> Json:
        labels = {"app.kubernetes.io/managed-by": "coslice", LABEL: self._prefix}
        meta: Json = {"name": self._name(key), "labels": labels}
        if known is not None:
            meta["resourceVersion"] = known.at
        writes = known.writes + 1 if known is not None else 1
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": meta,
            "data": {"key": key, "term": str(self._term), "writes": str(writes)},
            "binaryData": {"state": base64.b64encode(value).decode()},
        }

    def _name(self, key: str) -> str:
        """For people the key, as far as names allow; the hash keeps apart what looks the same."""
        readable = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")[:60]
        mark = hashlib.sha256(key.encode()).hexdigest()[:10]
        return "-".join(part for part in (self._prefix, readable, mark) if part)


def _thing(item: Json) -> _Thing:
    """Kubernetes promises that resourceVersions of one resource compare as whole numbers (since 1.35; they
    always did)."""
    at = str(item["metadata"]["resourceVersion"])
    try:
        data = item["data"]
        value = base64.b64decode(item.get("binaryData", {}).get("state", ""))
        return _Thing(
            key=data["key"],
            value=value,
            term=int(data["term"]),
            writes=int(data["writes"]),
            version=int(at),
            at=at,
        )
    except (KeyError, ValueError) as error:
        name = item["metadata"].get("name")
        raise StoreError(f"the ConfigMap {name} has our label and is none of ours: {error!r}") from error
