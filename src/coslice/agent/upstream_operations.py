"""Operations of the upstream protocol: named, durable before their name is given out, and found again by a
restarted agent.

Each is one value in the agent's store. A finished one is kept until ``KEPT`` newer ones have ended. What
carries them out is the service; this only remembers.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from coslice.agent.backends.base import ProcessRef
from coslice.store import Store
from coslice.store.codec import Codec
from coslice.store.slot import Slot

KEY = "upstream/operation/"
KEPT = 1024

Kind = Literal["snapshot", "restore"]
State = Literal["pending", "complete", "failed"]


def since_boot() -> float:
    """Seconds; one clock for all agents between two boots of the machine."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Order(Struct, frozen=True, kw_only=True):
    """What was asked for."""

    kind: Kind
    job: str
    backend: str = ""
    mode: str = ""
    tags: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
    """Only these processes of the job; empty: all."""


class Operation(Struct, frozen=True, kw_only=True):
    id: str
    number: int
    """In the order in which they began, over restarts."""
    order: Order
    began: float
    processes: tuple[ProcessRef, ...] = ()
    """The job's, when it began."""
    state: State = "pending"
    elapsed_ms: int = 0
    stored: int = 0
    """Bytes in host memory at its end."""
    on_device: int = 0
    error: str = ""

    def elapsed(self, now: float) -> int:
        """Milliseconds; fixed from its end on."""
        return self.elapsed_ms if self.state != "pending" else max(0, round(1000 * (now - self.began)))


CODEC = Codec(Operation, kind="upstream-operation")


class Operations:
    def __init__(
        self,
        store: Store,
        found: Mapping[str, tuple[bytes, int]],
        *,
        kept: int = KEPT,
        now: Callable[[], float] = since_boot,
    ) -> None:
        """``found``: what the store held. Raises ``ConfigError`` if it is not ours to read."""
        self._store, self._kept, self._now = store, kept, now
        self._slots: dict[str, Slot[Operation]] = {}
        self._all: dict[str, Operation] = {}
        self._writing = asyncio.Lock()
        for key, entry in found.items():
            if key.startswith(KEY):
                slot = Slot(store, key, CODEC, entry)
                if (operation := slot.state()) is not None:
                    self._slots[operation.id], self._all[operation.id] = slot, operation
        self._all = {each.id: each for each in sorted(self._all.values(), key=lambda each: each.number)}
        self._number = max((each.number for each in self._all.values()), default=0)

    def get(self, id: str) -> Operation | None:
        return self._all.get(id)

    def pending(self) -> tuple[Operation, ...]:
        """In the order in which they began."""
        return tuple(each for each in self._all.values() if each.state == "pending")

    def last_of(self, job: str) -> Operation | None:
        return next((each for each in reversed(self._all.values()) if each.order.job == job), None)

    def new(self, order: Order, processes: Sequence[ProcessRef]) -> Operation:
        """Known at once, durable once ``save`` has returned: only then may it be named to anybody."""
        self._number += 1
        begun = self._now()
        operation = Operation(
            id=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{order.kind}/{order.job}/{self._number}/{begun}")),
            number=self._number,
            order=order,
            began=begun,
            processes=tuple(processes),
        )
        self._all[operation.id] = operation
        return operation

    async def save(self, operation: Operation) -> None:
        key = KEY + operation.id
        slot = self._slots.setdefault(operation.id, Slot(self._store, key, CODEC))
        async with self._writing:
            await slot.save(operation)

    async def complete(self, operation: Operation, *, stored: int, on_device: int) -> None:
        await self._end(replace(operation, state="complete", stored=stored, on_device=on_device))

    async def fail(self, operation: Operation, error: str) -> None:
        await self._end(replace(operation, state="failed", error=error))

    def elapsed(self, operation: Operation) -> int:
        return operation.elapsed(self._now())

    async def _end(self, operation: Operation) -> None:
        operation = replace(operation, elapsed_ms=max(0, round(1000 * (self._now() - operation.began))))
        self._all[operation.id] = operation
        await self.save(operation)
        finished = [each for each in self._all.values() if each.state != "pending"]
        for old in finished[: max(0, len(finished) - self._kept)]:
            del self._all[old.id]
            async with self._writing:
                await self._slots.pop(old.id).delete()
