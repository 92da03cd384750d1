"""A workload process for the agent's tests: real memory, real channel, no framework. Run it as a script.

Its state is anonymous memory (``mmap``) filled with a pattern. On MoveOut it copies it into the agent's
memory file and unmaps it; on MoveIn it maps it anew, copies it back and checks the pattern. Misbehaviour
is chosen with ``--lie`` (says Moved, frees nothing), ``--hang`` (never answers), ``--busy N`` (BUSY for
the first N moves), ``--die`` (exits on the first MoveOut), ``--slow S`` (answers MoveOut after S
seconds), ``--hold`` (answers none before it is told ``go``), ``--keep N`` (so much of what it gave back is
kept by its allocator, and used again on MoveIn), ``--refuse-back`` (MoveIn fails). Commands arrive as lines
on stdin: ``grow N``, ``use N`` (anonymous memory that is not state), ``drop``, ``reconnect``, ``check``,
``busy N``, ``go``, ``free`` (its state), ``close`` (its channel, and live on), ``open N`` (it again, with
state made anew, and says that N bytes of it are in host memory). Facts go out as JSON lines.
"""

import argparse
import json
import mmap
import os
import queue
import socket
import sys
import threading
import time
from pathlib import Path

import grpc

from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

MIB = 1 << 20


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")  # at once: two threads speak
    sys.stdout.flush()


