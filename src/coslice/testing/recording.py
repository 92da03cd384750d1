"""``RecordingOrchestrator``: grants everything at once and remembers who asked for what, and when.

For tests of integrations: a real server on a real socket, so the job under test runs its real client, but no
queue, no agents and no swap. ``problems()`` says what would go wrong with others around.
"""

import itertools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc

from coslice.wire.v1 import coslice_pb2 as pb

STREAMS = 64
"""Sessions at once: each keeps a thread busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One message of one client."""

    at: float
    """Seconds since the recording began."""
    kind: str
    """``hello``, ``acquire``, ``confirm``, ``yield``, ``abandon``, ``note``, ``goodbye`` or ``lost``."""
    job: str
    session: str
    groups: tuple[str, ...] = ()
    phase: str = ""


class RecordingOrchestrator:
    """``with RecordingOrchestrator() as recording: run(job, env=recording.env("my-job", "trainer"))``."""

    def __init__(self, groups: Sequence[str] = ()) -> None:
        """``groups``: in the global order, the first to be taken first; others come after them by name."""
        self._order = tuple(groups)
        self._epochs = itertools.count(1)
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._trace: list[Recorded] = []
        self._held: dict[tuple[str, int], str] = {}
        """(group, epoch) → session."""
        self._server = grpc.server(futures.ThreadPoolExecutor(STREAMS), options=(("grpc.so_reuseport", 0),))
        session = grpc.stream_stream_rpc_method_handler(
            self._session,
            request_deserializer=pb.ClientMessage.FromString,
            response_serializer=pb.ServerMessage.SerializeToString,
        )
        handlers = grpc.method_handlers_generic_handler("coslice.v1.Orchestrator", {"Session": session})
        self._server.add_generic_rpc_handlers((handlers,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()

    def env(self, job: str, group: str = "", **more: str) -> dict[str, str]:
        """What a job's environment needs, to be recorded here."""
        return {
            "COSLICE_ORCHESTRATOR": self.address,
            "COSLICE_JOB": job,
            "COSLICE_INCARNATION": f"{job}-recorded",
            **({"COSLICE_GROUP": group} if group else {}),
            **more,
        }

    @property
    def trace(self) -> tuple[Recorded, ...]:
        with self._lock:
            return tuple(self._trace)

    def turns(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """(verb, phase, groups) of every acquire and yield, in their order: what most tests compare."""
        return [(r.kind, r.phase, r.groups) for r in self.trace if r.kind in ("acquire", "yield")]

    @property
    def held(self) -> Mapping[str, str]:
        """Group → session that holds it now."""
        with self._lock:
            return {group: session for (group, _), session in self._held.items()}

    def problems(self) -> list[str]:
        """What would be refused, or would stop others: order of groups broken, leases never given up."""
        found, held = [], dict[str, list[str]]()
        for said in self.trace:
            mine = held.setdefault(said.session, [])
            if said.kind == "acquire":
                late = [
                    group for group in mine if any(self._rank(new) < self._rank(group) for new in said.groups)
                ]
                if late:
                    found.append(
                        f"lock order: {said.job} asked for {', '.join(said.groups)} (phase {said.phase!r}) "
                        f"while it held {', '.join(late)}, which comes later"
                    )
                mine += [group for group in said.groups if group not in mine]
            elif said.kind == "yield":
                held[said.session] = [group for group in mine if group not in said.groups]
            elif said.kind in ("goodbye", "lost") and mine:
                found.append(f"leak: {said.job} ended while it held {', '.join(mine)}")
                held[said.session] = []
        return found

    def _rank(self, group: str) -> tuple[int, str]:
        return (self._order.index(group) if group in self._order else len(self._order), group)

    # ── the service ────────────────────────────────────────────────────────

    def _session(
        self, request_iterator: Iterator[pb.ClientMessage], context: grpc.ServicerContext
    ) -> Iterator[pb.ServerMessage]:
        hello = next(request_iterator).hello
        self._note("hello", hello)
        yield pb.ServerMessage(welcome=pb.Welcome(orchestrator="recording", session_grace_s=10.0))
        ended = "lost"
        try:
            for message in request_iterator:
                kind = message.WhichOneof("kind") or ""
                ended = "goodbye" if kind == "goodbye" else ended
                if (answer := self._answer(kind, message, hello)) is not None:
                    yield answer
                if ended == "goodbye":
                    return
        except grpc.RpcError:
            pass
        finally:
            if ended == "lost":
                self._note("lost", hello)
            with self._lock:
                self._held = {lease: who for lease, who in self._held.items() if who != hello.session}

    def _answer(self, kind: str, message: pb.ClientMessage, hello: pb.Hello) -> pb.ServerMessage | None:
        if kind == "acquire":
            asked = message.acquire
            self._note(kind, hello, tuple(asked.groups), asked.phase)
            leases = [pb.Lease(group=g, epoch=next(self._epochs), reason="recorded") for g in asked.groups]
            with self._lock:
                self._held |= {(lease.group, lease.epoch): hello.session for lease in leases}
            return pb.ServerMessage(granted=pb.Granted(request=asked.request, leases=leases))
        if kind == "yield":
            given = getattr(message, "yield")
            self._note(kind, hello, tuple(lease.group for lease in given.leases))
            with self._lock:
                for lease in given.leases:
                    self._held.pop((lease.group, lease.epoch), None)
            return pb.ServerMessage(yielded=pb.Yielded(request=given.request, snapshot_deferred=True))
        phase = message.note.name if kind == "note" else ""
        self._note(kind, hello, phase=phase)
        return None

    def _note(self, kind: str, hello: pb.Hello, groups: tuple[str, ...] = (), phase: str = "") -> None:
        recorded = Recorded(
            at=time.monotonic() - self._began,
            kind=kind,
            job=hello.job,
            session=hello.session,
            groups=groups,
            phase=phase,
        )
        with self._lock:
            self._trace.append(recorded)
