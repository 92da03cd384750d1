"""The stream to the agent: registers this process, carries out the agent's moves, comes back after any loss.

One thread per group. It knows the wire and the order of messages; what a move is, the registry knows. The
stream is HTTP/2 with keepalive, so a lost agent is noticed without heartbeats of ours; the state stays where
it is meanwhile, and the next agent is told whether it is parked and given the host buffer back.
"""

import os
import queue
import random
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from coslice.errors import ConfigError, CosliceError, Denied, OperationFailed
from coslice.security import redact
from coslice.security.credentials import PLAIN, Credentials
from coslice.wire.status import code_of, error_of
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc
from coslice.workload import ticket
from coslice.workload.buffers import AgentBuffers
from coslice.workload.mover import stay_on
from coslice.workload.registry import DISCARD, MID_PHASE, OFFLOAD, PARTS, GroupState

_log = redact.logger("coslice")
_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # what gRPC obeys: its default is 60 s
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)
_BACKOFF_FIRST, _BACKOFF_LAST = 0.05, 2.0
_HOPELESS = (pb.INVALID, pb.UNKNOWN_GROUP)
"""Refusals that trying again does not change."""
_Outbox = queue.SimpleQueue


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who registers, in the words of the wire."""

    job: str
    incarnation: str
    group: str
    rank: int
    device: str
    backend: str = ""
    """What shall move the state, as the agent writes it: ``NAME:key=value,…``; empty: the agent's default."""
    socket: str = ""
    """The agent's unix socket as this process sees it; empty: the agent says where it is."""
    credentials: Credentials = PLAIN


