"""An agent without devices: dials an orchestrator, keeps books of who would be where, obeys with a behaviour.

For tests of the orchestrator and of anything that needs one whole. It honours the contract of a real agent
(one answer for each operation, repeated when asked again; residency pushed with growing versions), so what it
lacks is only the moving of bytes.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio

from coslice.security.credentials import PLAIN, Credentials
from coslice.wire.cancelled import raise_if_cancelled
from coslice.wire.leader import LEADER_FOR_AGENTS, Dial
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc

Behaviour = Callable[[pb.MakeResident], Awaitable[pb.OpFailed | None]]
"""Called once for each new operation; returns None to succeed, or the failure to report."""

RECONNECT = 0.05
OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
)
"""As a real agent's: one that is cut off notices."""


def instant() -> Behaviour:
    async def behave(command: pb.MakeResident) -> pb.OpFailed | None:
        return None

    return behave


def slow(seconds: float) -> Behaviour:
    async def behave(command: pb.MakeResident) -> pb.OpFailed | None:
        await asyncio.sleep(seconds)
        return None

    return behave


def failing(
    *, culprit: str = "", times: int | None = None, stuck: bool = False, reason: str = ""
) -> Behaviour:
    """Fails the first ``times`` operations (None: all); the ``culprit`` is by default the incoming job."""
    left = times

    async def behave(command: pb.MakeResident) -> pb.OpFailed | None:
        nonlocal left
        if left is not None:
            if left == 0:
                return None
            left -= 1
        said = reason or "the fake agent was told to fail"
        return pb.OpFailed(culprit=culprit or command.job, stuck=stuck, reason=said)

    return behave


def gated(gate: asyncio.Event) -> Behaviour:
    """Succeeds once ``gate`` is set."""

    async def behave(command: pb.MakeResident) -> pb.OpFailed | None:
        await gate.wait()
        return None

    return behave


