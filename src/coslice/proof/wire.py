"""What is said on the imagined wire, and the streams that carry it.

A stream is ordered and lossless until it breaks; then all that is on it is lost, and its two ends notice at
different times. Only ``chaos`` makes it worse than that on purpose (reordering, doubling, silent loss).
"""

from msgspec import Struct

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.effects import RefuseCode
from coslice.core.ids import Epoch, GroupId, JobId, RequestId

Leases = tuple[tuple[GroupId, Epoch], ...]


class Hello(Struct, frozen=True, tag=True):
    """First on every stream. An agent's says what it holds: read when it is sent, as the agent does."""

    facts: tuple[tuple[GroupId, Epoch, ev.NodeFacts], ...] = ()


class Acquire(Struct, frozen=True, tag=True):
    request: RequestId
    groups: tuple[GroupId, ...]
    need: int = 0


class Confirm(Struct, frozen=True, tag=True):
    request: RequestId


class Abandon(Struct, frozen=True, tag=True):
    request: RequestId


class Yield(Struct, frozen=True, tag=True):
    ident: RequestId
    leases: Leases


class Goodbye(Struct, frozen=True, tag=True):
    pass


class Welcome(Struct, frozen=True, tag=True):
    held: Leases


class Granted(Struct, frozen=True, tag=True):
    request: RequestId
    leases: Leases


class Refused(Struct, frozen=True, tag=True):
    request: RequestId
    code: RefuseCode


class Rejected(Struct, frozen=True, tag=True):
    """Of the session itself: another start of the job is connected."""


class LeaseLost(Struct, frozen=True, tag=True):
    group: GroupId
    epoch: Epoch


class Yielded(Struct, frozen=True, tag=True):
    ident: RequestId


class ShouldYield(Struct, frozen=True, tag=True):
    group: GroupId
    epoch: Epoch


ClientMessage = Hello | Acquire | Confirm | Abandon | Yield | Goodbye
ServerMessage = Welcome | Granted | Refused | Rejected | LeaseLost | Yielded | ShouldYield


class Said(Struct, frozen=True):
    """What an agent reports of one of its groups. Its time is filled in where it arrives."""

    group: GroupId
    event: ev.NodeReported | ev.OpSucceeded | ev.OpFailed


class Told(Struct, frozen=True):
    group: GroupId
    command: fx.MakeResident


class Forget(Struct, frozen=True):
    group: GroupId
    job: JobId


Command = Told | Forget
Down = ServerMessage | Command
Back = ClientMessage | Said


class Stream(Struct):
    """Between one peer (a client or an agent) and the orchestrator."""

    live: bool = False
    """What the peer sends now will arrive, unless the stream breaks first."""
    greeted: bool = False
    """The orchestrator has read the hello of this stream, and answers on it."""
    torn: bool = False
    """Something was lost inside the stream: it is about to break."""
    down: list[Down] = []
    back: list[Back] = []

    def open(self, hello: Hello) -> None:
        self.live, self.greeted, self.torn = True, False, False
        self.down, self.back = [], [hello]

    def cut(self) -> None:
        self.live = self.greeted = self.torn = False
        self.down, self.back = [], []

    def send(self, message: Back) -> None:
        if self.live:
            self.back.append(message)

    def answer(self, message: Down) -> None:
        if self.live and self.greeted:
            self.down.append(message)

    def copy(self) -> "Stream":
        return Stream(self.live, self.greeted, self.torn, self.down.copy(), self.back.copy())
