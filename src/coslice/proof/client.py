"""One imagined client process: what it believes, and what it says, as the client library does.

Asks keep their request id and yields are repeated until they are answered, over as many streams as it takes.
It computes (``inside``) once every group it asked for is granted, and leaves its section when it likes; a
lease that it is told it lost is not yielded.
"""

from typing import assert_never

from msgspec import Struct

from coslice.core.effects import RefuseCode
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, NodeId, RequestId, SessionId
from coslice.proof import wire
from coslice.proof.wire import Stream

ABANDONS_KEPT = 64


class Ask(Struct, frozen=True):
    request: RequestId
    groups: tuple[GroupId, ...]
    need: int = 0


class Client(Struct):
    job: JobId
    incarnation: Incarnation
    session: SessionId
    home: NodeId
    """The node that it runs on."""
    pid: int
    stream: Stream
    count: int = 0
    ask: Ask | None = None
    holds: dict[GroupId, tuple[RequestId, Epoch]] = {}
    using: tuple[GroupId, ...] = ()
    """The groups of the section that its code is in."""
    on: tuple[tuple[GroupId, NodeId], ...] = ()
    """Where the code of the section runs."""
    givings: tuple[wire.Yield, ...] = ()
    abandons: tuple[RequestId, ...] = ()
    stopped: bool = False
    refused: RefuseCode | None = None
    """Why its last ask was refused."""
    served: int = 0
    """Sections it came to."""

    @property
    def inside(self) -> bool:
        return bool(self.using)

    def copy(self) -> "Client":
        return Client(
            self.job,
            self.incarnation,
            self.session,
            self.home,
            self.pid,
            self.stream.copy(),
            self.count,
            self.ask,
            self.holds.copy(),
            self.using,
            self.on,
            self.givings,
            self.abandons,
            self.stopped,
            self.refused,
            self.served,
        )

    # ── what its code does ──

    def acquire(self, groups: tuple[GroupId, ...], need: int = 0) -> list[wire.ClientMessage]:
        self.refused = None
        self.ask = Ask(self._next(), groups, need)
        return [wire.Acquire(self.ask.request, groups, need)]

    def cancel(self) -> list[wire.ClientMessage]:
        """The caller no longer wants what it asked for."""
        ask, self.ask = self.ask, None
        return [] if ask is None else self._abandon(ask.request)

    def leave(self) -> list[wire.ClientMessage]:
        """The section ends: every lease of it that is not lost is given back, the last group first."""
        said: list[wire.ClientMessage] = []
        for group in reversed(self.using):
            if group in self.holds:
                said.append(self._give(group, self.holds.pop(group)[1]))
        self.using = self.on = ()
        return said

    # ── its stream ──

    def dial(self) -> list[wire.ClientMessage]:
        """A new stream is open: everything that the orchestrator may not know. (The hello is on it.)"""
        self.stream.open(wire.Hello())
        said: list[wire.ClientMessage] = [wire.Abandon(request) for request in self.abandons]
        said += [wire.Confirm(request) for request in dict.fromkeys(r for r, _ in self.holds.values())]
        said += self.givings
        if self.ask is not None:
            said.append(wire.Acquire(self.ask.request, self.ask.groups, self.ask.need))
        return said

    def receive(self, message: wire.ServerMessage) -> list[wire.ClientMessage]:
        match message:
            case wire.Granted():
                return self._granted(message)
            case wire.Welcome(held=held):
                for group, (_, epoch) in list(self.holds.items()):
                    if (group, epoch) not in held:
                        del self.holds[group]
            case wire.Refused(request=request, code=code):
                if self.ask is not None and self.ask.request == request:
                    self.ask, self.refused = None, code
                self.givings = tuple(g for g in self.givings if g.ident != request)
            case wire.Rejected():
                self.holds.clear()
                self.givings, self.ask, self.refused = (), None, RefuseCode.JOB_RUNNING
                self.stream.cut()
            case wire.LeaseLost(group=group, epoch=epoch):
                if group in self.holds and self.holds[group][1] == epoch:
                    del self.holds[group]
            case wire.Yielded(ident=ident):
                self.givings = tuple(g for g in self.givings if g.ident != ident)
            case wire.ShouldYield():
                pass
            case _:
                assert_never(message)
        return []

    def _granted(self, granted: wire.Granted) -> list[wire.ClientMessage]:
        ask = self.ask
        if ask is None or ask.request != granted.request:
            if any(request == granted.request for request, _ in self.holds.values()):
                return [wire.Confirm(granted.request)]
            return self._abandon(granted.request)
        self.ask = None
        self.holds = {group: (ask.request, epoch) for group, epoch in granted.leases}
        self.using = ask.groups
        self.served += 1
        return [wire.Confirm(granted.request)]

    def _give(self, group: GroupId, epoch: Epoch) -> wire.Yield:
        giving = wire.Yield(self._next(), ((group, epoch),))
        self.givings = (*self.givings, giving)
        return giving

    def _abandon(self, request: RequestId) -> list[wire.ClientMessage]:
        self.abandons = (*self.abandons, request)[-ABANDONS_KEPT:]
        return [wire.Abandon(request)]

    def _next(self) -> RequestId:
        self.count += 1
        return RequestId(f"{self.session}/{self.count}")
