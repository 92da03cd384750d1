"""The agent's stream to the orchestrator: dials it, says what this node holds, hands commands on.

Dialling is gRPC's own (its connectivity wakes us, with its backoff); a stream that the orchestrator ends
while the connection stands is opened again after a backoff of ours. Where several addresses are given, or an
orchestrator that stands by names the leader's, another one is dialled instead. While there is no stream
reports are dropped: the hello of the next one carries everything we hold, and an orchestrator repeats
commands it has no answer to.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from coslice.errors import ConfigError
from coslice.security.credentials import PLAIN, Credentials
from coslice.wire.cancelled import raise_if_cancelled
from coslice.wire.leader import LEADER_FOR_AGENTS, Dial
from coslice.wire.outgoing import Outgoing
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

log = logging.getLogger(__name__)

BACKOFF_MIN, BACKOFF_MAX = 0.05, 1.0
ATTEMPT_S = 2.0
"""For one of several addresses to answer; then the next one is dialled."""
QUIET_S = 10.0
"""After so long without a connection people are told."""
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.initial_reconnect_backoff_ms", int(BACKOFF_MIN * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(BACKOFF_MAX * 1000)),
    ("grpc.min_reconnect_backoff_ms", 2000),  # gRPC's name for the time limit of one connection attempt
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # what gRPC obeys: its default is 60 s
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.bdp_probe", 0),  # a ping beside every message, to size windows we never fill
    ("grpc.use_local_subchannel_pool", 1),
)


class Link:
    """``hello`` makes the first message of a stream; ``command`` must not block."""

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials = PLAIN,
        hello: Callable[[], pb.AgentHello],
        command: Callable[[pb.AgentCommand], None],
    ) -> None:
        self._dial = Dial(address, encrypted=credentials.encrypted, key=LEADER_FOR_AGENTS)
        self._credentials = credentials
        self._hello, self._command = hello, command
        self._outbox: Outgoing[pb.AgentMessage] | None = None
        self.attached = asyncio.Event()
        self.orchestrator = ""
        """Its instance id, from the last welcome."""
        self.unknown_groups: tuple[str, ...] = ()
        self._echoes: dict[int, asyncio.Future[None]] = {}
        self._echo = 0
        self._backoff = BACKOFF_MIN
        self._call: grpc.aio.Call | None = None
        self._renewing = False
        self._alone_since: float | None = None
        self._told = False
        """People, of this time without an orchestrator."""
        self._why: dict[str, str] = {}
        """By address."""

    @property
    def address(self) -> str:
        """Which orchestrator is dialled now."""
        return self._dial.address

    async def heard(self) -> None:
        """Returns once the orchestrator has taken in what was sent so far, or has lost the stream: then it
        asks us before it grants anything."""
        if self._outbox is None:
            return
        self._echo += 1
        number, back = self._echo, asyncio.get_running_loop().create_future()
        self._echoes[number] = back
        self.send(pb.AgentMessage(echo=pb.Echo(number=number)))
        try:
            await back
        finally:
            self._echoes.pop(number, None)

    def _echoed(self, number: int) -> None:
        if (back := self._echoes.get(number)) is not None and not back.done():
            back.set_result(None)

    def send(self, message: pb.AgentMessage) -> None:
        if self._outbox is not None:
            self._outbox.put(message)

    def renew(self) -> None:
        """Say hello again: what this node serves has changed."""
        if self._call is not None:
            self._renewing = True
            self.attached.clear()  # whoever waits for it means the new hello
            self._call.cancel()

    async def run(self) -> None:
        while True:
            address = self._dial.address
            async with self._credentials.aio_channel(address, OPTIONS) as channel:
                while self._dial.address == address:
                    await self._try(channel)

    async def _try(self, channel: grpc.aio.Channel) -> None:
        """One connection and one stream, and the pause after it."""
        welcomed, trailers = False, None
        if await self._reach(channel):
            welcomed, trailers = await self._attach(rpc.OrchestratorStub(channel))
            raise_if_cancelled()
        else:
            self._why[self.address] = (
                "nobody answers; is it up, does it use TLS too, is its certificate right?"
            )
        if welcomed:
            self._dial.reached()
            self._alone_since, self._told = None, False
        else:
            self._mention()
        if not self._dial.failed(trailers) and not welcomed:
            return
        self._backoff = BACKOFF_MIN if welcomed else min(2 * self._backoff, BACKOFF_MAX)
        # Many agents lose one orchestrator at once: they shall not return at once.
        await asyncio.sleep(self._backoff * random.uniform(0.5, 1.0))

    def _mention(self) -> None:
        """Once, when nobody has taken us for long; not with every address that is tried in vain."""
        now = asyncio.get_running_loop().time()
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since >= QUIET_S and not self._told:
            self._told = True
            tried = "; ".join(f"{address}: {why}" for address, why in sorted(self._why.items()))
            log.warning("no orchestrator has taken this node for %.0f s. %s", now - self._alone_since, tried)

    async def _reach(self, channel: grpc.aio.Channel) -> bool:
        """Returns once connected; False if there are other addresses to try. gRPC says nothing of what goes
        wrong meanwhile, so we say that much."""
        if self._dial.several:
            return await _answers(channel)
        ready = asyncio.ensure_future(channel.channel_ready())
        try:
            async with asyncio.timeout(QUIET_S):  # ``asyncio.wait_for`` loses cancellations in 3.11
                await asyncio.shield(ready)
        except TimeoutError:
            secured = " with TLS" if self._credentials.encrypted else ""
            log.warning(
                "no orchestrator answers at %s%s yet: is it up, does it use TLS too, does its certificate "
                "name that host? Dialling on",
                self.address,
                secured,
            )
            await ready
        except BaseException:
            ready.cancel()
            raise
        return True

    async def _attach(self, stub: "rpc.OrchestratorAsyncStub") -> tuple[bool, Iterable[Any] | None]:
        """One stream from hello to its end; True if the orchestrator took us. With what it said of the
        leader."""
        outbox: Outgoing[pb.AgentMessage] = Outgoing()
        self._outbox = outbox
        outbox.put(pb.AgentMessage(hello=self._hello()))  # what follows from later states comes after it
        try:
            metadata = self._credentials.metadata(self.address) + self._dial.metadata
        except ConfigError as error:
            log.warning("cannot show a token to the orchestrator: %s", error)
            self._outbox = None
            return False, None
        call = self._call = stub.Attach(outbox, metadata=metadata)
        welcomed = False
        trailers: Iterable[Any] | None = None
        try:
            async for command in call:
                outbox.answered()
                if command.HasField("welcome"):
                    welcomed = True
                    self._welcome(command.welcome)
                elif command.HasField("echo"):
                    self._echoed(command.echo.number)
                else:
                    self._command(command)
            log.info("the orchestrator at %s ended the stream", self.address)
        except grpc.aio.AioRpcError as error:
            level = logging.INFO if error.code() is grpc.StatusCode.UNAVAILABLE else logging.WARNING
            said = error.details() or error.code().name
            if self._why.get(self.address) == said:  # as at the last attempt, a second ago
                level = logging.DEBUG
            self._why[self.address] = said
            log.log(level, "lost the orchestrator at %s: %s", self.address, said)
            trailers = error.trailing_metadata()
        except asyncio.CancelledError:
            if not self._renewing:
                raise
        finally:
            self._outbox = self._call = None
            self._renewing = False
            self.attached.clear()
            for number in tuple(self._echoes):
                self._echoed(number)
            outbox.end()  # what gRPC still waits for
            outbox.answered()
            call.cancel()
        return welcomed, trailers

    def _welcome(self, welcome: pb.AgentWelcome) -> None:
        self.orchestrator = welcome.orchestrator
        self._why.clear()
        self.unknown_groups = tuple(welcome.unknown_groups)
        if self.unknown_groups:
            log.warning("the orchestrator has no such groups: %s", ", ".join(self.unknown_groups))
        self.attached.set()


async def _answers(channel: grpc.aio.Channel) -> bool:
    """Connected, within one attempt?"""
    try:
        async with asyncio.timeout(ATTEMPT_S):
            while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    return False
                await channel.wait_for_state_change(state)
    except TimeoutError:
        return False
    return True