class Channel:
    """``error``: why the agent does not serve us; None while it does, or has not answered yet."""

    def __init__(self, address: str, identity: Identity, state: GroupState, buffers: AgentBuffers) -> None:
        self.address, self.identity = address, identity
        self.need = 0
        """Declared need of device memory in bytes; 0: unknown."""
        self.error: CosliceError | None = None
        self._state, self._buffers = state, buffers
        self._outbox: _Outbox[pb.WorkloadMessage | None] = _Outbox()
        self._told: tuple[object, ...] = ()
        self._last: tuple[str, pb.WorkloadMessage] | None = None
        self._delay = _BACKOFF_FIRST
        self._awaited = False
        """Does the registering thread wait, and so nobody use what is registered?"""
        self._answered, self._settled, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._call: Any = None
        self._thread: threading.Thread | None = None

    def start(self, cpus: Collection[int] = ()) -> None:
        """Begin dialling. ``cpus``: cores for its threads; none: those of the calling thread."""
        target = lambda: self._run(cpus)  # noqa: E731
        self._thread = threading.Thread(target=target, name="coslice-channel", daemon=True)
        self._thread.start()

    def wait_answered(self, timeout: float) -> bool:
        """Wait until the agent has admitted or refused us; False: nobody answers (we go on dialling).

        ``timeout`` is for its first word. Setting our state aside takes as long as it takes; the agent bounds
        it.
        """
        self._awaited = True
        if not self._answered.wait(timeout):
            self._awaited = False
            return False
        self._settled.wait()
        self._awaited = False
        return True

    def resized(self, state_bytes: int) -> None:
        """Tell the agent the size and the need, if they changed. Never blocks."""
        unkept, shared = self._state.unkept, self._state.shared
        told = (state_bytes, self.need, unkept, shared)
        if self._told != told:
            self._told = told
            message = pb.Resized(
                state_bytes=state_bytes, need_bytes=self.need, unkept_bytes=unkept, bases=_bases(shared)
            )
            self._outbox.put(pb.WorkloadMessage(resized=message))

    def close(self) -> None:
        self._stop.set()
        _cancel(self._call)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    # ── the thread ─────────────────────────────────────────────────────────

    def _run(self, cpus: Collection[int]) -> None:
        stay_on(cpus)
        while not self._stop.is_set():
            try:
                self._serve()
            except grpc.RpcError as error:
                _log.debug("coslice: the stream to the agent at %s ended: %s", self.address, error)
            except Exception:
                _log.exception("coslice: the channel to the agent failed; opening it again")
            # Backing off, not polling: an agent that is away does not say when it will be back.
            self._stop.wait(self._delay * random.uniform(0.5, 1.0))
            self._delay = min(self._delay * 2, _BACKOFF_LAST)

    def _serve(self) -> None:
        """One stream, from the registration to its end."""
        outbox: _Outbox[pb.WorkloadMessage | None] = _Outbox()
        credentials = self.identity.credentials
        try:
            metadata = credentials.metadata(self.address)
            dialled = credentials.channel(self.address, _OPTIONS)
        except CosliceError as error:
            return self._unserved(error)
        with dialled as channel:
            stub = rpc.AgentStub(channel)
            try:
                proof = self._ticket(stub, metadata)
            except CosliceError as error:
                return self._unserved(error)
            outbox.put(self._registration(proof))
            self._outbox = outbox
            call = stub.Channel(iter(outbox.get, None), wait_for_ready=True, metadata=metadata)
            self._call = call
            if self._stop.is_set():  # closed just now: nobody else will cancel this call
                _cancel(call)
            try:
                for command in call:
                    self._obey(command, outbox)
            finally:
                _cancel(call)
                outbox.put(None)  # lets grpc's sending thread go
                if self._answered.is_set():  # lost while it was admitting us: the next one will
                    self._settled.set()

    def _ticket(self, stub: rpc.AgentStub, metadata: tuple[tuple[str, str], ...]) -> str:
        """What proves to the agent which process we are; empty for an agent that wants none."""
        path = self.identity.socket
        if not path:
            call = stub.GetNodeStatus.future(
                pb.GetNodeStatusRequest(), wait_for_ready=True, metadata=metadata
            )
            self._call = call
            if self._stop.is_set():
                _cancel(call)
            try:
                path = call.result().socket
            except grpc.FutureCancelledError:
                return ""
            except grpc.RpcError as error:
                if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                    raise Denied(f"the agent at {self.address}: {error.details()}") from None
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                raise ConfigError(
                    f"{self.address} is no agent; an orchestrator, perhaps: COSLICE_AGENT and "
                    "COSLICE_ORCHESTRATOR may be swapped"
                ) from None
        return ticket.fetch(path) if path else ""

    def _registration(self, proof: str) -> pb.WorkloadMessage:
        state, identity = self._state, self.identity
        state.bring_ahead(0)  # what was brought for an agent that is gone
        size = state.measure()
        unkept, shared = state.unkept, state.shared
        self._told = (size, self.need, unkept, shared)
        register = pb.Register(
            job=identity.job,
            incarnation=identity.incarnation,
            group=identity.group,
            pid=os.getpid(),
            start_time=start_time(),
            rank=identity.rank,
            state_bytes=size,
            need_bytes=self.need,
            parked=state.parked(),
            parked_bytes=_away(state, size),
            modes=_modes(state),
            device=identity.device,
            backend=identity.backend,
            ticket=proof,
            unkept_bytes=unkept,
            bases=_bases(shared),
        )
        return pb.WorkloadMessage(register=register)

    def _obey(self, command: pb.WorkloadCommand, outbox: "_Outbox[pb.WorkloadMessage | None]") -> None:
        match command.WhichOneof("kind"):
            case "registered":
                self._accepted(command.registered)
            case "refused":
                self._refused(command.refused)
            case "admitted":
                self._admitted()
            case "move_out":
                outbox.put(self._once(command.move_out.op, command))
            case "move_in":
                outbox.put(self._once(command.move_in.op, command))
            case "prepare":
                self._prepare(command.prepare.buffer_bytes)
            case "bring_ahead":
                outbox.put(self._bring_ahead(command.bring_ahead))
            case unknown:
                _log.warning("coslice: the agent sent %s, which this version does not know; ignored", unknown)

    def _accepted(self, answer: pb.Registered) -> None:
        self.error, self._delay = None, _BACKOFF_FIRST
        try:
            self._buffers.connect(answer.buffer_socket, answer.buffer_token)
        except CosliceError as error:
            _log.warning("coslice: the agent did not take its host buffer back: %s", error)
        if self._buffers.uses_device:  # it knows only now what of our state is not in our figures
            self._told = ()
            self.resized(self._state.measure())
        self._answered.set()

    def _admitted(self) -> None:
        try:
            if self._awaited:
                self._state.join_if_idle()
                self.resized(self._state.measure())
        finally:
            self._settled.set()

    def _refused(self, answer: pb.RegisterRefused) -> None:
        error = error_of(
            answer.code, f"the agent at {self.address} does not take this process: {answer.message}"
        )
        self._unserved(error)
        if answer.code in _HOPELESS:
            self._stop.set()
        _cancel(self._call)

    def _unserved(self, error: CosliceError) -> None:
        if str(error) != str(self.error):
            _log.warning("coslice: %s", error)
        self.error = error
        self._answered.set()
        self._settled.set()

    def _once(self, op: str, command: pb.WorkloadCommand) -> pb.WorkloadMessage:
        """The answer to a move. Asked again for the last one that succeeded, the same answer without moving.

        Only the last: an older name may come again for a new try after a move back. A failed move changed
        nothing, so asking again means trying again.
        """
        if self._last is not None and self._last[0] == op:
            return self._last[1]
        try:
            answer = pb.WorkloadMessage(moved=self._move(op, command))
        except BaseException as error:  # the thread must outlive whatever a callback raises
            told = error
            if not isinstance(told, CosliceError):
                told = OperationFailed(f"{type(error).__name__}: {error}")
            _log.warning("coslice: %s failed: %s", op, told)
            return pb.WorkloadMessage(move_failed=pb.MoveFailed(op=op, code=code_of(told), message=str(told)))
        self._last = (op, answer)
        return answer

    def _move(self, op: str, command: pb.WorkloadCommand) -> pb.Moved:
        if command.WhichOneof("kind") == "move_out":
            out, outbox = command.move_out, self._outbox
            tell = lambda gone: outbox.put(pb.WorkloadMessage(leaving=pb.Leaving(op=op, bytes=gone)))  # noqa: E731
            move = self._state.move_out(
                wait=out.deadline_s,
                mode=out.mode or OFFLOAD,
                tags=frozenset(out.tags),
                least=out.at_least_bytes,
                give_way=tell if out.give_way else None,
            )
        else:
            move = self._state.move_in()
        size = self._state.measure()
        self.resized(size)  # first: the agent compares with what was registered
        return pb.Moved(
            op=op,
            bytes=move.bytes,
            seconds=move.seconds,
            wait_s=move.wait,
            device_bytes_before=move.device_before,
            device_bytes_after=move.device_after,
            copied_bytes=move.copied,
            copy_s=move.copy_seconds,
            left_bytes=max(0, size - self._state.parked_bytes),
        )

    def _prepare(self, size: int) -> None:
        """Best effort: a move gets its memory itself if it must."""
        try:
            self._state.prepare(size)
        except CosliceError as error:
            _log.debug("coslice: no host memory made ready: %s", error)

    def _bring_ahead(self, asked: pb.BringAhead) -> pb.WorkloadMessage:
        try:
            here = self._state.bring_ahead(asked.most_bytes)
            return pb.WorkloadMessage(ahead=pb.Ahead(op=asked.op, bytes=here, ok=True))
        except CosliceError as error:  # nothing is lost: the move in says what is wrong, if it still is
            _log.info("coslice: %s: nothing brought ahead: %s", asked.op, error)
            return pb.WorkloadMessage(ahead=pb.Ahead(op=asked.op, message=str(error)))


def _away(state: GroupState, size: int) -> int:
    """Parked bytes; a byte less than all while it shares weights that are on the device."""
    return min(state.parked_bytes, size - 1) if state.has_common else state.parked_bytes


def _bases(shared: Sequence[tuple[str, int]]) -> list[pb.SharedBase]:
    return [pb.SharedBase(digest=digest, bytes=size) for digest, size in shared]


def _modes(state: GroupState) -> list[str]:
    discard = [DISCARD] if state.may_discard() else []
    at_any_time = [MID_PHASE] if state.may_freeze() else []
    return [OFFLOAD, *discard, *([PARTS] if state.may_divide() else []), *at_any_time]


def _cancel(call: Any) -> None:
    if call is not None:
        call.cancel()


def start_time() -> int:
    """Field 22 of ``/proc/self/stat`` (proc(5)): with the pid it names this process for good."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2]
    return int(after_name.split()[19])
