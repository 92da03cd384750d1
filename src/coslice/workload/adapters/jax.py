"""JAX arrays in a holder that the job keeps: a dictionary, a list, or an object with attributes.

An array cannot be emptied in place, so what moves is the holder's content: while it is away its arrays are
deleted (JAX raises on their use), afterwards there are new ones in the same places. References that the job
made elsewhere stay deleted: reach state through the holder, inside sections. Compiled functions stay valid.

On accelerators the copy goes to JAX's pinned host memory, on CPU devices to the agent's buffer. Donation does
not work across kinds of memory: so copy, wait, delete.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from collections.abc import Set as AbstractSet
from typing import Any

from coslice.errors import ConfigError, NoRoom, OperationFailed
from coslice.workload.buffers import HostBuffer

ALIGNED = 64


def jax() -> Any:
    return sys.modules["jax"]


class JaxAdapter:
    leaves_first = False

    def __init__(self, holder: Any, env: Mapping[str, str] = os.environ) -> None:
        if "jax" not in sys.modules:
            raise ConfigError("arrays are JAX's, and jax is not loaded: import it before registering")
        self._slots = _slots(holder)
        platforms = {device.platform for array in self.arrays() for device in array.devices()}
        _check_platforms(platforms, env)
        self.pinned = bool(platforms - {"cpu"})
        self.device = "cuda" if platforms & {"gpu", "cuda", "rocm"} else "host"

    def arrays(self, tags: AbstractSet[str] = frozenset()) -> list[Any]:
        """Each once, in the holder's order. ``tags``: keys of the holder; none: all."""
        found: dict[int, Any] = {}
        for tag, get, _ in self._slots():
            if not tags or tag in tags:
                for leaf in jax().tree_util.tree_leaves(get()):
                    if _movable(leaf):
                        found.setdefault(id(leaf), leaf)
        return list(found.values())

    def measure(self, seen: set[int]) -> int:
        fresh = [array for array in self.arrays() if id(array) not in seen]
        seen.update(id(array) for array in fresh)
        return sum(_nbytes(array) for array in fresh)

    def survey(self, seen: set[int]) -> tuple[int, None]:
        return self.measure(seen), None

    def device_bytes(self) -> int:
        if self.device != "cuda":
            return 0
        stats = [device.memory_stats() or {} for device in jax().local_devices()]
        return sum(int(each.get("bytes_in_use", 0)) for each in stats) or self.measure(set())

    def take(self, *, discard: bool, tags: AbstractSet[str], seen: set[int]) -> "JaxTaken | None":
        arrays = [array for array in self.arrays(tags) if id(array) not in seen]
        for array in arrays:
            if not array.is_fully_addressable:
                raise OperationFailed(
                    f"an array of shape {array.shape} has parts on other hosts: every host moves its own; "
                    "use a whole-process backend for this job"
                )
        return JaxTaken(self, arrays, discard=discard) if arrays else None

    def replace(self, new: Mapping[int, Any]) -> None:
        """Put ``new`` arrays, by the ``id`` of those that they stand for, into the holder."""
        for _, get, put in self._slots():
            old = get()
            leaves, shape = jax().tree_util.tree_flatten(old)
            if any(id(leaf) in new for leaf in leaves):
                put(shape.unflatten([new.get(id(leaf), leaf) for leaf in leaves]))


