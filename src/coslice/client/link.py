"""The transport of ``Client``: one stream and one reader thread per process and job.

Runs the session protocol (``session``) under a lock. Callers may be threads or coroutines of any event loop:
all of them share the one session, which is what makes re-entry count per process. Knows nothing of sections,
decorators or the environment.
"""

import asyncio
import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue

import grpc

from coslice.client.config import ClientConfig
from coslice.client.session import Claim, Release, Session
from coslice.client.transport import (
    FAREWELL_S,
    OPTIONS,
    Backoff,
    Trailers,
    elsewhere,
    hello_of,
    note_of,
    status_error,
    status_of,
    trouble_of,
)
from coslice.client.types import Status
from coslice.errors import ConfigError, CosliceError
from coslice.wire.leader import Dial, addresses_of
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc


class Link:
    def __init__(self, config: ClientConfig) -> None:
        assert config.address is not None
        self._address, self._credentials = config.address, config.credentials
        self._dial = Dial(config.address, encrypted=config.credentials.encrypted)
        self._session = Session(hello_of(config), address=config.address)
        self._lock = threading.Lock()
        self._owner = 0
        self._deferred: deque[Claim] = deque()
        self._outbox: SimpleQueue[pb.ClientMessage | None] | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._ended = threading.Event()
        self._pid = os.getpid()
        self.users: weakref.WeakSet[object] = weakref.WeakSet()

    # ── for threads ────────────────────────────────────────────────────────

    def acquire(self, claim: Claim) -> None:
        """Wait until the claim is granted; on any exception nothing of it is left behind."""
        signal = threading.Event()
        claim.wake = signal.set
        try:
            wait = self._want(claim)
            while wait is not None:
                signal.wait(min(wait, threading.TIMEOUT_MAX))
                signal.clear()
                wait = self._patience(claim)
        except BaseException as error:
            self._withdraw(claim, error)
            raise

    def release(self, claim: Claim, groups: Iterable[str] | None, *, confirm_s: float) -> bool:
        """Give up the claim. True if the lock went with it; raises ``LeaseLost`` once if it was lost before.

        Waits for the confirmation up to ``confirm_s``, but not for an orchestrator that is away: an
        unconfirmed yield is repeated until it is answered.
        """
        if (
            self._owner == threading.get_ident()
        ):  # the garbage collector closes a generator of ours right here
            self._deferred.append(claim)
            return True
        signal = threading.Event()
        release = self._release(claim, groups, signal.set)
        deadline = time.monotonic() + (0 if threading.current_thread() is self._thread else confirm_s)
        while (wait := self._unconfirmed(release, deadline)) > 0:
            signal.wait(wait)
            signal.clear()
        return result_of(release)

    # ── for coroutines ─────────────────────────────────────────────────────

    async def acquire_async(self, claim: Claim) -> None:
        signal, claim.wake = _loop_signal()
        try:
            wait = self._want(claim)
            while wait is not None:
                await signalled(signal, wait)
                wait = self._patience(claim)
        except BaseException as error:
            self._withdraw(claim, error)
            raise

    async def release_async(self, claim: Claim, groups: Iterable[str] | None, *, confirm_s: float) -> bool:
        signal, wake = _loop_signal()
        release = self._release(claim, groups, wake)
        deadline = time.monotonic() + confirm_s
        while (wait := self._unconfirmed(release, deadline)) > 0:
            await signalled(signal, wait)
        return result_of(release)

    # ── for both ───────────────────────────────────────────────────────────

    def should_yield(self, groups: Iterable[str]) -> bool:
        with self._locked() as session:
            return session.should_yield(groups)

    def note(self, name: str, value: float, step: int, text: str) -> None:
        if (note := note_of(name, value, step, text)) is not None:
            with self._locked() as session:
                session.note(note)
                self._run(session)

    def status(self, group: str, timeout: float) -> Status:
        dial = Dial(self._address, encrypted=self._credentials.encrypted)
        while True:
            try:
                with self._credentials.channel(dial.address, OPTIONS) as channel:
                    stub = pb_grpc.OrchestratorStub(channel)
                    request, metadata = (
                        pb.GetStatusRequest(group=group),
                        self._credentials.metadata(dial.address),
                    )
                    return status_of(stub.GetStatus(request, timeout=timeout, metadata=metadata))
            except grpc.RpcError as error:
                if not elsewhere(error) or dial.failed(error.trailing_metadata()):
                    raise status_error(error, address=self._address, group=group) from None

    def leave(self, user: object) -> None:
        """A client of ours is done; with the last one the session ends."""
        self.users.discard(user)
        if not self.users:
            self.close()

    def close(self, timeout: float = FAREWELL_S) -> None:
        """Yield what is held, say goodbye, and wait up to ``timeout`` seconds for it to be taken."""
        if self._pid != os.getpid():
            return
        with self._locked() as session:
            self._closing.set()
            session.goodbye()
            running, welcomed = self._thread is not None, session.welcomed
        with self._locked():
            if self._outbox is not None:
                self._outbox.put(None)  # the request side ends after the goodbye
        if running and welcomed:
            self._ended.wait(timeout)

    # ── the lock ───────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Session]:
        """The session, alone; on leaving, what it has to say goes to the stream in that order."""
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield self._session
            finally:
                self._flush()
                self._owner = 0
        if self._deferred:  # by a collection after the flush
            with self._locked():
                pass

    def _flush(self) -> None:
        while self._deferred:
            self._session.release(self._deferred.popleft())
        outgoing, self._session.outgoing = self._session.outgoing, []
        if self._outbox is not None:
            for message in outgoing:
                self._outbox.put(message)

    def _want(self, claim: Claim) -> float | None:
        with self._locked() as session:
            session.want(claim)
            if not claim.settled:
                self._run(session)
            return session.patience(claim, now=time.monotonic())

    def _patience(self, claim: Claim) -> float | None:
        with self._locked() as session:
            return session.patience(claim, now=time.monotonic())

    def _withdraw(self, claim: Claim, error: BaseException) -> None:
        with self._locked() as session:
            session.withdraw(claim, f"{type(error).__name__} in the caller")

    def _release(self, claim: Claim, groups: Iterable[str] | None, wake: Callable[[], None]) -> Release:
        with self._locked() as session:
            release = session.release(claim, groups)
            for giving in release.givings:
                giving.wake = wake
            return release

    def _unconfirmed(self, release: Release, deadline: float) -> float:
        """Seconds that a yield may still wait for its confirmation; 0: no longer."""
        with self._locked() as session:
            if not session.welcomed or all(giving.done for giving in release.givings):
                return 0.0
        return deadline - time.monotonic()

    # ── the stream ─────────────────────────────────────────────────────────

    def _run(self, session: Session) -> None:
        """Have a reader thread. Under the lock."""
        if self._thread is None and not self._closing.is_set():
            session.connecting(now=time.monotonic())
            self._thread = threading.Thread(target=self._read_on, name="coslice-session", daemon=True)
            self._thread.start()

    def _read_on(self) -> None:
        """One stream after the other, for as long as there is something that needs one."""
        backoff = Backoff()
        while True:
            welcomed, trailers = self._read_one()
            if welcomed:
                backoff.reset()
                self._dial.reached()
            wait = self._dial.failed(trailers)
            with self._locked() as session:
                if self._closing.is_set() or session.idle:
                    self._thread = None
                    self._ended.set()
                    return
            if wait:
                self._closing.wait(backoff.next())

    def _read_one(self) -> tuple[bool, Trailers]:
        """Serve one stream until it ends; was it welcomed? With what the server said of the leader."""
        address = self._dial.address
        try:
            metadata = self._credentials.metadata(address) + self._dial.metadata
            channel = self._credentials.channel(address, OPTIONS)
        except ConfigError as error:  # files may be replaced while we run
            with self._locked() as session:
                session.closed(now=time.monotonic(), trouble=str(error))
            return False, None
        outbox: SimpleQueue[pb.ClientMessage | None] = SimpleQueue()
        call = pb_grpc.OrchestratorStub(channel).Session(iter(outbox.get, None), metadata=metadata)
        trouble = "the orchestrator ended the stream"
        welcomed = False
        trailers: Trailers = None
        try:
            with self._locked() as session:
                self._outbox = outbox
                session.opened()
            for message in call:
                with self._locked() as session:
                    session.received(message)
                    welcomed = welcomed or session.welcomed
                    if session.rejected:
                        break
        except grpc.RpcError as error:
            trouble, trailers = trouble_of(error), error.trailing_metadata()
        finally:
            with self._locked() as session:
                self._outbox = None
                session.closed(now=time.monotonic(), trouble=trouble)
            outbox.put(None)
            call.cancel()  # type: ignore[no-untyped-call, unused-ignore]
            channel.close()
        return welcomed, trailers


