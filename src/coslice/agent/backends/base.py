"""What a backend is: a way to move one job's state between a device and host memory on this node.

Groups and the direct API call it; it is handed members and never asks who should run. A backend is one file
and one entry point (``coslice.backends``); it knows no other backend.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from coslice.agent.members import Member


class Capabilities(Struct, frozen=True, kw_only=True):
    name: str
    parts: bool
    """Can move some regions and leave others."""
    in_process: bool
    """The process itself moves its state: outside its accelerator sections only."""
    modes: tuple[str, ...]


class Snapshotted(Struct, frozen=True, kw_only=True):
    bytes: int
    residual: int
    """What the parked processes leave on the device, in bytes."""
    seconds: float


class Restored(Struct, frozen=True, kw_only=True):
    bytes: int
    seconds: float


class Presence(Struct, frozen=True, kw_only=True):
    """What a probe saw: how many processes have their state on the device, how many parked it."""

    live: int
    parked: int
    device_bytes: int


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
    def capabilities(self) -> Capabilities: ...

    async def snapshot(
        self, members: Sequence[Member], *, op: str, mode: str = "offload", tags: Sequence[str] = ()
    ) -> Snapshotted:
        """Device → host, all members or none; raises ``MoveError`` with the state back on the device."""
        ...

    async def restore(self, members: Sequence[Member], *, op: str) -> Restored:
        """Host → device; raises ``MoveError``. The caller has made sure of the room."""
        ...

    async def probe(self, members: Sequence[Member]) -> Presence:
        """Where the state is now, without moving anything."""
        ...
