"""State in etcd: one key for each value, its ``mod_revision`` as version.

Everything that waits to be saved while a transaction is under way goes into the next one, whoever asked. Each
transaction compares the versions of its keys and that the leader's key is still the one of our election: a
process that was deposed, or paused and woke up, changes nothing. A transaction without an answer is sent
again; if its first copy came through, the second finds our own values and knows.
"""

import asyncio
from collections import deque
from contextlib import suppress

from coslice.store.again import answered, pauses, while_of_use
from coslice.store.base import Conflict, NoAnswer, StoreError
from coslice.store.election import Deposed, Tenure
from coslice.store.etcd_api import EtcdApi, Json, after_prefix, decoded, encoded

Entries = dict[str, tuple[bytes, int]]

_OPS = 100
"""Keys in one transaction; etcd takes 128 operations (``--max-txn-ops``)."""
_BYTES = 1_000_000
"""Of values in one transaction; etcd takes 1.5 MiB (``--max-request-bytes``)."""
_PAGE = 200
_TIMEOUT = 2.0


class _Write:
    """Write ``value``, or delete where it is None."""

    __slots__ = ("expect", "future", "key", "value")

    def __init__(self, key: str, value: bytes | None, expect: int) -> None:
        self.key, self.value, self.expect = key, value, expect
        self.future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def give(self, result: int | StoreError) -> None:
        if self.future.done():  # cancelled meanwhile
            return
        if isinstance(result, StoreError):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)

    def outcome(self, found: "tuple[bytes, int] | None", *, doubt: bool) -> int | StoreError | None:
        """After a transaction that was refused: done by an earlier copy of it (``doubt``), in conflict, or
        None: still to be written."""
        value, version = found or (b"", 0)
        if version == self.expect:
            return None
        if doubt and self.value is None and not version:
            return 0
        if doubt and version > self.expect and self.value == value:
            return version
        return Conflict(self.key, expected=self.expect, found=version)