class FakeAgent:
    """``states``: bytes of registered state by job. A job without an entry has no process on the node."""

    def __init__(
        self,
        orchestrator: str,
        *,
        node: str = "n0",
        groups: Sequence[str] = ("default",),
        behaviour: Behaviour | None = None,
        states: Mapping[str, int] | None = None,
        device_budget: int = 1 << 20,
        instance: str = "",
        credentials: Credentials = PLAIN,
    ) -> None:
        self._credentials = credentials
        self.node, self.groups = node, tuple(groups)
        self.instance = instance or uuid.uuid4().hex[:8]
        self.behaviour = behaviour or instant()
        self.states = dict(states or {})
        self.on_disk = 0
        """Bytes of saved state that it says lie on disk."""
        self.expected: list[str] = []
        """Jobs that it was told are next."""
        self.forgotten: list[tuple[str, str]] = []
        """Groups and jobs that it was told to forget."""
        self.ended: list[pb.EndedProcess] = []
        """Processes that it says it saw end; ``push`` tells."""
        self.commands: list[pb.MakeResident] = []
        self.unknown_groups: tuple[str, ...] = ()
        self.refused: grpc.aio.AioRpcError | None = None
        """Set once the orchestrator refused this agent; it does not dial again."""
        self._dial = Dial(orchestrator, encrypted=credentials.encrypted, key=LEADER_FOR_AGENTS)
        self._budget = device_budget
        self._books = {group: _Books() for group in self.groups}
        self._answers: dict[str, pb.AgentMessage] = {}
        self._outgoing: asyncio.Queue[pb.AgentMessage] | None = None
        self._operations: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._stream: Any = None
        self._changed = asyncio.Condition()
        self.welcomed = 0
        """How often an orchestrator has welcomed it."""

    async def __aenter__(self) -> "FakeAgent":
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Dial, and keep dialling; returns once welcomed or refused."""
        before = self.welcomed
        self._task = asyncio.create_task(self._stay_attached())
        await self.wait_for(lambda: self.welcomed > before or self.refused is not None)

    async def stop(self) -> None:
        """Vanish, as a killed agent would."""
        tasks = [*self._operations, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._task = None

    def drop(self) -> None:
        """Break the stream; it dials again."""
        if self._stream is not None:
            self._stream.cancel()

    def live(self, group: str) -> str:
        """The job that would be on the device."""
        return self._books[group].live

    async def wait_for(self, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        """Until ``condition`` holds; looked at again after every command and every welcome."""
        async with asyncio.timeout(timeout), self._changed:
            await self._changed.wait_for(condition)

    async def wait_commands(self, count: int, timeout: float = 20.0) -> None:
        await self.wait_for(lambda: len(self.commands) >= count, timeout)

    def load(self, group: str, job: str, size: int) -> None:
        """A process of ``job`` registers ``size`` bytes that are on the device."""
        self.states[job] = size
        self._books[group].live = job
        self.push(group)

    def push(self, group: str) -> None:
        """Report what is held, unasked."""
        self._books[group].version += 1
        self._send(pb.AgentMessage(residency=self._residency(group)))

    # ── the stream ─────────────────────────────────────────────────────────

    async def _stay_attached(self) -> None:
        while self.refused is None:
            trailers: Iterable[Any] | None = None
            try:
                await self._attach()
            except grpc.aio.AioRpcError as error:
                trailers = error.trailing_metadata()
                if error.code() in (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.INVALID_ARGUMENT):
                    self.refused = error
                    await self._tell()
                    return
            except asyncio.CancelledError:
                if self._stream is None or not self._stream.cancelled():
                    raise
            raise_if_cancelled()
            if self._dial.failed(trailers):
                await asyncio.sleep(RECONNECT)  # a listener that is not there gives no notice of its return

    async def _attach(self) -> None:
        async with self._credentials.aio_channel(self._dial.address, OPTIONS) as channel:
            stub: Any = pb_grpc.OrchestratorStub(
                channel
            )  # the stubs want an iterator, which aio does not need
            self._stream = stream = stub.Attach(metadata=self._dial.metadata or None)
            outgoing: asyncio.Queue[pb.AgentMessage] = asyncio.Queue()
            self._outgoing = outgoing
            outgoing.put_nowait(pb.AgentMessage(hello=self._hello()))
            writer = asyncio.create_task(_write(stream, outgoing))
            try:
                async for command in stream:
                    await self._obey(command)
            finally:
                writer.cancel()
                self._outgoing = None
                await asyncio.wait([writer])
                if not writer.cancelled():
                    writer.exception()  # the stream was gone before: that is what ended the reading

    async def _obey(self, command: pb.AgentCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "welcome":
            self.unknown_groups = tuple(command.welcome.unknown_groups)
            self.welcomed += 1
        elif kind == "make_resident":
            self._begin(command.make_resident)
        elif kind == "forget_job":
            self.forgotten.append((command.forget_job.group, command.forget_job.job))
        elif kind == "expect":
            self.expected.append(command.expect.job)
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _begin(self, command: pb.MakeResident) -> None:
        self.commands.append(command)
        if command.op in self._answers:
            self._send(self._answers[command.op])
        elif not any(task.get_name() == command.op for task in self._operations):
            books = self._books[command.group]
            books.epoch = max(books.epoch, command.epoch)
            task = asyncio.create_task(self._operate(command), name=command.op)
            self._operations.add(task)
            task.add_done_callback(self._operations.discard)

    async def _operate(self, command: pb.MakeResident) -> None:
        group, books = command.group, self._books[command.group]
        failure = await self.behaviour(command)
        if failure is None:
            answer = pb.AgentMessage(done=books.swap(command, self.states))
            answer.done.residency.CopyFrom(self._residency(group))
        else:
            answer = pb.AgentMessage(failed=failure)
            answer.failed.op, answer.failed.group, answer.failed.epoch = command.op, group, command.epoch
            answer.failed.residency.CopyFrom(self._residency(group))
        self._answers[command.op] = answer
        self._send(answer)

    def _send(self, message: pb.AgentMessage) -> None:
        if self._outgoing is not None:
            self._outgoing.put_nowait(message)

    # ── what it says ───────────────────────────────────────────────────────

    def _hello(self) -> pb.AgentHello:
        offers = [
            pb.GroupOffer(group=group, epoch=self._books[group].epoch, residency=self._residency(group))
            for group in self.groups
        ]
        return pb.AgentHello(node=self.node, groups=offers, accelerator="host", instance=self.instance)

    def _residency(self, group: str) -> pb.Residency:
        books = self._books[group]
        contexts = [
            pb.Context(job=job, state=pb.LIVE if job == books.live else pb.SAVED, bytes=size)
            for job, size in sorted(self.states.items())
            if job == books.live or job in books.saved
        ]
        used = sum(c.bytes for c in contexts if c.state == pb.LIVE)
        return pb.Residency(
            group=group,
            version=books.version,
            contexts=contexts,
            ended=self.ended,
            device_budget_bytes=self._budget,
            device_used_bytes=used,
            disk_used_bytes=self.on_disk,
        )


class _Books:
    """Who would be on the device of one group, and whose state would be in host memory."""

    def __init__(self) -> None:
        self.live = ""
        self.saved: set[str] = set()
        self.version = 1
        self.epoch = 0

    def swap(self, command: pb.MakeResident, states: Mapping[str, int]) -> pb.OpDone:
        done = pb.OpDone(op=command.op, group=command.group, epoch=command.epoch)
        if command.job != self.live:
            if self.live in states:
                done.bytes_out = states[self.live]
                self.saved.add(self.live)
            if command.job in self.saved:
                done.restored, done.bytes_in = True, states[command.job]
                self.saved.discard(command.job)
            self.live = command.job
            self.version += 1
        return done


async def _write(stream: Any, outgoing: "asyncio.Queue[pb.AgentMessage]") -> None:
    while True:
        await stream.write(await outgoing.get())
