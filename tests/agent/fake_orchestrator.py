"""An orchestrator that only speaks Attach: tests send its commands and read what the agent reports."""

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio

from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

PATIENCE = 30.0


class FakeOrchestrator(rpc.OrchestratorServicer):
    """Keeps every report; ``until`` waits for one with a property."""

    def __init__(self) -> None:
        self.hellos: list[pb.AgentHello] = []
        self.reports: list[pb.AgentMessage] = []
        self.address = ""
        self.deaf = False
        """Echoes are kept back."""
        self._changed = asyncio.Condition()
        self._commands: asyncio.Queue[pb.AgentCommand] | None = None
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> None:
        # An agent pings every 10 s; gRPC's own limit would end its stream after half a minute.
        options = (("grpc.so_reuseport", 0), ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000))
        self._server = grpc.aio.server(options=options)
        rpc.add_OrchestratorServicer_to_server(self, self._server)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        self.address = f"127.0.0.1:{bound}"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def Attach(self, request_iterator, context):
        hello = await anext(request_iterator)
        commands: asyncio.Queue[pb.AgentCommand] = asyncio.Queue()
        self._commands = commands
        self.hellos.append(hello.hello)
        await self._note(None)
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            yield pb.AgentCommand(welcome=pb.AgentWelcome(orchestrator="fake"))
            while True:
                yield await commands.get()
        finally:
            reading.cancel()

    async def _read(self, messages) -> None:
        async for message in messages:
            await self._note(message)
            if message.HasField("echo") and not self.deaf:
                self.send(pb.AgentCommand(echo=message.echo))

    async def _note(self, message: pb.AgentMessage | None) -> None:
        async with self._changed:
            if message is not None:
                self.reports.append(message)
            self._changed.notify_all()

    def send(self, command: pb.AgentCommand) -> None:
        assert self._commands is not None, "no agent is attached"
        self._commands.put_nowait(command)

    async def make_resident(self, group: str, job: str, epoch: int, *, need: int = 0) -> pb.AgentMessage:
        """The report (done or failed) of the operation."""
        op = f"{group}/{epoch}/node-0"
        begun = len(self.reports)
        self.send(
            pb.AgentCommand(
                make_resident=pb.MakeResident(op=op, group=group, epoch=epoch, job=job, need_bytes=need)
            )
        )
        return await self.until(lambda m: op in (m.done.op, m.failed.op), since=begun)

    async def until(self, wanted: Callable[[pb.AgentMessage], bool], *, since: int = 0) -> pb.AgentMessage:
        def found() -> pb.AgentMessage | None:
            return next((m for m in self.reports[since:] if wanted(m)), None)

        async with asyncio.timeout(PATIENCE), self._changed:
            await self._changed.wait_for(lambda: found() is not None)
        report = found()
        assert report is not None
        return report

    async def attached(self, times: int = 1) -> pb.AgentHello:
        async with asyncio.timeout(PATIENCE), self._changed:
            await self._changed.wait_for(lambda: len(self.hellos) >= times)
        return self.hellos[-1]