class JaxTaken:
    def __init__(self, adapter: JaxAdapter, arrays: list[Any], *, discard: bool) -> None:
        self._adapter, self._arrays, self._discard = adapter, arrays, discard
        self.registered = sum(_nbytes(array) for array in arrays)
        self.keys: AbstractSet[int] = {id(array) for array in arrays}
        self._shapes = [(array.shape, array.dtype, array.sharding) for array in arrays]
        self._free = [not getattr(array, "committed", True) for array in arrays]
        """Bound to no device: bound after a move they would have every step compiled once more."""
        self._offsets: list[int] = []
        at = 0
        for array in arrays:
            self._offsets.append(at)
            at += -(-array.nbytes // ALIGNED) * ALIGNED
        self.kept = 0 if discard or adapter.pinned else at
        self._host: list[Any] = []
        self._back: list[Any] = []

    def save(self, buffer: HostBuffer | None, offset: int) -> None:
        jax().block_until_ready(self._arrays)
        if self._discard:
            return
        if self._adapter.pinned:
            self._host = [
                jax().device_put(array, array.sharding.with_memory_kind("pinned_host"))
                for array in self._arrays
            ]
            jax().block_until_ready(self._host)
            return
        numpy = sys.modules["numpy"]
        if buffer is not None:
            for array, at in zip(self._arrays, self._offsets, strict=True):
                view = numpy.frombuffer(buffer.bytes(offset + at, array.nbytes), dtype=array.dtype)
                numpy.copyto(view.reshape(array.shape), numpy.asarray(array))

    def free(self) -> None:
        for array in (*self._arrays, *self._back):
            if not array.is_deleted():
                array.delete()
        self._back = []

    def allocate(self) -> None:
        pass  # an array is allocated and filled in one step

    def load(self, buffer: HostBuffer | None, offset: int) -> None:
        if self._back or not any(array.is_deleted() for array in self._arrays):
            return
        try:
            self._back = [self._make(i, buffer, offset + at) for i, at in enumerate(self._offsets)]
            jax().block_until_ready(self._back)
        except (RuntimeError, MemoryError) as error:  # jaxlib's XlaRuntimeError is a RuntimeError
            raise NoRoom(f"no room on the device to bring JAX arrays back: {error}") from error

    def finish(self) -> None:
        """The new arrays take the places of the old ones."""
        self._adapter.replace({id(old): new for old, new in zip(self._arrays, self._back, strict=False)})
        for array in self._host:
            array.delete()
        self._host = []

    def _make(self, i: int, buffer: HostBuffer | None, at: int) -> Any:
        shape, dtype, sharding = self._shapes[i]
        unbound = self._free[i] and sharding.device_set == {jax().local_devices()[0]}
        if self._host:
            return jax().device_put(self._host[i], sharding)
        numpy = sys.modules["numpy"]
        if self._discard:  # the job's on_restore fills it; until then the same on every run
            data = numpy.zeros(shape, dtype)
        elif buffer is None:
            raise OperationFailed("the host buffer of parked state is gone")
        else:
            size = int(numpy.prod(shape, dtype=numpy.int64)) * dtype.itemsize
            # A copy: JAX takes an aligned numpy array as it is, and the buffer will hold other bytes.
            data = numpy.array(numpy.frombuffer(buffer.bytes(at, size), dtype=dtype)).reshape(shape)
        if unbound:
            return jax().device_put(data)
        return jax().make_array_from_callback(shape, sharding, lambda index: data[index])


Slot = tuple[str, Callable[[], Any], Callable[[Any], None]]
"""Tag, reader, writer of one place in the holder."""


def _slots(holder: Any) -> Callable[[], Iterator[Slot]]:
    """Places of the holder, looked up anew each time; raises ``ConfigError`` where nothing can be put."""
    if isinstance(holder, MutableMapping):
        return lambda: (
            (str(key), lambda k=key: holder[k], lambda v, k=key: holder.__setitem__(k, v))  # type: ignore[misc]
            for key in list(holder)
        )
    if isinstance(holder, MutableSequence):
        return lambda: (
            (str(i), lambda i=i: holder[i], lambda v, i=i: holder.__setitem__(i, v))  # type: ignore[misc]
            for i in range(len(holder))
        )
    parameters = getattr(type(holder), "__dataclass_params__", None)
    frozen = parameters is not None and parameters.frozen
    if frozen or not hasattr(holder, "__dict__") or isinstance(holder, type):
        raise ConfigError(
            f"a {type(holder).__name__} cannot take new arrays: keep the state in a dictionary, as in "
            "state = {'train': train_state}, register that, and read state['train'] in your sections"
        )
    return lambda: (
        (name, lambda n=name: getattr(holder, n), lambda v, n=name: setattr(holder, n, v))  # type: ignore[misc]
        for name in list(vars(holder))
    )


def _movable(leaf: Any) -> bool:
    """An array on a device. Keys of random generators stay: they are a few bytes, and no numbers."""
    if not isinstance(leaf, jax().Array) or isinstance(leaf, jax().core.Tracer) or leaf.is_deleted():
        return False
    return not jax().dtypes.issubdtype(leaf.dtype, jax().dtypes.prng_key)


def _nbytes(array: Any) -> int:
    """On this host's devices; replicas count each."""
    return sum(int(shard.data.nbytes) for shard in array.addressable_shards)


def _check_platforms(platforms: set[str], env: Mapping[str, str]) -> None:
    if "tpu" in platforms:
        raise ConfigError(
            "libtpu gives a TPU to one process for as long as it lives: freeing arrays makes no room for "
            "another job. Use the whole-process backend: coslice run --backend tpu"
        )
    if platforms - {"cpu"} and env.get("XLA_PYTHON_CLIENT_ALLOCATOR") != "platform":
        raise ConfigError(
            "JAX keeps freed GPU memory for itself: start the job with XLA_PYTHON_CLIENT_ALLOCATOR=platform "
            "and XLA_PYTHON_CLIENT_PREALLOCATE=false in its environment"
        )
