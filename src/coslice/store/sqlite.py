"""State in one SQLite file: WAL, one owner, one writer thread; by default (``synchronous=FULL``) it survives
the loss of power.

Everything that is asked in one turn of the loop becomes one transaction, whoever asked, and so does what
waits when the thread is free: a hundred drivers cost one flush of the disk, not a hundred. Callers are
answered after the commit, all at once.

While the disk is quick the loop writes by itself: waking the thread, which then needs the interpreter, and
the loop again takes longer than such a disk's flush.
"""

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from coslice.errors import ConfigError
from coslice.store.base import Conflict, StoreError
from coslice.store.ownership import Ownership
from coslice.store.sqlite_file import open_file

T = TypeVar("T")
Entries = dict[str, tuple[bytes, int]]

_ROWS = 100  # in one statement at most
QUICK_S = 0.002
"""A disk is quick if one of the last ``LOOKS`` commits took no longer: at times one writes back the log."""
LOOKS = 3
STUCK_S = 0.1
"""And if none of them took longer: a disk that hangs now and then is not to hold the loop up each time."""


class _Load:
    """Give everything. Like the other requests it carries the future of who waits."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[Entries]) -> None:
        self.future = future


class _Write:
    """Write ``value``, or delete where it is None."""

    __slots__ = ("expect", "future", "key", "value")

    def __init__(self, key: str, value: bytes | None, expect: int, future: asyncio.Future[int]) -> None:
        self.key, self.value, self.expect, self.future = key, value, expect, future


class _Close:
    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future


_Request = _Load | _Write | _Close
_Queue = queue.SimpleQueue[_Request]


class SqliteStore:
    """See ``Store``. ``load`` opens the file; a second store on it raises ``ConfigError`` naming the
    first's pid.

    After one failed commit nothing more is accepted: what a disk did with a write it reported as failed is
    unknown.
    """

    def __init__(self, path: str | Path, *, flush: bool = True, max_pages: int | None = None) -> None:
        """``flush`` False: what was saved survives the process (SIGKILL too) but perhaps not the machine;
        for state that describes processes, which do not survive it either. ``max_pages``: the file may not
        outgrow so many pages; saves then fail as on a full disk."""
        self.path = Path(path)
        self.flush = flush
        self.max_pages = max_pages
        self.commits = 0
        """Transactions so far; each may have saved many values."""
        self._queue: _Queue = queue.SimpleQueue()
        self._asked: list[_Write] = []
        """In this turn of the loop."""
        self._with_thread = 0
        """Requests that it has yet to answer; while there is none it leaves the file alone."""
        self._thread: threading.Thread | None = None
        self._writer: _Writer | None = None
        self._ready = False
        self._closed = False

    async def load(self) -> Entries:
        if self._closed:
            raise StoreError(f"the store {self.path} is closed")
        loop = asyncio.get_running_loop()
        request = _Load(loop.create_future())
        self._hand_over(request)
        if self._thread is None:
            self._writer = _Writer(self, self._queue, _Answers(loop, self._answered))
            name = f"store {self.path.name}"
            self._thread = threading.Thread(target=self._writer.run, name=name, daemon=True)
            self._thread.start()
        try:
            entries = await request.future
        except ConfigError:  # it never opened and its thread is over: the next load tries anew
            self._thread = None
            raise
        self._ready = True
        return entries

    async def save(self, key: str, value: bytes, *, expect: int) -> int:
        return await self._write(key, value, expect)

    async def delete(self, key: str, *, expect: int) -> None:
        await self._write(key, None, expect)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._ready:
            request = _Close(asyncio.get_running_loop().create_future())
            self._hand_over(request)
            await request.future

    def _write(self, key: str, value: bytes | None, expect: int) -> asyncio.Future[int]:
        if self._closed:
            raise StoreError(f"the store {self.path} is closed")
        if not self._ready:
            raise StoreError(f"the store {self.path} is not open: call load() first")
        loop = asyncio.get_running_loop()
        write = _Write(key, value, expect, loop.create_future())
        if not self.flush and self._writer is not None:
            self._writer.write_here([write])
            return write.future
        if self._with_thread:  # which takes all that is there when it is free
            self._hand_over(write)
        else:
            self._asked.append(write)
            if len(self._asked) == 1:
                loop.call_soon(self._begin)
        return write.future

    def _begin(self) -> None:
        """Whoever saves in the same turn of the loop is here by now."""
        writer = self._writer
        if not self._asked or writer is None:  # somebody else handed them over
            return
        if self._with_thread or not writer.quick:
            self._hand_over()
        else:
            asked, self._asked = self._asked, []
            writer.write_here(asked)

    def _hand_over(self, *further: _Request) -> None:
        """To the thread, in the order in which they were asked."""
        requests = (*self._asked, *further)
        self._asked = []
        self._with_thread += len(requests)
        for request in requests:
            self._queue.put(request)

    def _answered(self, requests: int) -> None:
        self._with_thread -= requests


class _Answers:
    """Results for the waiting tasks, carried to the loop in one go. ``sent`` hears there how many came from
    the thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sent: Callable[[int], None]) -> None:
        self._loop, self._sent = loop, sent
        self._todo: list[tuple[_Request, object]] = []

    def give(self, request: _Request, result: object) -> None:
        self._todo.append((request, result))

    def resolve(self) -> None:
        """From the loop's own thread."""
        todo, self._todo = self._todo, []
        self._resolve(todo)

    def send(self) -> None:
        todo, self._todo = self._todo, []
        if todo:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._arrive, todo)

    def _arrive(self, todo: list[tuple[_Request, object]]) -> None:
        self._sent(len(todo))
        self._resolve(todo)

    @staticmethod
    def _resolve(todo: Iterable[tuple[_Request, object]]) -> None:
        for request, result in todo:
            future: asyncio.Future[object] = request.future  # type: ignore[assignment]
            if future.done():  # cancelled meanwhile
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


