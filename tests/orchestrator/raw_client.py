"""One session on the bare wire: what a client sends, message by message."""

import asyncio
import itertools
import uuid
from typing import Any

import grpc.aio

from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc

BOUND = 20.0


class RawClient:
    """Answers are sorted by request id; everything else (lost leases, requests to yield) goes to ``news``."""

    def __init__(
        self, address: str, job: str, *, incarnation: str = "one", session: str = "", profile: str = ""
    ) -> None:
        self.session = session or uuid.uuid4().hex
        self.job, self.incarnation, self.profile = job, incarnation, profile
        self.news: asyncio.Queue[pb.ServerMessage] = asyncio.Queue()
        self.welcome: pb.Welcome | None = None
        self.hello_refused: pb.Refused | None = None
        self.ended = asyncio.Event()
        self.status: grpc.StatusCode | None = None
        self._answers: dict[str, asyncio.Future[pb.ServerMessage]] = {}
        self._ids = itertools.count(1)
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub: Any = pb_grpc.OrchestratorStub(self._channel)
        self._stream: Any = None
        self._reader: asyncio.Task[None] | None = None

    async def connect(self, *, pid: int = 0, node: str = "host-a", started: int = 0) -> "RawClient":
        """Say hello; returns once welcomed or refused."""
        self.ended.clear()
        self.welcome = None
        self._stream = self.stub.Session(wait_for_ready=True)
        hello = pb.Hello(job=self.job, incarnation=self.incarnation, session=self.session, node=node)
        hello.pid, hello.start_time, hello.profile = pid, started, self.profile
        await self.send(hello=hello)
        greeted = self._answer("")
        self._reader = asyncio.create_task(self._read())
        async with asyncio.timeout(BOUND):
            first = await greeted
        if first.HasField("welcome"):
            self.welcome = first.welcome
        else:
            self.hello_refused = first.refused
        return self

    async def send(self, **kind: Any) -> None:
        await self._stream.write(pb.ClientMessage(**kind))

    def kill(self) -> None:
        """The process is gone: its stream breaks without a goodbye."""
        self._stream.cancel()

    async def goodbye(self) -> None:
        await self.send(goodbye=pb.Goodbye())
        async with asyncio.timeout(BOUND):
            await self.ended.wait()

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    # ── verbs ──────────────────────────────────────────────────────────────

    def next_id(self) -> str:
        return f"{self.session}/{next(self._ids)}"

    async def ask(self, *groups: str, request: str = "", world: int = 0) -> str:
        """Send an acquire; its answer is for ``answer``."""
        request = request or self.next_id()
        self._answer(request)
        await self.send(acquire=pb.Acquire(request=request, groups=groups, world=world))
        return request

    async def answer(self, request: str) -> pb.ServerMessage:
        async with asyncio.timeout(BOUND):
            return await self._answer(request)

    def forget(self, request: str) -> None:
        """As if the answer had been lost."""
        self._answers.pop(request, None)

    def answered(self, request: str) -> bool:
        return self._answer(request).done()

    async def granted(self, request: str) -> pb.Granted:
        """The grant of an acquire, confirmed."""
        answer = await self.answer(request)
        assert answer.HasField("granted"), answer
        await self.send(confirm=pb.Confirm(request=request))
        return answer.granted

    async def refused(self, request: str) -> pb.Refused:
        answer = await self.answer(request)
        assert answer.HasField("refused"), answer
        return answer.refused

    async def acquire(self, *groups: str) -> pb.Granted:
        return await self.granted(await self.ask(*groups))

    async def give(self, granted: pb.Granted, request: str = "") -> pb.ServerMessage:
        """Yield all leases of a grant; the answer may be a refusal."""
        request = request or self.next_id()
        leases = [pb.LeaseRef(group=lease.group, epoch=lease.epoch) for lease in granted.leases]
        self._answers.pop(request, None)
        self._answer(request)
        await self._stream.write(_yield(request, leases))
        return await self.answer(request)

    async def yielded(self, granted: pb.Granted, request: str = "") -> pb.Yielded:
        answer = await self.give(granted, request)
        assert answer.HasField("yielded"), answer
        return answer.yielded

    async def abandon(self, request: str) -> None:
        await self.send(abandon=pb.Abandon(request=request, reason="the test changed its mind"))

    # ── questions ──────────────────────────────────────────────────────────

    async def group(self, name: str) -> pb.GroupStatus:
        answer = await self.stub.GetStatus(pb.GetStatusRequest(group=name), timeout=BOUND)
        return answer.groups[0]

    async def until(self, name: str, condition: Any) -> pb.GroupStatus:
        """The first status of the group that meets ``condition``."""
        async with asyncio.timeout(BOUND):
            async for answer in self.stub.WatchStatus(pb.GetStatusRequest(group=name)):
                if condition(answer.groups[0]):
                    return answer.groups[0]
        raise AssertionError("the watch ended")

    async def explain(self, group: str, job: str = "") -> list[str]:
        answer = await self.stub.Explain(pb.ExplainRequest(group=group, job=job), timeout=BOUND)
        return list(answer.lines)

    # ── reading ────────────────────────────────────────────────────────────

    def _answer(self, request: str) -> asyncio.Future[pb.ServerMessage]:
        if request not in self._answers:
            self._answers[request] = asyncio.get_running_loop().create_future()
        return self._answers[request]

    async def _read(self) -> None:
        try:
            async for message in self._stream:
                kind = message.WhichOneof("kind")
                if kind in ("lease_lost", "should_yield"):
                    self.news.put_nowait(message)
                    continue
                answer = self._answer("" if kind == "welcome" else getattr(message, kind).request)
                if not answer.done():
                    answer.set_result(message)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
        finally:
            self.status = await self._stream.code() if self._stream.done() else None
            self._answers.pop("", None)
            self.ended.set()


def _yield(request: str, leases: list[pb.LeaseRef]) -> pb.ClientMessage:
    message = pb.ClientMessage()
    getattr(message, "yield").CopyFrom(pb.Yield(request=request, leases=leases))
    return message
