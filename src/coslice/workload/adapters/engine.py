"""State of an object that moves its own, an inference engine or a memory saver: it is told to sleep and to
wake.

Such objects say success and free nothing, die of being told twice, or come back with other weights. So here
is the record of what sleeps (never told twice), the device is measured before and after, and ``probe``, if
there is one, must say the same afterwards. ``vllm``, ``sglang`` and ``memory_saver`` know the words of each.
"""

import os
import sys
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from coslice.errors import ConfigError, CosliceError, NoRoom, OperationFailed, StateLost
from coslice.sizes import format_size
from coslice.workload.buffers import HostBuffer
from coslice.workload.listening import tree

ENOUGH = 0.9
SOME = 1 << 20
"""Where nobody knows how much there is: this much must leave for a sleep to be one."""


class Body(Protocol):
    """The words of one kind of engine. Each is called once per direction, from the mover's thread."""

    name: str
    regions: tuple[str, ...]
    parts: bool
    """Can regions sleep one by one?"""
    expected: int
    """Bytes that a whole sleep frees at least; 0: unknown."""

    def check(self, regions: Sequence[str], *, discard: bool) -> None:
        """Raises ``ConfigError`` for what would not come back."""
        ...

    def sleep(self, regions: Sequence[str], *, discard: bool) -> None: ...

    def wake(self, regions: Sequence[str], *, discard: bool) -> None: ...

    def awake(self) -> bool | None:
        """Its own word; None: it has none."""
        ...


class EngineAdapter:
    leaves_first = True

    def __init__(self, body: Body, *, probe: Callable[[], Any] | None = None) -> None:
        self.body, self.probe = body, probe
        self.freed = 0
        """What a whole sleep gave up the last time, in bytes."""
        self.out = False

    def measure(self, seen: set[int]) -> int:
        """Not known before it has slept once: an engine's own figures do not change when it sleeps."""
        return 0 if self.out else self.freed

    def device_bytes(self) -> int:
        return device_use() if on_cuda() else 0

    def survey(self, seen: set[int]) -> tuple[int, None]:
        return self.measure(seen), None

    def take(self, *, discard: bool, tags: AbstractSet[str], seen: set[int]) -> "EngineTaken | None":
        regions = tuple(region for region in self.body.regions if not tags or region in tags)
        if self.out or not regions or (len(regions) < len(self.body.regions) and not self.body.parts):
            return None
        self.body.check(regions, discard=discard)
        before = None if self.probe is None else _ask(self.body.name, "probe", self.probe)
        self.out = True
        return EngineTaken(self, regions, discard, before)


class EngineTaken:
    kept = 0
    keys: AbstractSet[int] = frozenset()

    def __init__(self, adapter: EngineAdapter, regions: Sequence[str], discard: bool, before: Any) -> None:
        self._adapter, self._regions, self._discard, self._before = adapter, regions, discard, before
        self.registered = adapter.freed
        self._asleep = self._slept = False

    def save(self, buffer: HostBuffer | None, offset: int) -> None:
        pass  # it keeps its state itself

    def free(self) -> None:
        if self._asleep:
            return
        body, used = self._adapter.body, device_use()
        self._asleep = self._slept = True  # before: after an error nobody knows
        _ask(body.name, "sleep", lambda: body.sleep(self._regions, discard=self._discard))
        freed = used - device_use()
        whole = len(self._regions) == len(body.regions)
        need = int(ENOUGH * (self._adapter.freed or body.expected)) if whole else 0
        if freed < max(need, SOME):
            raise OperationFailed(
                f"{body.name} said that it sleeps, and {format_size(max(0, freed))} of the device became "
                f"free where {format_size(max(need, SOME))} must: was it made with its sleep mode (or memory "
                "saver) on?"
            )
        self.registered = freed
        if whole:
            self._adapter.freed = freed

    def allocate(self) -> None:
        if not self._asleep:
            return
        body, room = self._adapter.body, device_room()
        if room is not None and room < self.registered:
            raise NoRoom(
                f"{body.name} needs {format_size(self.registered)} of the device to wake and "
                f"{format_size(room)} are free; it would not survive the attempt"
            )
        used = device_use()
        try:
            _ask(body.name, "wake", lambda: body.wake(self._regions, discard=self._discard))
        except CosliceError as error:
            raise StateLost(f"{error}; make the engine anew") from error
        self._asleep = False
        # Something else of the process may have become free while it went to sleep: that is not its state,
        # and will not leave the next time.
        self._adapter.freed = min(self._adapter.freed, max(0, device_use() - used))

    def load(self, buffer: HostBuffer | None, offset: int) -> None:
        pass

    def finish(self) -> None:
        body = self._adapter.body
        if self._slept:
            if body.awake() is False:
                raise StateLost(f"{body.name} was woken and says that it still sleeps: make it anew")
            self._compare()
            self._slept = False
        self._adapter.out = False

    def _compare(self) -> None:
        if self._adapter.probe is None:
            return
        after = _ask(self._adapter.body.name, "probe", self._adapter.probe)
        if not self._discard and after != self._before:
            raise StateLost(
                f"{self._adapter.body.name} answers {_short(after)} where it answered {_short(self._before)} "
                "before it slept: its weights did not come back as they were; make it anew"
            )


def on_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()


def device_use() -> int:
    """Bytes of the device in use: of all of it on CUDA (only one job moves at a time), of this process and
    its children on the host accelerator. Frameworks' own figures do not change when memory is unmapped."""
    if on_cuda():
        cuda = sys.modules["torch"].cuda
        cuda.synchronize()
        pairs = [cuda.mem_get_info(i) for i in range(cuda.device_count())]
        return sum(int(total) - int(free) for free, total in pairs)
    return sum(_anonymous(pid) for pid in tree(os.getpid()))


def device_room() -> int | None:
    """Free bytes on CUDA; None on the host accelerator, whose agent keeps the books."""
    if not on_cuda():
        return None
    cuda = sys.modules["torch"].cuda
    return sum(int(cuda.mem_get_info(i)[0]) for i in range(cuda.device_count()))


def _anonymous(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:")), 0)
    except OSError:  # it has ended
        return 0


def _ask(name: str, what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except CosliceError:
        raise
    except BaseException as error:  # SystemExit too: the channel must live and tell
        raise OperationFailed(f"{what} of {name} failed: {type(error).__name__}: {error}") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def engine_adapter(
    engine: Any, *, regions: Sequence[str] = (), probe: Callable[[], Any] | None = None
) -> EngineAdapter:
    """The adapter for whatever this is, told by its methods; raises ``ConfigError``."""
    if _has(engine, "release_memory_occupation", "resume_memory_occupation"):
        from coslice.workload.adapters.sglang import Sglang

        return EngineAdapter(Sglang(engine), probe=probe)
    if _has(engine, "sleep", "wake_up"):
        from coslice.workload.adapters.vllm import Vllm, default_probe

        return EngineAdapter(Vllm(engine), probe=probe or default_probe(engine))
    if _has(engine, "pause", "resume", "region"):
        from coslice.workload.adapters.memory_saver import MemorySaver

        return EngineAdapter(MemorySaver(engine, regions), probe=probe)
    raise ConfigError(
        f"a {type(engine).__name__} is no engine that can sleep: known are vLLM's LLM and AsyncLLM, SGLang's "
        "Engine and torch_memory_saver; for anything else use on_snapshot and on_restore"
    )


def _has(engine: Any, *names: str) -> bool:
    return all(callable(getattr(engine, name, None)) for name in names)
