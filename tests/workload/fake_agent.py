"""An agent that registers processes, hands out buffers and sends what a test tells it to: no policy."""

import json
import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

PATIENCE = 30.0
"""Seconds until a test gives up on something that must come."""


@dataclass
class Stream:
    """One open channel as the agent sees it."""

    register: pb.Register
    commands: "queue.SimpleQueue[pb.WorkloadCommand | None]" = field(default_factory=queue.SimpleQueue)
    heard: "queue.SimpleQueue[pb.WorkloadMessage]" = field(default_factory=queue.SimpleQueue)
    resized: list[pb.Resized] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def ask(self, command: pb.WorkloadCommand) -> pb.WorkloadMessage:
        self.commands.put(command)
        return self.answer()

    def answer(self) -> pb.WorkloadMessage:
        """The next answer to a move; sizes heard on the way are kept in ``resized``."""
        while True:
            message = self.heard.get(timeout=PATIENCE)
            if message.WhichOneof("kind") != "resized":
                return message
            self.resized.append(message.resized)

    def move_out(
        self, op: str, *, mode: str = "offload", tags: tuple[str, ...] = (), wait: float = 5.0
    ) -> pb.WorkloadMessage:
        out = pb.MoveOut(op=op, mode=mode, tags=tags, deadline_s=wait)
        return self.ask(pb.WorkloadCommand(move_out=out))

    def move_in(self, op: str) -> pb.WorkloadMessage:
        return self.ask(pb.WorkloadCommand(move_in=pb.MoveIn(op=op, deadline_s=5.0)))


class FakeAgent(rpc.AgentServicer):
    """``budget``: host bytes it has. ``refuse``: answer to every registration."""

    def __init__(self, directory: Path, *, port: int = 0, budget: int = 1 << 30) -> None:
        self.budget = budget
        self.refuse: pb.RegisterRefused | None = None
        self.streams: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self.given_back: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.files: dict[int, int] = {}
        """pid → descriptor of its buffer"""
        self._token = os.urandom(8).hex()
        self._path = str(directory / f"buffers-{self._token}")
        self._open: list[Stream] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        rpc.add_AgentServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"

    def __enter__(self) -> "FakeAgent":
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._path)
        self._listener.listen()
        threading.Thread(target=self._hand_out, daemon=True).start()
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        self._server.stop(grace=0).wait()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for fd in self.files.values():
            os.close(fd)

    def hang_up(self) -> None:
        """End every open channel."""
        for stream in self._open:
            stream.commands.put(None)

    def stream(self) -> Stream:
        """The next process that registered."""
        return self.streams.get(timeout=PATIENCE)

    def GetNodeStatus(
        self, request: pb.GetNodeStatusRequest, context: grpc.ServicerContext
    ) -> pb.GetNodeStatusResponse:
        return pb.GetNodeStatusResponse(socket=self._path)

    def Channel(
        self, request_iterator: Iterator[pb.WorkloadMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.WorkloadCommand]:
        register = next(request_iterator).register
        if self.refuse is not None:
            yield pb.WorkloadCommand(refused=self.refuse)
            return
        stream = Stream(register)
        self._open.append(stream)
        threading.Thread(target=self._listen, args=(stream, request_iterator), daemon=True).start()
        member = f"{register.job}/{register.incarnation}/{register.pid}"
        yield pb.WorkloadCommand(
            registered=pb.Registered(member=member, buffer_socket=self._path, buffer_token=self._token)
        )
        yield pb.WorkloadCommand(admitted=pb.Admitted())
        self.streams.put(stream)
        yield from iter(stream.commands.get, None)

    def _listen(self, stream: Stream, messages: Iterator[pb.WorkloadMessage]) -> None:
        try:
            for message in messages:
                stream.heard.put(message)
        except grpc.RpcError:
            pass
        stream.over.set()
        stream.commands.put(None)

    # ── the buffer socket ──────────────────────────────────────────────────

    def _hand_out(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        line, fds, _, _ = socket.recv_fds(connection, 4096, 1)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid = struct.unpack("3i", credentials)[0]
        request = json.loads(line)
        assert line.endswith(b"\n")
        if request.get("ticket"):
            return self._say(connection, {"ok": True, "ticket": f"ticket of {pid}"})
        if request["token"] != self._token:
            return self._say(connection, {"ok": False, "code": "INVALID", "message": "another's token"})
        if request.get("give"):
            self.files[pid] = fds[0]
            self.given_back.put(pid)
            return self._say(connection, {"ok": True, "bytes": os.fstat(fds[0]).st_size})
        if request["bytes"] > self.budget:
            refusal = {"ok": False, "code": "NO_ROOM", "message": f"budget of {self.budget} bytes"}
            return self._say(connection, refusal)
        fd = self.files.setdefault(pid, -1)
        if fd < 0:
            fd = self.files[pid] = os.memfd_create("fake")
        os.ftruncate(fd, max(os.fstat(fd).st_size, request["bytes"]))
        return self._say(connection, {"ok": True, "bytes": os.fstat(fd).st_size}, fd)

    @staticmethod
    def _say(connection: socket.socket, answer: dict[str, object], fd: int | None = None) -> None:
        socket.send_fds(connection, [json.dumps(answer).encode() + b"\n"], [] if fd is None else [fd])
