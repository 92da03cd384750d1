"""An orchestrator with behaviour but without nodes, policies or stores: one FIFO lock per group.

What a real one keeps in its store, this one keeps in the object: ``kill`` and ``start`` are a crash and a
restart on the same port. Faults are armed one at a time: a stream that breaks after a message was applied but
before it was answered, streams refused as unavailable, a stream that is never welcomed.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import grpc
from ports import Kept

from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as pb_grpc

BOUND = 20.0


@dataclass
class _Group:
    epoch: int = 0
    holder: tuple[str, str] | None = None
    """Session and request."""
    queue: deque[tuple[str, str]] = field(default_factory=deque)


class _Broken(Exception):
    pass


class FakeOrchestrator(pb_grpc.OrchestratorServicer):
    def __init__(self, *groups: str) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.groups = {name: _Group() for name in groups}
        self.said: list[tuple[str, Any]] = []
        """Every message of every client, in order of arrival: kind and content."""
        self.hellos: list[pb.Hello] = []
        self.yields_applied = 0
        self.confirmed: set[str] = set()
        self.unavailable = 0
        """So many of the next streams are refused."""
        self.refuse_hello: pb.Refused | None = None
        self.silent = False
        """Streams are taken and never answered."""
        self._break_after: list[str] = []
        self._asks: dict[str, list[str]] = {}
        """Groups of a request, in the order in which they are taken."""
        self._streams: dict[str, SimpleQueue[pb.ServerMessage | None]] = {}
        self._server: grpc.Server | None = None
        self._place = Kept()
        self.port = self._place.port

    # ── up and down ────────────────────────────────────────────────────────

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> "FakeOrchestrator":
        server = grpc.server(
            ThreadPoolExecutor(32),
            options=[("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)],
        )
        pb_grpc.add_OrchestratorServicer_to_server(self, server)
        server.add_insecure_port(self.address)
        server.start()
        self._server = server
        return self

    def kill(self) -> None:
        """As a crash looks to clients: every connection breaks and the port is closed."""
        server, self._server = self._server, None
        if server is not None:
            done = server.stop(0)
            with self.changed:
                for stream in self._streams.values():
                    stream.put(None)
            done.wait(BOUND)

    # ── what tests arm and look at ─────────────────────────────────────────

    def break_after(self, kind: str) -> None:
        """The next message of this kind is applied; then its stream breaks before the answer."""
        with self.changed:
            self._break_after.append(kind)

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, BOUND), "the awaited state did not come"

    def count(self, kind: str) -> int:
        with self.changed:
            return sum(said == kind for said, _ in self.said)

    def contents(self, kind: str) -> list[Any]:
        with self.changed:
            return [content for said, content in self.said if said == kind]

    def holder(self, group: str) -> str | None:
        """The session that holds it."""
        holder = self.groups[group].holder
        return holder[0] if holder else None

    def until_free(self, group: str) -> None:
        self.until(lambda: self.groups[group].holder is None)

    def until_held(self, group: str) -> None:
        self.until(lambda: self.groups[group].holder is not None)

    def until_waiting(self, group: str, waiters: int) -> None:
        self.until(lambda: len(self.groups[group].queue) == waiters)

    def lose(self, group: str, reason: str) -> None:
        """The lease expires."""
        with self.changed:
            lock = self.groups[group]
            assert lock.holder is not None
            (session, request), epoch = lock.holder, lock.epoch
            self._asks.pop(request, None)  # if its grant never arrived, it is made again
            self._tell(session, lease_lost=pb.LeaseLost(group=group, epoch=epoch, reason=reason))
            self._free(group)

    def lose_silently(self, group: str) -> None:
        """The lease expires while its session is away."""
        with self.changed:
            self._free(group)

    def ask_to_yield(self, group: str) -> None:
        with self.changed:
            lock = self.groups[group]
            assert lock.holder is not None
            self._tell(lock.holder[0], should_yield=pb.ShouldYield(group=group, epoch=lock.epoch, waiting=1))

    def take(self, group: str) -> "Callable[[], None]":
        """Somebody else holds the lock, until the result is called."""
        with self.changed:
            lock = self.groups[group]
            lock.epoch += 1
            lock.holder = ("somebody-else", "x/1")

        def give() -> None:
            with self.changed:
                self._free(group)

        return give

    # ── the service ────────────────────────────────────────────────────────

    def Session(self, request_iterator: Any, context: Any) -> Iterator[pb.ServerMessage]:
        with self.changed:
            if self.unavailable:
                self.unavailable -= 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "the orchestrator is starting")
        stream: SimpleQueue[pb.ServerMessage | None] = SimpleQueue()
        broken = threading.Event()
        context.add_callback(lambda: stream.put(None))

        def read() -> None:
            try:
                self._read(request_iterator, stream)
            except _Broken:
                broken.set()
            except Exception:  # the stream ended under us
                pass
            stream.put(None)

        threading.Thread(target=read, daemon=True).start()
        while (message := stream.get()) is not None:
            yield message
        if broken.is_set():
            context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")

    def _read(self, messages: Any, stream: SimpleQueue[pb.ServerMessage | None]) -> None:
        hello = next(messages).hello
        with self.changed:
            self.hellos.append(hello)
            self._saw("hello", hello)
            silent = self.silent
            if silent:
                pass
            elif self.refuse_hello is not None:
                stream.put(pb.ServerMessage(refused=self.refuse_hello))
                return
            else:
                self.greet(hello, stream)
        for message in messages:
            if silent:
                continue
            kind = message.WhichOneof("kind")
            with self.changed:
                if self._streams.get(hello.session) is not stream:
                    return  # a stream that was replaced, or a server that was killed
                breaks = kind in self._break_after
                if breaks:
                    self._break_after.remove(kind)
                    del self._streams[hello.session]
                self.hear(hello.session, message)
                if breaks:
                    raise _Broken
            if kind == "goodbye":
                return

    def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        with self.changed:
            if request.group and request.group not in self.groups:
                context.abort(
                    grpc.StatusCode.NOT_FOUND, f"no group {request.group}: known are {self._known()}"
                )
            return pb.GetStatusResponse(
                orchestrator="fake",
                groups=[
                    pb.GroupStatus(group=name, state="held" if lock.holder else "empty", epoch=lock.epoch)
                    for name, lock in self.groups.items()
                    if request.group in ("", name)
                ],
            )

    def greet(self, hello: pb.Hello, stream: SimpleQueue[pb.ServerMessage | None]) -> None:
        """The session's answers go to this stream from now on."""
        self._streams[hello.session] = stream
        held = [
            pb.LeaseRef(group=name, epoch=lock.epoch)
            for name, lock in self.groups.items()
            if lock.holder is not None and lock.holder[0] == hello.session
        ]
        stream.put(pb.ServerMessage(welcome=pb.Welcome(orchestrator="fake", held=held)))

    def hear(self, session: str, message: pb.ClientMessage) -> None:
        kind = message.WhichOneof("kind")
        assert kind is not None
        content = getattr(message, kind)
        with self.changed:
            getattr(self, f"_on_{kind}")(session, content)
            self._saw(kind, content)

    # ── verbs ──────────────────────────────────────────────────────────────

    def _on_acquire(self, session: str, message: pb.Acquire) -> None:
        unknown = [name for name in message.groups if name not in self.groups]
        if unknown:
            refused = pb.Refused(
                request=message.request,
                code=pb.UNKNOWN_GROUP,
                message=f"there is no group {unknown[0]}: known are {self._known()}",
                data={"known_groups": self._known()},
            )
            self._tell(session, refused=refused)
            return
        ask = (session, message.request)
        if message.request in self._asks:  # a repetition keeps its place; a grant may have been lost
            self._answer(ask)
            return
        mine = [name for name, lock in self.groups.items() if lock.holder and lock.holder[0] == session]
        if any(name < held for name in message.groups for held in mine if held not in message.groups):
            text = f"yield {mine[-1]} first"
            refused = pb.Refused(request=message.request, code=pb.LOCK_ORDER, message=text)
            self._tell(session, refused=refused)
            return
        groups = sorted(message.groups)
        self._asks[message.request] = groups
        self._queue_next(ask)

    def _queue_next(self, ask: tuple[str, str]) -> None:
        """Take the groups of a request one after another."""
        for name in self._asks[ask[1]]:
            lock = self.groups[name]
            if lock.holder == ask:
                continue
            lock.queue.append(ask)
            self._hand_over(name)
            return
        self._answer(ask)

    def _answer(self, ask: tuple[str, str]) -> None:
        session, request = ask
        names = self._asks[request]
        if all(self.groups[name].holder == ask for name in names):
            leases = [
                pb.Lease(group=name, epoch=self.groups[name].epoch, waited_s=0.5, reason="first in the queue")
                for name in names
            ]
            self._tell(session, granted=pb.Granted(request=request, leases=leases))

    def _hand_over(self, name: str) -> None:
        lock = self.groups[name]
        if lock.holder is None and lock.queue:
            lock.holder = lock.queue.popleft()
            lock.epoch += 1
            self._queue_next(lock.holder)
        self.changed.notify_all()

    def _free(self, name: str) -> None:
        self.groups[name].holder = None
        self._hand_over(name)

    def _on_confirm(self, session: str, message: pb.Confirm) -> None:
        self.confirmed.add(message.request)

    def _on_abandon(self, session: str, message: pb.Abandon) -> None:
        ask = (session, message.request)
        for name, lock in self.groups.items():
            if ask in lock.queue:
                lock.queue.remove(ask)
            if lock.holder == ask:
                self._free(name)
        self.changed.notify_all()

    def _on_yield(self, session: str, message: pb.Yield) -> None:
        for ref in message.leases:
            lock = self.groups[ref.group]
            if lock.holder is not None and lock.holder[0] == session and lock.epoch == ref.epoch:
                self.yields_applied += 1
                self._free(ref.group)
            else:
                text = f"{ref.group} is not held under epoch {ref.epoch}"
                refused = pb.Refused(request=message.request, code=pb.STALE_LEASE, message=text)
                self._tell(session, refused=refused)
                return
        self._tell(session, yielded=pb.Yielded(request=message.request))

    def _on_note(self, session: str, message: pb.Note) -> None:
        pass

    def _on_goodbye(self, session: str, message: pb.Goodbye) -> None:
        for name, lock in self.groups.items():
            for ask in [ask for ask in lock.queue if ask[0] == session]:
                lock.queue.remove(ask)
            if lock.holder is not None and lock.holder[0] == session:
                self._free(name)

    # ── parts ──────────────────────────────────────────────────────────────

    def _saw(self, kind: str, content: Any) -> None:
        self.said.append((kind, content))
        self.changed.notify_all()

    def _tell(self, session: str, **kind: Any) -> None:
        stream = self._streams.get(session)
        if stream is not None:
            stream.put(pb.ServerMessage(**kind))

    def _known(self) -> str:
        return ",".join(sorted(self.groups))
