"""The transport of ``AsyncClient``: one stream per event loop and job, all of it on that loop.

The same session protocol as ``link``, without threads and so without a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Iterable

import grpc
import grpc.aio

from coslice.client.config import ClientConfig
from coslice.client.link import result_of, signalled
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
from coslice.errors import ConfigError
from coslice.wire.cancelled import raise_if_cancelled
from coslice.wire.leader import Dial, addresses_of
from coslice.wire.outgoing import Outgoing
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc


class AioLink:
    def __init__(self, config: ClientConfig) -> None:
        assert config.address is not None
        self._address, self._credentials = config.address, config.credentials
        self._dial = Dial(config.address, encrypted=config.credentials.encrypted)
        self._session = Session(hello_of(config), address=config.address)
        self._outbox: Outgoing[pb.ClientMessage] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self.users: weakref.WeakSet[object] = weakref.WeakSet()

    async def acquire(self, claim: Claim) -> None:
        """Wait until the claim is granted; on any exception nothing of it is left behind."""
        signal = asyncio.Event()
        claim.wake = signal.set
        try:
            self._session.want(claim)
            if not claim.settled:
                self._run()
            self._flush()
            while (wait := self._session.patience(claim, now=time.monotonic())) is not None:
                await signalled(signal, wait)
        except BaseException as error:
            self._session.withdraw(claim, f"{type(error).__name__} in the caller")
            self._flush()
            raise

    def release_now(self, claim: Claim, groups: Iterable[str] | None = None) -> Release:
        release = self._session.release(claim, groups)
        self._flush()
        return release

    async def release(self, claim: Claim, groups: Iterable[str] | None, *, confirm_s: float) -> bool:
        """As ``Link.release``."""
        signal = asyncio.Event()
        release = self.release_now(claim, groups)
        for giving in release.givings:
            giving.wake = signal.set
        deadline = time.monotonic() + confirm_s
        while self._session.welcomed and not all(giving.done for giving in release.givings):
            wait = deadline - time.monotonic()
            if wait <= 0:
                break
            await signalled(signal, wait)
        return result_of(release)

    def should_yield(self, groups: Iterable[str]) -> bool:
        return self._session.should_yield(groups)

    def note(self, name: str, value: float, step: int, text: str) -> None:
        if (note := note_of(name, value, step, text)) is not None:
            self._session.note(note)
            self._run()
            self._flush()

    async def status(self, group: str, timeout: float) -> Status:
        dial = Dial(self._address, encrypted=self._credentials.encrypted)
        while True:
            try:
                async with self._credentials.aio_channel(dial.address, OPTIONS) as channel:
                    stub = pb_grpc.OrchestratorStub(channel)
                    request, metadata = (
                        pb.GetStatusRequest(group=group),
                        self._credentials.metadata(dial.address),
                    )
                    return status_of(await stub.GetStatus(request, timeout=timeout, metadata=metadata))
            except grpc.aio.AioRpcError as error:
                if not elsewhere(error) or dial.failed(error.trailing_metadata()):
                    raise status_error(error, address=self._address, group=group) from None

    async def leave(self, user: object) -> None:
        """A client of ours is done; with the last one the session ends."""
        self.users.discard(user)
        if self.users or self._task is None:
            return
        self._closing.set()
        self._farewell()
        if not self._session.welcomed:
            self._task.cancel()
        await asyncio.wait([self._task], timeout=FAREWELL_S)
        self._task = None

    # ── the stream ─────────────────────────────────────────────────────────

    def _farewell(self) -> None:
        self._session.goodbye()
        self._flush()
        if self._outbox is not None:
            self._outbox.end()

    def _flush(self) -> None:
        outgoing, self._session.outgoing = self._session.outgoing, []
        if self._outbox is not None:
            for message in outgoing:
                self._outbox.put(message)

    def _run(self) -> None:
        if (self._task is None or self._task.done()) and not self._closing.is_set():
            self._session.connecting(now=time.monotonic())
            self._task = asyncio.create_task(self._read_on(), name="coslice-session")

    async def _read_on(self) -> None:
        """One stream after the other, for as long as there is something that needs one."""
        backoff = Backoff()
        try:
            while True:
                welcomed, trailers = await self._read_one()
                raise_if_cancelled()
                if welcomed:
                    backoff.reset()
                    self._dial.reached()
                wait = self._dial.failed(trailers)
                if self._closing.is_set() or self._session.idle:
                    return
                if not wait:
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next()):
                        await self._closing.wait()
        except asyncio.CancelledError:
            await self._loop_ends()
            raise

    async def _read_one(self) -> tuple[bool, Trailers]:
        """As ``Link._read_one``."""
        trouble, welcomed = "the orchestrator ended the stream", False
        trailers: Trailers = None
        address = self._dial.address
        outbox: Outgoing[pb.ClientMessage] = Outgoing()
        try:
            metadata = self._credentials.metadata(address) + self._dial.metadata
            dialled = self._credentials.aio_channel(address, OPTIONS)
        except ConfigError as error:  # files may be replaced while we run
            self._session.closed(now=time.monotonic(), trouble=str(error))
            return False, None
        async with dialled as channel:
            call = pb_grpc.OrchestratorStub(channel).Session(outbox, metadata=metadata)
            self._outbox = outbox
            self._session.opened()
            self._flush()
            try:
                async for message in call:
                    outbox.answered()
                    self._session.received(message)
                    self._flush()
                    welcomed = welcomed or self._session.welcomed
                    if self._session.rejected:
                        break
            except grpc.aio.AioRpcError as error:
                trouble, trailers = trouble_of(error), error.trailing_metadata()
            finally:
                self._outbox = None
                self._session.closed(now=time.monotonic(), trouble=trouble)
                outbox.end()  # what gRPC still waits for
                outbox.answered()
                call.cancel()
        return welcomed, trailers

    async def _loop_ends(self) -> None:
        """What was held in this loop ends with it. The stream was cancelled with us: say so on a new one."""
        self._closing.set()
        if not self._session.ever_welcomed:
            return
        words = [pb.ClientMessage(hello=self._session.hello), pb.ClientMessage(goodbye=pb.Goodbye())]
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, ConfigError):
            metadata = self._credentials.metadata(self._dial.address)
            async with (
                asyncio.timeout(FAREWELL_S),
                self._credentials.aio_channel(self._dial.address, OPTIONS) as channel,
            ):
                async for _ in pb_grpc.OrchestratorStub(channel).Session(iter(words), metadata=metadata):
                    pass


_Key = tuple[str | None, str, str, int]
_links: dict[asyncio.AbstractEventLoop, dict[_Key, AioLink]] = {}
"""Until the loop is closed. (A weak dictionary would keep it for ever: the links refer to their loop.)"""


def link_for(config: ClientConfig, user: object) -> AioLink:
    """This loop's link of the job."""
    assert config.address is not None
    for address in addresses_of(config.address):
        config.credentials.check(address)
    for closed in [loop for loop in list(_links) if loop.is_closed()]:
        _links.pop(closed, None)
    links = _links.setdefault(asyncio.get_running_loop(), {})
    key = (config.address, config.job, config.incarnation, config.rank)
    link = links.get(key)
    if link is None or link._closing.is_set():
        link = links[key] = AioLink(config)
    link.users.add(user)
    return link
