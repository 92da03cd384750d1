"""JAX arrays leave and come back: real JAX, on CPU devices. Needs the extra ``jax`` (``make test-jax``)."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.jax
jax = pytest.importorskip("jax", reason="needs the extra jax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from coslice.errors import ConfigError  # noqa: E402
from coslice.workload.adapters import engine  # noqa: E402
from coslice.workload.adapters import jax as adapter  # noqa: E402
from coslice.workload.adapters.jax import JaxAdapter  # noqa: E402

MIB = 1 << 20


def make() -> dict[str, Any]:
    key = jax.random.key(7)
    return {
        "params": {"w": jax.random.normal(key, (512, 1024)), "b": jnp.arange(33, dtype=jnp.bfloat16)},
        "opt": [jnp.ones((1024, 1024)), jnp.zeros((), dtype=jnp.int32), None],
        "key": key,
        "step": 3,
    }


def values(state: Any) -> list[bytes]:
    leaves = jax.tree_util.tree_leaves(state)
    return [np.asarray(leaf).tobytes() for leaf in leaves if adapter._movable(leaf)]


def test_state_in_a_dictionary_returns_bit_equal_and_its_memory_is_free_meanwhile(registered: Any) -> None:
    state = make()
    before, old = values(state), state["params"]["w"]
    handle = registered(arrays=state)
    size = handle.state_bytes
    assert size == sum(len(value) for value in before)
    for _ in range(3):
        used = engine.device_use()
        assert handle.offload() == size
        assert used - engine.device_use() > 0.9 * size
        with pytest.raises(RuntimeError, match="deleted"):
            state["params"]["w"] + 1
        assert handle.restore() == size
        assert values(state) == before
    assert (state["step"], old.is_deleted()) == (3, True)


def test_a_compiled_step_goes_on_over_a_move_as_without_one(registered: Any) -> None:
    @jax.jit
    def step(w: Any, m: Any) -> tuple[Any, Any]:
        grad = jnp.tanh(w) * 0.1
        m = 0.9 * m + grad
        return w - 0.01 * m, m

    def train(state: dict[str, Any], moves: Any) -> bytes:
        for _ in range(4):
            state["w"], state["m"] = step(state["w"], state["m"])
            moves()
        return np.asarray(state["w"]).tobytes()

    alone, moved = ({"w": jnp.linspace(-1, 1, 4096), "m": jnp.zeros(4096)} for _ in range(2))
    handle = registered(arrays=moved)
    assert train(alone, lambda: None) == train(moved, lambda: (handle.offload(), handle.restore()))
    assert step._cache_size() == 1


def test_the_buffer_is_not_the_arrays_memory(registered: Any) -> None:
    """JAX takes an aligned numpy array as it is: later moves would overwrite the values."""
    state = {"w": jnp.arange(MIB, dtype=jnp.float32)}
    handle = registered(arrays=state)
    handle.offload()
    handle.restore()
    first = np.array(state["w"])
    buffer = handle._group.state.buffers.current
    buffer.bytes(0, 4 * MIB)[:] = bytes(4 * MIB)
    assert np.array_equal(np.asarray(state["w"]), first)


@pytest.mark.parametrize("kind", ["object", "list", "nested frozen"])
def test_what_can_hold_new_arrays_is_a_holder(kind: str, registered: Any) -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Train:
        w: Any

    array = jnp.arange(1000.0)
    holder: Any = {
        "object": SimpleNamespace(w=array),
        "list": [array],
        "nested frozen": {"train": Train(array)},
    }[kind]
    handle = registered(arrays=holder)
    handle.offload()
    handle.restore()
    held = holder.w if kind == "object" else holder[0] if kind == "list" else holder["train"].w
    assert np.array_equal(np.asarray(held), np.arange(1000.0))


def test_a_frozen_holder_is_refused_with_the_way_out() -> None:
    @dataclasses.dataclass(frozen=True)
    class Train:
        w: Any

    with pytest.raises(ConfigError, match="keep the state in a dictionary"):
        JaxAdapter(Train(jnp.ones(3)))


def test_an_array_that_two_places_share_moves_once_and_stays_shared(registered: Any) -> None:
    array = jnp.ones(1000)
    state = {"a": array, "b": {"also": array}}
    handle = registered(arrays=state)
    assert handle.offload() == array.nbytes
    handle.restore()
    assert state["a"] is state["b"]["also"]


def test_one_region_moves_and_the_other_stays(registered: Any) -> None:
    state = make()
    handle = registered(arrays=state)
    handle.offload(tags=["opt"])
    assert state["params"]["w"].sum() is not None
    assert state["opt"][0].is_deleted()
    handle.restore()


def test_dropped_arrays_come_back_as_zeros_for_the_job_to_fill(registered: Any) -> None:
    state = {"w": jnp.ones(100)}

    def fill() -> None:
        state["seen"] = float(state["w"].sum())

    handle = registered(arrays=state, mode="discard", on_restore=fill)
    handle.offload()
    handle.restore()
    assert np.array_equal(np.asarray(state["w"]), np.zeros(100))


def test_pinned_host_memory_is_used_where_there_is_an_accelerator() -> None:
    state = make()
    before, given = values(state), JaxAdapter(state)
    given.pinned = True  # the CPU backend has that kind of memory too
    taken = given.take(discard=False, tags=frozenset(), seen=set())
    assert taken is not None
    assert taken.kept == 0
    taken.save(None, 0)
    assert {array.sharding.memory_kind for array in taken._host} == {"pinned_host"}
    taken.free()
    taken.free()
    taken.load(None, 0)
    taken.finish()
    assert values(state) == before
    kinds = {
        leaf.sharding.memory_kind for leaf in jax.tree_util.tree_leaves(state) if hasattr(leaf, "sharding")
    }
    assert "pinned_host" not in kinds


@pytest.mark.parametrize(
    ("platforms", "env", "words"),
    [
        ({"tpu"}, {}, "--backend tpu"),
        ({"gpu"}, {}, "XLA_PYTHON_CLIENT_ALLOCATOR=platform"),
        ({"gpu"}, {"XLA_PYTHON_CLIENT_ALLOCATOR": "bfc"}, "XLA_PYTHON_CLIENT_ALLOCATOR=platform"),
    ],
)
def test_devices_that_would_not_become_free_are_refused(
    platforms: set[str], env: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        adapter._check_platforms(platforms, env)
    adapter._check_platforms({"gpu"}, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"})
