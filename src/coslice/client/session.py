"""The client's side of the session protocol: what to send, and what an answer means. Without any IO.

One object per process and orchestrator, run by a transport (``link`` on threads, ``aio_link`` on asyncio),
which guards it, takes ``outgoing`` to the stream after every call, and wakes nobody itself: the session calls
the ``wake`` of whoever should look again. Time is an argument.

Two kinds of things outlive a stream. An *ask* keeps its request id, so that the orchestrator keeps its place;
a *giving* (a yield without confirmation) is sent again until it is answered, so that it happens once. A hold
is shared: every claim of this process on the same group counts, and the last one to end gives the lock back.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import assert_never

from coslice.client.types import Lease
from coslice.errors import AcquireTimeout, CosliceError, LeaseLost, OrchestratorUnreachable
from coslice.wire.status import error_of
from coslice.wire.v1 import coslice_pb2 as pb

_NOTES_KEPT = 1000
"""Notes wait for a stream up to this many; then the oldest go."""
_ABANDONS_KEPT = 64
"""Abandons have no answer: so many of the last ones are repeated on a new stream, harmlessly."""


@dataclass(eq=False, slots=True)
class Hold:
    """A lease of this process and how many claims rest on it."""

    lease: Lease
    request: str
    count: int = 0
    lost: str | None = None
    """Why it was lost."""
    told: bool = False
    """Somebody was told that it was lost."""
    should_yield: bool = False


@dataclass(eq=False, slots=True, kw_only=True)
class Claim:
    """One caller's wish for some groups, and afterwards its part in holding them."""

    groups: tuple[str, ...]
    wake: Callable[[], None]
    phase: str = ""
    need: int = 0
    world: int = 0
    started: float
    deadline: float = math.inf
    connect_timeout: float
    reconnect_timeout: float
    traceparent: str = ""
    holds: dict[str, Hold] = field(default_factory=dict)
    ask: "_Ask | None" = None
    error: CosliceError | None = None

    @property
    def settled(self) -> bool:
        return self.ask is None and len(self.holds) == len(self.groups)


@dataclass(eq=False, slots=True)
class _Ask:
    request: str
    message: pb.Acquire
    groups: frozenset[str]
    claims: list[Claim]


@dataclass(eq=False, slots=True)
class Giving:
    """A yield on its way."""

    message: pb.Yield
    sent: int = 0
    """On how many streams. An answer to a repetition says nothing about what happened the first time."""
    done: bool = False
    error: CosliceError | None = None
    wake: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Release:
    given_up: bool = True
    """False: the process still holds one of the groups, by another claim."""
    givings: list[Giving] = field(default_factory=list)
    lost: LeaseLost | None = None