def fill(size: int, seed: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page = bytes((seed + i) % 251 for i in range(4096))
    for at in range(0, size, 4096):
        memory[at : at + 4096] = page[: min(4096, size - at)]
    return memory


def copy(source: mmap.mmap, target: mmap.mmap) -> None:
    """Without a copy in between, which would be memory beyond the state."""
    with memoryview(source) as here, memoryview(target) as there:
        there[:] = here


class Workload:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.seed = os.getpid() % 200
        self.state: mmap.mmap | None = fill(options.bytes, self.seed)
        self.size = options.bytes
        self.extra: list[mmap.mmap] = []
        self.busy, self.away = options.busy, 0
        self.registered = pb.Registered()
        self.fd = -1
        self.call: grpc.Call | None = None
        self.restart = threading.Event()
        self.went, self.open = threading.Event(), threading.Event()
        self.open.set()

    def run(self) -> None:
        threading.Thread(target=self.commands, daemon=True).start()
        pause = threading.Event()
        while self.open.wait():
            self.restart.clear()
            try:
                self.serve()
            except grpc.RpcError as error:
                say(event="disconnected", code=error.code().name)
            pause.wait(0.05)  # the agent may be starting

    def register(self) -> pb.Register:
        stat = Path("/proc/self/stat").read_text()
        return pb.Register(
            job=self.options.job,
            incarnation=self.options.incarnation,
            group=self.options.group,
            pid=self.options.pid or os.getpid(),
            start_time=self.options.start_time or int(stat[stat.rindex(")") + 2 :].split()[19]),
            rank=self.options.rank,
            state_bytes=self.size,
            parked=self.state is None or self.away > 0,
            parked_bytes=self.size if self.state is None else self.away,
            need_bytes=self.options.need,
            modes=["offload"],
            device=self.options.device,
        )

    def serve(self) -> None:
        outgoing: queue.SimpleQueue[pb.WorkloadMessage | None] = queue.SimpleQueue()
        self.outgoing = outgoing
        with grpc.insecure_channel(self.options.agent, [("grpc.max_reconnect_backoff_ms", 200)]) as channel:
            grpc.channel_ready_future(channel).result(timeout=30)
            stub = rpc.AgentStub(channel)
            token = self.options.token
            shown = [("authorization", f"Bearer {token}")] if token else []
            register = self.register()
            if not self.options.ticket:
                register.ticket = self.ticket(
                    stub.GetNodeStatus(pb.GetNodeStatusRequest(), timeout=30, metadata=shown).socket
                )
            elif self.options.ticket != "none":
                register.ticket = self.options.ticket
            outgoing.put(pb.WorkloadMessage(register=register))
            self.call = stub.Channel(iter(outgoing.get, None), metadata=shown)
            for command in self.call:
                self.hear(command)
        outgoing.put(None)

    def ticket(self, path: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(b'{"ticket": true}\n')
            answer = json.loads(connection.recv(65536))
        return str(answer.get("ticket", ""))

    def hear(self, command: pb.WorkloadCommand) -> None:
        kind = command.WhichOneof("kind")
        if kind == "registered":
            self.registered = command.registered
            if self.state is None and self.fd >= 0:
                self.give_back()
            say(event="registered", pid=os.getpid(), member=self.registered.member)
        elif kind == "refused":
            say(event="refused", code=pb.Code.Name(command.refused.code), message=command.refused.message)
            os._exit(3)
        elif kind == "admitted":
            say(event="admitted")
        elif kind == "move_out":
            self.move_out(command.move_out)
        elif kind == "move_in":
            self.move_in(command.move_in)

    def move_out(self, move: pb.MoveOut) -> None:
        if self.options.hang:
            return
        if self.options.die:
            os._exit(9)
        if self.busy > 0:
            self.busy -= 1
            self.answer(
                failed=pb.MoveFailed(op=move.op, code=pb.BUSY, message="inside an accelerator section")
            )
            return
        if self.state is not None and not self.options.lie:
            fd = self.buffer(self.size)
            with mmap.mmap(fd, self.size) as shared:
                copy(self.state, shared)
            self.fd = fd
            self.state.close()
            self.state = None
            if self.options.keep and not self.extra:
                self.extra.append(fill(self.options.keep, 7))
        say(event="moved_out")
        time.sleep(self.options.slow)
        if self.options.hold and not self.went.wait(30):
            os._exit(4)
        moved = pb.Moved(op=move.op, bytes=self.size, seconds=0.001)
        if self.options.device == "cuda":
            moved.device_bytes_before = self.size + MIB
            moved.device_bytes_after = moved.device_bytes_before if self.options.lie else MIB
        self.answer(moved=moved)

    def move_in(self, move: pb.MoveIn) -> None:
        if self.options.refuse_back:
            self.answer(failed=pb.MoveFailed(op=move.op, code=pb.FAILED, message="cannot map the state"))
            return
        if self.state is None:
            if self.options.keep:
                self.extra.clear()
            memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with mmap.mmap(self.fd, self.size) as shared:
                copy(shared, memory)
            self.state = memory
        say(event="moved_in", intact=self.intact())
        self.answer(moved=pb.Moved(op=move.op, bytes=self.size, seconds=0.001))

    def intact(self) -> bool:
        if self.state is None:
            return False
        page = bytes((self.seed + i) % 251 for i in range(4096))
        return all(self.state[at : at + 4096] == page for at in range(0, self.size, 4096))

    def answer(self, *, moved: pb.Moved | None = None, failed: pb.MoveFailed | None = None) -> None:
        self.outgoing.put(pb.WorkloadMessage(moved=moved, move_failed=failed))

    def ask(self, request: dict[str, object], fds: list[int]) -> tuple[dict[str, object], list[int]]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.registered.buffer_socket)
            socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], fds)
            data, received, _, _ = socket.recv_fds(connection, 65536, 1)
        return json.loads(data), list(received)

    def buffer(self, size: int) -> int:
        answer, fds = self.ask({"token": self.registered.buffer_token, "bytes": size}, [])
        if not answer["ok"]:
            raise MemoryError(answer)
        return fds[0]

    def give_back(self) -> None:
        answer, _ = self.ask({"token": self.registered.buffer_token, "bytes": 0, "give": True}, [self.fd])
        say(event="gave_back", ok=answer["ok"])

    def commands(self) -> None:
        for line in sys.stdin:
            word, _, rest = line.strip().partition(" ")
            if word == "use":
                self.extra.append(fill(int(rest), 7))
            elif word == "check":
                say(event="checked", intact=self.intact())
            elif word == "busy":
                self.busy = int(rest)
            elif word == "go":
                self.went.set()
            elif word == "drop":
                self.extra.clear()
            elif word == "grow":
                assert self.state is not None
                self.state.close()
                self.size += int(rest)
                self.state = fill(self.size, self.seed)
                self.outgoing.put(pb.WorkloadMessage(resized=pb.Resized(state_bytes=self.size)))
            elif word == "free" and self.state is not None:
                self.state.close()
                self.state = None
            elif word == "open":
                self.state, self.away = fill(self.size, self.seed), int(rest or 0)
                self.open.set()
            elif word in ("reconnect", "close") and self.call is not None:
                if word == "close":
                    self.open.clear()
                self.call.cancel()
            say(event="did", word=word)
        os._exit(0)  # the test is over


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--group", default="")
    parser.add_argument("--incarnation", default="run-1")
    parser.add_argument("--bytes", type=int, default=64 * MIB)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ticket", default="")
    parser.add_argument("--token", default="")
    parser.add_argument("--pid", type=int, default=0)
    parser.add_argument("--start-time", type=int, default=0)
    parser.add_argument("--device", default="host")
    parser.add_argument("--need", type=int, default=0)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--keep", type=int, default=0)
    parser.add_argument("--hold", action="store_true")
    for flag in ("lie", "hang", "die", "refuse-back"):
        parser.add_argument(f"--{flag}", action="store_true")
    Workload(parser.parse_args()).run()
