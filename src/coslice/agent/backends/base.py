"""What a backend is: a way to move one job's state between a device and host memory on this node.

Groups and the direct API call it; it is handed members and never asks who should run. A backend is one file
and one entry point (``coslice.backends``): a function of ``NodeContext`` and its settings. It knows no other
backend. ``coslice.testing.backend_contract`` is what it has to do, as tests; docs/adding-a-backend.md is the
way there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from coslice.agent.members import Member
from coslice.errors import ConfigError

if TYPE_CHECKING:
    from coslice.agent.ahead import Ahead
    from coslice.agent.buffers import HostBuffers
    from coslice.agent.config import AgentConfig
    from coslice.agent.discovery.surveyor import Surveyor
    from coslice.store import Store


class Capabilities(Struct, frozen=True, kw_only=True):
    name: str
    parts: bool = False
    """Selective: can move some regions (tags) and leave others."""
    in_process: bool = False
    """The process itself moves its state: outside its accelerator sections only."""
    whole_process: bool = False
    """Processes are frozen as they are, also in the middle of a phase. They register no state."""
    incremental: bool = False
    """Bytes that did not change since the last snapshot are not copied again."""
    collective: bool = False
    """All processes of a job move in one step, those of other nodes too."""
    modes: tuple[str, ...] = ("offload",)


class Snapshotted(Struct, frozen=True, kw_only=True):
    """``bytes``: what was on the device and now is in host memory. ``seconds``: from the call to here."""

    bytes: int
    residual: int
    """What the parked processes leave on the device, in bytes."""
    seconds: float
    left: int = 0
    """Registered bytes that stayed on the device, of those that could have left."""
    copied: int = 0
    """Of ``bytes``, those that were copied; the rest had not changed since it was copied last."""
    copy_seconds: float = 0.0
    """Spent on copying and comparing, by the process that took longest."""


class Restored(Struct, frozen=True, kw_only=True):
    bytes: int
    seconds: float
    copy_seconds: float = 0.0


class Presence(Struct, frozen=True, kw_only=True):
    """What a probe saw: how many processes have their state on the device, how many parked it."""

    live: int
    parked: int
    device_bytes: int


class ProcessRef(Struct, frozen=True, order=True):
    """A process for good: a pid alone may be another's tomorrow. ``started``: clock ticks since boot."""

    pid: int
    started: int


class MoveError(Exception):
    """State could not be moved; the message has pid and figures.

    ``busy``: in use. ``no_room``: host memory does not suffice. Either way nothing was touched.
    ``lost``: trying again cannot help. ``pid``: who is at fault; 0: nobody.
    """

    def __init__(
        self, message: str, *, busy: bool = False, no_room: bool = False, lost: bool = False, pid: int = 0
    ) -> None:
        super().__init__(message)
        self.busy, self.no_room, self.lost, self.pid = busy, no_room, lost, pid


class Backend(Protocol):
    """Operations of one job may be asked for at once, and their callers may go away (be cancelled) at any
    moment: neither does harm. ``Defaults`` has what most backends need not say.
    """

    def capabilities(self) -> Capabilities: ...

    def check(self, settings: Mapping[str, str]) -> None:
        """Raises ``ConfigError`` unless a job may ask for this backend with these settings
        (``Member.backend``)."""
        ...

    def deadline(self, size: int) -> float:
        """Seconds within which a move of ``size`` bytes ends, one way or the other."""
        ...

    async def snapshot(
        self, members: Sequence[Member], *, op: str, mode: str = "offload", tags: Sequence[str] = ()
    ) -> Snapshotted:
        """Device → host, all members or none; raises ``MoveError`` with the state back on the device.
        Of members that are parked already nothing moves."""
        ...

    async def restore(self, members: Sequence[Member], *, op: str) -> Restored:
        """Host → device; raises ``MoveError``. The caller has made sure of the room in its books; a backend
        that could destroy a process for want of room measures it as well."""
        ...

    async def probe(self, members: Sequence[Member]) -> Presence:
        """Where the state is now, without moving anything."""
        ...

    def holds(self, members: Sequence[Member]) -> bool:
        """Has this backend parked their state? Then only it can bring it back."""
        ...

    async def start(self) -> None:
        """Called once, before anything else: pick up what the last agent instance left half done."""
        ...

    async def retire(self, members: Sequence[Member]) -> Sequence[ProcessRef]:
        """The members are about to be killed: make that safe for the device, and name the further processes
        that belong to them. Never raises, and ends soon."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Elastic(Protocol):
    """A backend that can also move a part, and give way to another's state while it does."""

    async def snapshot_part(
        self, members: Sequence[Member], *, op: str, least: int, ahead: "Ahead | None" = None
    ) -> Snapshotted:
        """As ``snapshot``, of ``least`` bytes or some more; 0: of all. ``ahead`` brings the next job's state
        in meanwhile; it is called off before anything is rolled back."""
        ...


class Defaults:
    """For backends whose processes are exactly their members, and that keep nothing themselves."""

    def check(self, settings: Mapping[str, str]) -> None:
        if settings:
            raise ConfigError(f"this backend has no settings for jobs: leave out {', '.join(settings)}")

    def deadline(self, size: int) -> float:
        return 150.0

    def holds(self, members: Sequence[Member]) -> bool:
        return False

    async def start(self) -> None:
        pass

    async def retire(self, members: Sequence[Member]) -> Sequence[ProcessRef]:
        return ()

    async def close(self) -> None:
        pass


class NodeContext(Struct, frozen=True, kw_only=True):
    """What a node offers its backends."""

    config: "AgentConfig"
    buffers: "HostBuffers"
    """Memory files that hold state, charged to the node's host budget."""
    surveyor: "Surveyor"
    """What is on the node's devices, as measured."""
    store: "Store"
    found: Mapping[str, tuple[bytes, int]]
    """What the store held when the agent started. A backend's keys begin with ``backend/NAME/``."""


Factory = Callable[[NodeContext, Mapping[str, object]], Backend]
"""The entry point of a backend. ``settings``: the operator's, as text or numbers; unknown keys and values
that make no sense are a ``ConfigError``."""