class Session:
    def __init__(self, hello: pb.Hello, *, address: str) -> None:
        self.hello = hello
        self.address = address
        # Requests are shown to people; the session's id is what a client proves itself with, and is not.
        self._prefix = hashlib.sha256(hello.session.encode()).hexdigest()[:8]
        self.open = False
        """A stream takes our messages."""
        self.welcomed = False
        """The orchestrator answered on it."""
        self.rejected = False
        """The orchestrator refused the session itself: this stream is of no more use."""
        self.trouble = ""
        """What the last stream failed of."""
        self.outgoing: list[pb.ClientMessage] = []
        self.ever_welcomed = False
        self._down_since = -math.inf
        self._counter = 0
        self._claims: list[Claim] = []
        self._asks: dict[str, _Ask] = {}
        self._holds: dict[str, Hold] = {}
        self._givings: dict[str, Giving] = {}
        self._abandons: deque[pb.Abandon] = deque(maxlen=_ABANDONS_KEPT)
        self._notes: deque[pb.Note] = deque(maxlen=_NOTES_KEPT)

    @property
    def idle(self) -> bool:
        """Nothing here needs a stream."""
        return not (self._asks or self._holds or self._givings or self._notes)

    # ── what callers want ──────────────────────────────────────────────────

    def want(self, claim: Claim) -> None:
        self._claims.append(claim)
        self._advance(claim)

    def withdraw(self, claim: Claim, reason: str) -> Release:
        """The caller no longer wants it, granted or not."""
        ask, claim.ask = claim.ask, None
        if ask is not None:
            ask.claims.remove(claim)
            if not ask.claims:
                del self._asks[ask.request]
                self._abandon(ask.request, reason)
        return self.release(claim)

    def release(self, claim: Claim, groups: Iterable[str] | None = None) -> Release:
        """End a claim, or its part in some groups. Again: nothing happens."""
        release = Release()
        for group in list(claim.holds if groups is None else groups):
            hold = claim.holds.pop(group, None)
            if hold is None:
                continue
            hold.count -= 1
            if hold.lost is not None:
                if not hold.told:
                    hold.told = True
                    release.lost = _lease_lost(hold, hold.lost)
            elif hold.count:
                release.given_up = False
            elif self._holds.get(group) is hold:  # else a goodbye gave it already
                release.givings.append(self._give(hold))
        if not claim.holds and claim in self._claims:
            self._claims.remove(claim)
        return release

    def should_yield(self, groups: Iterable[str] = ()) -> bool:
        """Does somebody wait for a lock of ours, or did we lose one already?"""
        wanted = set(groups)
        return any(
            hold.should_yield or hold.lost is not None
            for claim in self._claims
            for group, hold in claim.holds.items()
            if not wanted or group in wanted
        )

    def note(self, note: pb.Note) -> None:
        """Sent once, on a stream that works: what was under way when one breaks is lost."""
        if self.welcomed:
            self.outgoing.append(pb.ClientMessage(note=note))
        else:
            self._notes.append(note)

    def goodbye(self) -> None:
        """Give everything back and end the session in order."""
        for hold in list(self._holds.values()):
            self._give(hold)
        self._send(pb.ClientMessage(goodbye=pb.Goodbye()))

    # ── how long callers wait ──────────────────────────────────────────────

    def patience(self, claim: Claim, *, now: float) -> float | None:
        """Seconds until the claim should be looked at again, if nothing wakes it; None: it is granted.

        Raises what the claim came to: a refusal, its timeout, or that nobody answers.
        """
        if claim.error is not None:
            raise claim.error
        if claim.settled:
            return None
        bound = math.inf if self.welcomed else self._unreachable_at(claim)
        if now >= bound:
            raise self.unreachable()
        if now >= claim.deadline:
            raise AcquireTimeout(
                f"{', '.join(claim.groups)} not granted within {claim.deadline - claim.started:.3g} s; the "
                f"place in the queue is given up. `coslice explain {claim.groups[0]}` says why",
                data={"groups": ",".join(claim.groups)},
            )
        return min(bound, claim.deadline) - now

    def _unreachable_at(self, claim: Claim) -> float:
        allowed = claim.reconnect_timeout if self.ever_welcomed else claim.connect_timeout
        return max(self._down_since + allowed, claim.started + claim.connect_timeout)

    def unreachable(self) -> OrchestratorUnreachable:
        trouble = f" ({self.trouble})" if self.trouble else ""
        return OrchestratorUnreachable(
            f"no orchestrator answers at {self.address}{trouble}. Start one with `coslice up`, point "
            "COSLICE_ORCHESTRATOR at the one that runs, or unset it to run without sharing",
            data={"address": self.address},
        )

    # ── the stream ─────────────────────────────────────────────────────────

    def connecting(self, *, now: float) -> None:
        """A transport begins to look for the orchestrator."""
        self._down_since = now

    def opened(self) -> None:
        """A new stream takes messages: say everything that the orchestrator may not know."""
        self.open, self.rejected = True, False
        say = [pb.ClientMessage(hello=self.hello)]
        say += [pb.ClientMessage(abandon=abandon) for abandon in self._abandons]
        requests = dict.fromkeys(hold.request for hold in self._holds.values())
        say += [pb.ClientMessage(confirm=pb.Confirm(request=request)) for request in requests]
        self.outgoing = say
        for giving in self._givings.values():
            self._send_giving(giving)
        self.outgoing += [pb.ClientMessage(acquire=ask.message) for ask in self._asks.values()]

    def closed(self, *, now: float, trouble: str) -> None:
        """The stream is gone. Asks, holds and givings stay."""
        if self.welcomed:
            self._down_since = now
        self.open = self.welcomed = False
        self.trouble = trouble
        self.outgoing.clear()
        self._wake_all()

    def received(self, message: pb.ServerMessage) -> None:
        match message.WhichOneof("kind"):
            case "granted":
                self._granted(message.granted)
            case "yielded":
                if (giving := self._givings.pop(message.yielded.request, None)) is not None:
                    giving.done = True
                    giving.wake()
            case "welcome":
                self._welcome(message.welcome)
            case "refused":
                self._refused(message.refused)
            case "lease_lost":
                lost = message.lease_lost
                if (hold := self._hold(lost.group, lost.epoch)) is not None:
                    self._lose(hold, lost.reason)
            case "should_yield":
                should = message.should_yield
                if (hold := self._hold(should.group, should.epoch)) is not None:
                    hold.should_yield = True
            case None:
                pass  # a kind of message that a newer orchestrator sends and we do not know
            case unreachable:
                assert_never(unreachable)

    def _welcome(self, welcome: pb.Welcome) -> None:
        self.welcomed = self.ever_welcomed = True
        held = {(ref.group, ref.epoch) for ref in welcome.held}
        for hold in list(self._holds.values()):
            if (hold.lease.group, hold.lease.epoch) not in held:
                self._lose(hold, "the orchestrator ended it while this process was out of its reach")
        self.outgoing += [pb.ClientMessage(note=note) for note in self._notes]
        self._notes.clear()
        self._wake_all()

    def _granted(self, granted: pb.Granted) -> None:
        ask = self._asks.pop(granted.request, None)
        if ask is None:
            if any(hold.request == granted.request for hold in self._holds.values()):
                self._send(pb.ClientMessage(confirm=pb.Confirm(request=granted.request)))
            else:
                self._abandon(granted.request, "no longer wanted when it was granted")
            return
        self._send(pb.ClientMessage(confirm=pb.Confirm(request=granted.request)))
        for lease in granted.leases:
            self._take(ask, lease)
        for claim in ask.claims:
            self._advance(claim)

    def _take(self, ask: _Ask, lease: pb.Lease) -> None:
        if (old := self._holds.get(lease.group)) is not None:
            self._lose(old, f"the orchestrator granted epoch {lease.epoch} in its place")
        hold = Hold(_lease(lease), ask.request)
        takers = [c for c in ask.claims if lease.group in c.groups and lease.group not in c.holds]
        if not takers:
            self._give(hold)
            return
        self._holds[lease.group] = hold
        for claim in takers:
            claim.holds[lease.group] = hold
            hold.count += 1

    def _refused(self, refused: pb.Refused) -> None:
        if refused.code == pb.SHUTTING_DOWN:
            return  # what was asked is asked again of its successor
        if not refused.request:
            self._reject(refused)
        elif (ask := self._asks.pop(refused.request, None)) is not None:
            for claim in ask.claims:
                claim.ask = None
                if ask.groups <= set(claim.groups):
                    self._fail(claim, _error(refused))
                else:  # it only joined the request for a part of it; another part may be to blame
                    self._advance(claim)
        elif (giving := self._givings.pop(refused.request, None)) is not None:
            giving.done = True
            if refused.code not in (pb.NOT_HELD, pb.STALE_LEASE):
                giving.error = _error(refused)
            elif giving.sent <= 1:
                giving.error = LeaseLost(refused.message, data=dict(refused.data))
            giving.wake()

    def _reject(self, refused: pb.Refused) -> None:
        self.rejected = True
        self._notes.clear()
        for hold in list(self._holds.values()):
            self._lose(hold, refused.message)
        for giving in self._givings.values():
            giving.done = True
            giving.wake()
        self._givings.clear()
        asks = list(self._asks.values())
        self._asks.clear()
        for claim in [claim for ask in asks for claim in ask.claims]:
            self._fail(claim, _error(refused))

    # ── parts ──────────────────────────────────────────────────────────────

    def _advance(self, claim: Claim) -> None:
        """Take part in what the process holds, join a request under way, or make one for the rest."""
        claim.ask = None
        missing = []
        for group in claim.groups:
            if group in claim.holds and claim.holds[group].lost is None:
                continue
            claim.holds.pop(group, None)
            if (hold := self._holds.get(group)) is not None:
                claim.holds[group] = hold
                hold.count += 1
            else:
                missing.append(group)
        if not missing:
            claim.wake()
            return
        ask = next((ask for ask in self._asks.values() if not ask.groups.isdisjoint(missing)), None)
        if ask is None:
            ask = self._ask(claim, missing)
        ask.claims.append(claim)
        claim.ask = ask

    def _ask(self, claim: Claim, groups: list[str]) -> _Ask:
        request = self._next_request()
        message = pb.Acquire(
            request=request,
            groups=groups,
            world=claim.world,
            need_bytes=claim.need,
            phase=claim.phase,
            traceparent=claim.traceparent,
        )
        ask = self._asks[request] = _Ask(request, message, frozenset(groups), [])
        self._send(pb.ClientMessage(acquire=message))
        return ask

    def _fail(self, claim: Claim, error: CosliceError) -> None:
        claim.ask = None
        claim.error = error
        self.withdraw(claim, "refused")
        claim.wake()

    def _give(self, hold: Hold) -> Giving:
        lease = hold.lease
        if self._holds.get(lease.group) is hold:
            del self._holds[lease.group]
        ref = pb.LeaseRef(group=lease.group, epoch=lease.epoch)
        # One message per lease: a refusal then says which of them it means.
        giving = Giving(pb.Yield(request=self._next_request(), leases=[ref]))
        self._givings[giving.message.request] = giving
        if self.open:
            self._send_giving(giving)
        return giving

    def _send_giving(self, giving: Giving) -> None:
        giving.sent += 1
        self._send(pb.ClientMessage(**{"yield": giving.message}))  # type: ignore[arg-type]

    def _abandon(self, request: str, reason: str) -> None:
        abandon = pb.Abandon(request=request, reason=reason)
        self._abandons.append(abandon)
        self._send(pb.ClientMessage(abandon=abandon))

    def _send(self, message: pb.ClientMessage) -> None:
        if self.open:
            self.outgoing.append(message)

    def _lose(self, hold: Hold, reason: str) -> None:
        hold.lost = reason or "the orchestrator gave no reason"
        if self._holds.get(hold.lease.group) is hold:
            del self._holds[hold.lease.group]

    def _hold(self, group: str, epoch: int) -> Hold | None:
        hold = self._holds.get(group)
        return hold if hold is not None and hold.lease.epoch == epoch else None

    def _next_request(self) -> str:
        self._counter += 1
        return f"{self._prefix}-{self._counter}"

    def _wake_all(self) -> None:
        for claim in self._claims:
            claim.wake()
        for giving in self._givings.values():
            giving.wake()


def _lease(lease: pb.Lease) -> Lease:
    return Lease(
        group=lease.group,
        epoch=lease.epoch,
        restored=lease.restored,
        waited_s=lease.waited_s,
        bytes_in=lease.bytes_in,
        bytes_out=lease.bytes_out,
        reason=lease.reason,
    )


def _error(refused: pb.Refused) -> CosliceError:
    return error_of(refused.code, refused.message, dict(refused.data))


def _lease_lost(hold: Hold, reason: str) -> LeaseLost:
    group, epoch = hold.lease.group, hold.lease.epoch
    return LeaseLost(
        f"the lease on {group} (epoch {epoch}) was lost: {reason}. Acquire it again before device work",
        data={"group": group, "epoch": str(epoch), "reason": reason},
    )
