"""A workload process that speaks llm-d's channel as its Python client does: no pid, no sizes, no names of
operations; it registers anew after every loss of the stream, and carries out one command at a time.

Run it as a script. Its state is anonymous memory; on a snapshot it copies it into a memory file of its own.
It is strict: a snapshot of what is away, or a restore of what is here, ends it. Misbehaviour: ``--lie`` (says
ok, frees nothing), ``--fail`` (says that it failed), ``--slow S``, ``--hold`` (answers no snapshot before it
is told ``go``), ``--hold-back`` (nor a restore), ``--late`` (has no state before it is told ``fill``).
Commands arrive as lines on stdin: ``check``, ``go``, ``fill``, ``free`` (its state), ``drop`` (the stream),
``close`` (it for good, as ``handle.close()`` does, and live on), ``open`` (it again). Facts go out as JSON
lines.
"""

import argparse
import mmap
import os
import queue
import random
import sys
import threading
import time

import grpc
from fake_workload import copy, fill, say

from coslice.wire.upstream import snapshot_agent_pb2 as up
from coslice.wire.upstream.snapshot_agent_pb2_grpc import SnapshotAgentServiceStub


class Workload:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.size = options, options.bytes
        self.went, self.open = threading.Event(), threading.Event()
        self.open.set()
        self.call: grpc.Call | None = None
        if options.late:
            self.state: mmap.mmap | None = None
        else:
            self.state = fill(self.size, 5)
        self.file = -1

    def run(self) -> None:
        threading.Thread(target=self.commands, daemon=True).start()
        backoff = 0.1
        while self.open.wait():
            outgoing: queue.SimpleQueue[up.WorkloadMessage | None] = queue.SimpleQueue()
            began = time.monotonic()
            with grpc.insecure_channel(self.options.agent) as channel:
                capabilities = up.WorkloadCapabilities(
                    supported_modes=self.options.modes, default_mode=self.options.default_mode
                )
                register = up.RegisterWorkload(
                    job_id=self.options.job, group=self.options.group, capabilities=capabilities
                )
                outgoing.put(up.WorkloadMessage(register=register))
                try:
                    self.call = SnapshotAgentServiceStub(channel).WorkloadChannel(iter(outgoing.get, None))
                    say(event="connected")
                    for command in self.call:
                        result = self.carry_out(command)
                        result.command_id = command.command_id
                        outgoing.put(up.WorkloadMessage(result=result))
                    say(event="closed")
                except grpc.RpcError as error:
                    say(event="disconnected", code=error.code().name, text=error.details())
                outgoing.put(None)
            backoff = 0.1 if time.monotonic() - began > 5 else min(2.0, 2 * backoff)
            time.sleep(backoff * random.uniform(0.5, 1.5))  # between two dials, as llm-d's client has it

    def carry_out(self, command: up.AgentCommand) -> up.CommandResult:
        if command.HasField("restore"):
            self.restore()
            if self.options.hold_back:
                say(event="back")
                self.hold()
            say(event="restored", tags=list(command.restore.tags), intact=self.intact())
            return up.CommandResult(ok=True)
        mode, tags = command.snapshot.mode, list(command.snapshot.tags)
        say(event="told", mode=mode, tags=tags)
        if self.options.fail:
            return up.CommandResult(ok=False, error="RuntimeError: no")
        if not self.options.lie:
            self.snapshot()
        time.sleep(self.options.slow)  # a move that takes long, as the test asks for
        if self.options.hold:
            self.hold()
        say(event="saved")
        return up.CommandResult(ok=True)

    def hold(self) -> None:
        if not self.went.wait(60):
            os._exit(4)

    def snapshot(self) -> None:
        if self.state is None:
            say(event="misused", what="snapshot")
            os._exit(5)
        self.file = os.memfd_create("saved")
        os.ftruncate(self.file, self.size)
        with mmap.mmap(self.file, self.size) as shared:
            copy(self.state, shared)
        self.state.close()
        self.state = None

    def restore(self) -> None:
        if self.options.lie:
            return
        if self.state is not None:
            say(event="misused", what="restore")
            os._exit(5)
        memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with mmap.mmap(self.file, self.size) as shared:
            copy(shared, memory)
        os.close(self.file)
        self.state = memory

    def intact(self) -> bool:
        page = bytes((5 + i) % 251 for i in range(4096))
        state = self.state
        return state is not None and all(state[at : at + 4096] == page for at in range(0, self.size, 4096))

    def commands(self) -> None:
        for line in sys.stdin:
            word = line.strip()
            if word == "go":
                self.went.set()
            elif word == "fill":
                self.state = fill(self.size, 5)
            elif word == "free" and self.state is not None:
                self.state.close()
                self.state = None
            elif word in ("drop", "close") and self.call is not None:
                if word == "close":
                    self.open.clear()
                self.call.cancel()
            elif word == "open":
                self.open.set()
            elif word == "check":
                say(event="checked", intact=self.intact())
            say(event="did", word=word)
        os._exit(0)  # the test is over


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--group", default="")
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--modes", type=int, nargs="*", default=[])
    parser.add_argument("--default-mode", type=int, default=0)
    for flag in ("lie", "fail", "hold", "hold-back", "late"):
        parser.add_argument(f"--{flag}", action="store_true")
    Workload(parser.parse_args()).run()
