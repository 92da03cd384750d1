"""State that the user moves: two plain functions, and bytes between them if they like.

``on_snapshot()`` frees what it can and may return bytes to keep; ``on_restore`` gets those bytes (or None) if
it takes an argument. They run in the mover's thread. Whatever they raise, ``SystemExit`` included, is a
failed move.
"""

import inspect
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

from coslice.errors import OperationFailed
from coslice.workload.buffers import HostBuffer

OnSnapshot = Callable[[], Any]
OnRestore = Callable[..., Any]


class CallbackAdapter:
    leaves_first = True

    def __init__(self, on_snapshot: OnSnapshot | None, on_restore: OnRestore | None) -> None:
        self._on_snapshot, self._on_restore = on_snapshot, on_restore
        self._wants_bytes = on_restore is not None and _takes_argument(on_restore)
        self._out = False

    def measure(self, seen: set[int]) -> int:
        return 0

    def device_bytes(self) -> int:
        return 0

    def survey(self, seen: set[int]) -> tuple[int, None]:
        return 0, None

    def take(self, *, discard: bool, tags: AbstractSet[str], seen: set[int]) -> "CallbackTaken | None":
        """Calls ``on_snapshot``. With tags it is left alone, unless it must fill again what is dropped."""
        if self._out or (tags and not discard):
            return None
        payload = None
        if self._on_snapshot is not None:
            payload = _bytes(call("on_snapshot", self._on_snapshot))
        self._out = True
        return CallbackTaken(self, payload, discard)

    def back(self, payload: bytes | None) -> None:
        if self._on_restore is not None:
            call("on_restore", self._on_restore, *((payload,) if self._wants_bytes else ()))
        self._out = False


class CallbackTaken:
    registered = 0
    keys: AbstractSet[int] = frozenset()

    def __init__(self, adapter: CallbackAdapter, payload: bytes | None, discard: bool) -> None:
        self._adapter, self._payload = adapter, payload
        self._saved = discard or not payload
        """Nothing goes into the buffer: in mode discard there is none."""
        self.kept = 0 if self._saved else len(payload or b"")

    def save(self, buffer: HostBuffer | None, offset: int) -> None:
        if not self._saved and buffer is not None:
            buffer.bytes(offset, self.kept)[:] = self._payload or b""

    def free(self) -> None:
        if not self._saved:
            self._payload = None

    def allocate(self) -> None:
        pass

    def load(self, buffer: HostBuffer | None, offset: int) -> None:
        if not self._saved and self._payload is None and buffer is not None:
            buffer.check(offset + self.kept)
            self._payload = bytes(buffer.bytes(offset, self.kept))

    def finish(self) -> None:
        self._adapter.back(self._payload)


def call(name: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except BaseException as error:  # SystemExit too: the channel must live and tell
        raise OperationFailed(
            f"{name} raised {type(error).__name__}({error}): the fault is in the job's own callback"
        ) from error


def _bytes(value: object) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise OperationFailed(f"on_snapshot returned {type(value).__name__}: return bytes to keep, or None")


def _takes_argument(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(b"")
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True