class _Writer:
    """All that happens in the store's thread, and (``write_here``) short writes in the caller's."""

    def __init__(self, store: SqliteStore, requests: _Queue, answers: _Answers) -> None:
        self._store, self._path, self._requests, self._answers = store, store.path, requests, answers
        self._took: deque[float] = deque((0.0,), maxlen=LOOKS)
        """Seconds of the last commits."""
        self._versions: dict[str, int] = {}
        self._last = 0
        self._broken: StoreError | None = None

    @property
    def quick(self) -> bool:
        return min(self._took) <= QUICK_S and max(self._took) <= STUCK_S

    def run(self) -> None:
        owner = Ownership(self._path)
        try:
            owner.take()
            try:
                with contextlib.closing(self._open()) as self._db:
                    closing = self._serve()
            finally:
                owner.give_up()
        except Exception as error:  # opening failed, or closing did: tell whoever waits, let nobody hang
            for request in self._pending():
                self._answers.give(request, error if isinstance(error, ConfigError) else self._failure(error))
        else:
            self._answers.give(closing, None)
        self._answers.send()

    def write_here(self, writes: Sequence[_Write]) -> None:
        """From the loop's own thread, while the other one has nothing to do."""
        self._commit(writes)
        self._answers.resolve()

    def _open(self) -> sqlite3.Connection:
        return open_file(self._path, self._store.max_pages, flush=self._store.flush)

    def _pending(self) -> list[_Request]:
        found: list[_Request] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._requests.get_nowait())
        return found

    def _serve(self) -> _Close:
        while True:
            batch = [self._requests.get(), *self._pending()]
            writes: list[_Write] = []
            for request in batch:
                match request:
                    case _Write():
                        writes.append(request)
                    case _Load():
                        self._commit(writes)
                        writes = []
                        self._load(request)
                    case _Close():
                        self._commit(writes)
                        self._answers.send()
                        return request
            self._commit(writes)
            self._answers.send()

    def _load(self, request: _Load) -> None:
        try:
            rows = self._db.execute("SELECT key, value, version FROM state ORDER BY key").fetchall()
        except sqlite3.Error as error:
            self._answers.give(request, self._failure(error))
        else:
            self._versions = {key: version for key, _, version in rows}
            self._last = max((self._last, *self._versions.values()))
            self._answers.give(request, {key: (value, version) for key, value, version in rows})

    def _commit(self, writes: Sequence[_Write]) -> None:
        """One transaction for all of them. One writer's conflict is his own: the others are saved."""
        if not writes:
            return
        after: dict[str, tuple[bytes | None, int]] = {}
        results: list[tuple[_Write, int | StoreError]] = []
        for write in writes:
            found = after[write.key][1] if write.key in after else self._versions.get(write.key, 0)
            if found != write.expect:
                results.append((write, Conflict(write.key, expected=write.expect, found=found)))
                continue
            if write.value is not None:
                self._last += 1
            version = 0 if write.value is None else self._last
            after[write.key] = (write.value, version)
            results.append((write, version))
        begun = time.monotonic()
        try:
            if self._broken is None:
                self._execute(after)
        except Exception as error:
            self._broken = self._failure(error)
        if self._broken is None:
            self._store.commits += 1
            self._took.append(time.monotonic() - begun)
            for key, (_, version) in after.items():
                self._versions[key] = version
        for write, result in results:
            self._answers.give(write, self._broken or result)

    def _execute(self, after: dict[str, tuple[bytes | None, int]]) -> None:
        """As few statements as possible: after each, this thread has to win the interpreter back from the
        loop."""
        saved = [(key, version, value) for key, (value, version) in after.items() if value is not None]
        deleted = [key for key, (value, _) in after.items() if value is None]
        statements: list[tuple[str, list[object]]] = []
        for rows in _chunks(saved):
            marks = ",".join(["(?,?,?)"] * len(rows))
            statements.append(
                (
                    f"INSERT INTO state (key, version, value) VALUES {marks} "
                    "ON CONFLICT (key) DO UPDATE SET version = excluded.version, value = excluded.value",
                    [field for row in rows for field in row],
                )
            )
        for keys in _chunks(deleted):
            marks = ",".join("?" * len(keys))
            statements.append((f"DELETE FROM state WHERE key IN ({marks})", list(keys)))
        if len(statements) == 1:  # its own transaction
            self._db.execute(*statements[0])
        elif statements:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for statement in statements:
                    self._db.execute(*statement)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _failure(self, error: Exception) -> StoreError:
        failure = StoreError(
            f"the store {self._path} failed: {error}; nothing more is saved. Check the disk, then start again"
        )
        failure.__cause__ = error
        return failure


def _chunks(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[i : i + _ROWS] for i in range(0, len(items), _ROWS)]