def result_of(release: Release) -> bool:
    error: CosliceError | None = release.lost
    for giving in release.givings:
        error = error or giving.error
    if error is not None:
        raise error
    return release.given_up


def _loop_signal() -> tuple[asyncio.Event, Callable[[], None]]:
    """An event of the running loop, and how the reader thread sets it."""
    loop, signal = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(signal.set)

    return signal, wake


async def signalled(signal: asyncio.Event, wait: float) -> None:
    """Wait for the event, at most so many seconds. (``asyncio.wait_for`` loses cancellations in 3.11.)"""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None if wait == math.inf else wait):
            await signal.wait()
    signal.clear()


_Key = tuple[str | None, str, str, int]
_links: dict[_Key, Link] = {}
_guard = threading.Lock()


def link_for(config: ClientConfig, user: object) -> Link:
    """The process's link of this job: every client of the same job shares it."""
    assert config.address is not None
    for address in addresses_of(config.address):
        config.credentials.check(address)
    key = (config.address, config.job, config.incarnation, config.rank)
    with _guard:
        link = _links.get(key)
        if link is None or link._closing.is_set():
            link = _links[key] = Link(config)
        link.users.add(user)
        return link


def _close_all() -> None:
    with _guard:
        links = list(_links.values())
        _links.clear()
    deadline = time.monotonic() + FAREWELL_S
    for link in links:
        link.close(max(0.0, deadline - time.monotonic()))


def _forked() -> None:
    """In a forked child: the session is the parent's, and locks may be held by threads that are not here."""
    global _guard
    _guard = threading.Lock()
    _links.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forked)