class EtcdStore:
    """See ``Store``. ``leader``: key and create revision of the election that ``tenure`` rests on. Without a
    tenure, which ends by itself, silence of ``patience`` seconds is ``NoAnswer``."""

    def __init__(
        self,
        api: EtcdApi,
        *,
        tenure: Tenure | None = None,
        leader: tuple[str, int] | None = None,
        patience: float = 30.0,
    ) -> None:
        self._api, self._tenure, self._patience = api, tenure, patience
        self._prefix = api.location.prefix + "state/"
        self._fence: list[Json] = []
        if leader is not None:
            key, revision = leader
            self._fence = [_compare(key, "CREATE", "create_revision", revision)]
        self.commits = 0
        """Transactions so far; each may have saved many values."""
        self._queue: deque[_Write] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._writer: asyncio.Task[None] | None = None
        self._closed = False

    async def load(self) -> Entries:
        self._check_open()
        await self._idle.wait()  # what was accepted is done, though its caller may be gone
        while True:
            with suppress(_Compacted):
                found = await self._read_all()
                break
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_on(), name="etcd store")
        return dict(sorted(found.items()))

    async def save(self, key: str, value: bytes, *, expect: int) -> int:
        return await self._put(_Write(key, bytes(value), expect))

    async def delete(self, key: str, *, expect: int) -> None:
        await self._put(_Write(key, None, expect))

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._wake.set()
        if self._writer is not None:
            await asyncio.wait([self._writer])

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")

    def _put(self, write: _Write) -> asyncio.Future[int]:
        self._check_open()
        if self._writer is None:
            raise StoreError("the store is not open: call load() first")
        self._queue.append(write)
        self._idle.clear()
        self._wake.set()
        return write.future

    # ── reading ────────────────────────────────────────────────────────────

    async def _read_all(self) -> Entries:
        """Page by page, all as of one revision."""
        start, end, revision = encoded(self._prefix), after_prefix(self._prefix), 0
        found: Entries = {}
        while True:
            ask = {"key": start, "range_end": end, "limit": _PAGE, "revision": str(revision)}
            answer = await self._ask("kv/range", ask)
            revision = revision or int(answer["header"]["revision"])
            for kv in answer.get("kvs", ()):
                key, value, version = _entry(kv)
                found[key.removeprefix(self._prefix)] = (value, version)
            if not answer.get("more"):
                return found
            start = encoded(key + "\0")

    async def _ask(self, path: str, body: Json) -> Json:
        try:
            return await answered(
                lambda: self._api.call(path, body, timeout=_TIMEOUT), self._tenure, self._patience
            )
        except StoreError as error:
            if "compacted" in str(error):
                raise _Compacted from error
            raise

    # ── writing ────────────────────────────────────────────────────────────

    async def _write_on(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                batch = self._take()
                try:
                    await self._commit(batch)
                except StoreError as error:
                    for write in batch:
                        write.give(error)
                except BaseException:
                    for write in (*batch, *self._queue):
                        write.give(StoreError("the store was stopped"))
                    self._idle.set()
                    raise
            self._idle.set()
            if self._closed:
                return

    def _take(self) -> list[_Write]:
        """What fits into one transaction. A key is written once in it: whoever comes later waits his turn."""
        batch: dict[str, _Write] = {}
        size = 0
        while self._queue and len(batch) < _OPS and self._queue[0].key not in batch:
            size += len(self._queue[0].value or b"")
            if batch and size > _BYTES:
                break
            write = self._queue.popleft()
            batch[write.key] = write
        return list(batch.values())

    async def _commit(self, batch: list[_Write]) -> None:
        """One writer's conflict is his own: the others are saved."""
        try:
            async with while_of_use(self._tenure, self._patience):
                await self._commit_all(batch)
        except TimeoutError:
            raise NoAnswer(f"no member of etcd answered for {self._patience:g} s") from None

    async def _commit_all(self, batch: list[_Write]) -> None:
        """A transaction without an answer is not taken for one that did not happen: see ``outcome``."""
        doubt, again = False, pauses()
        while batch:
            try:
                answer = await self._api.call("kv/txn", self._transaction(batch), timeout=_TIMEOUT)
            except NoAnswer:
                doubt = True
                await asyncio.sleep(next(again))
                continue
            if answer.get("succeeded"):
                self.commits += 1
                version = int(answer["header"]["revision"])
                for write in batch:
                    write.give(version if write.value is not None else 0)
                return
            batch = self._after_refusal(batch, answer, doubt=doubt)

    def _transaction(self, batch: list[_Write]) -> Json:
        """All or, where a comparison fails, a reading of what is there instead."""
        keys = [self._prefix + write.key for write in batch]
        changes = [
            {"request_delete_range": {"key": encoded(key)}}
            if write.value is None
            else {"request_put": {"key": encoded(key), "value": encoded(write.value)}}
            for key, write in zip(keys, batch, strict=True)
        ]
        versions = [
            _compare(key, "MOD", "mod_revision", write.expect) for key, write in zip(keys, batch, strict=True)
        ]
        leader = [{"request_range": {"key": fence["key"]}} for fence in self._fence]
        reading = [{"request_range": {"key": encoded(key)}} for key in keys]
        return {"compare": self._fence + versions, "success": changes, "failure": leader + reading}

    def _after_refusal(self, batch: list[_Write], answer: Json, *, doubt: bool) -> list[_Write]:
        """Answer those whose outcome is known; the rest is to be written again."""
        read = [response["response_range"].get("kvs", []) for response in answer["responses"]]
        for fence, kvs in zip(self._fence, read, strict=False):
            if not kvs or str(kvs[0]["create_revision"]) != fence["create_revision"]:
                assert self._tenure is not None
                self._tenure.end("another orchestrator was elected")
                raise Deposed("refused by etcd: this process leads no longer")
        rest = []
        for write, kvs in zip(batch, read[len(self._fence) :], strict=True):
            found = _entry(kvs[0])[1:] if kvs else None
            outcome = write.outcome(found, doubt=doubt)
            if outcome is None:
                rest.append(write)
            else:
                write.give(outcome)
        return rest


class _Compacted(Exception):
    """The revision being read is no longer there."""


def _compare(key: str, target: str, field: str, revision: int) -> Json:
    return {"key": encoded(key), "target": target, "result": "EQUAL", field: str(revision)}


def _entry(kv: Json) -> tuple[str, bytes, int]:
    return decoded(kv["key"]).decode(), decoded(kv.get("value", "")), int(kv["mod_revision"])
