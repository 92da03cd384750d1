"""State that went to host memory and came back is the same, bit for bit, and training does not notice."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from workload.nets import OPTIMIZERS, Net, Training, digests

from coslice.errors import ConfigError, StateBusy
from coslice.gate import GATE
from coslice.workload import register
from coslice.workload.adapters.torch import TorchAdapter, make_roots


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_with_moves_equals_training_without(optimizer: str, registered: Any) -> None:
    plain, moved = Training(optimizer), Training(optimizer)
    handle = registered(moved.net, moved.optimizer)
    for step in range(6):
        assert plain.step() == moved.step(), f"step {step}"
        before = digests(moved.net, moved.optimizer)
        assert handle.offload() == handle.restore()
        assert digests(moved.net, moved.optimizer) == before
    assert digests(plain.net, plain.optimizer) == digests(moved.net, moved.optimizer)


def awkward_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    base = torch.randn(64, 64)
    return {
        "half": torch.randn(33, 7).half(),
        "bfloat16": torch.randn(129).bfloat16(),
        "double": torch.randn(5, 5, dtype=torch.float64),
        "int8": torch.randint(-128, 127, (1000,), dtype=torch.int8),
        "int64": torch.arange(77),
        "bool": torch.rand(9) > 0.5,
        "complex": torch.randn(6, dtype=torch.complex64),
        "scalar": torch.tensor(3.25),
        "transposed": base.t(),
        "strided": base[1::3, ::2],
        "expanded": torch.randn(1, 8).expand(100, 8),
        "empty": torch.empty(0, 4),
        "zeros": torch.zeros(40_000),
        "inference": torch.inference_mode()(torch.randn)(12),
        "sparse": torch.sparse_coo_tensor(
            torch.tensor([[0, 2], [1, 3]]), torch.tensor([1.0, 2.0]), (4, 4)
        ).coalesce(),
        "nans": torch.full((100,), float("nan")),
    }


def test_every_kind_of_tensor_returns_bit_equal_into_a_dirty_reused_buffer(registered: Any) -> None:
    noise = registered(tensors=torch.randint(1, 255, (1 << 20,), dtype=torch.uint8))
    noise.offload()  # the buffer of a group is one: now it is full of other bytes
    noise.restore()
    tensors = awkward_tensors()
    sparse = tensors["sparse"]
    dense = [t for t in tensors.values() if t.layout == torch.strided]
    before, sums = digests(dense, sparse.values(), sparse.indices()), [str(t) for t in tensors.values()]
    handle = registered(tensors=tensors)
    for _ in range(2):
        handle.offload()
        handle.restore()
        assert digests(dense, sparse.values(), sparse.indices()) == before
        assert [str(t) for t in tensors.values()] == sums
    assert tensors["transposed"].stride() == (1, 64)


def test_memory_that_several_tensors_share_counts_and_moves_once(registered: Any) -> None:
    net = Net()
    handle = registered(net)
    distinct = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in net.parameters()}
    distinct |= {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in net.buffers()}
    assert handle.state_bytes == sum(distinct.values())
    assert handle.offload() == sum(distinct.values())
    handle.restore()
    assert net.head.weight is net.embed.weight
    with torch.no_grad():
        net.body[0].weight[0, 0] = 5.0
    assert net.row[0] == 5.0


class Fresh(Mapping[int, Any]):
    """Makes its values anew each time it is looked at, as wrappers of optimizers may."""

    def __init__(self, *make: Callable[[], Any]) -> None:
        self._make = make

    def __getitem__(self, key: int) -> Any:
        return self._make[key]()

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._make)))

    def __len__(self) -> int:
        return len(self._make)


@pytest.mark.parametrize("what", ["containers", "tensors"])
def test_what_has_the_number_of_a_container_or_tensor_that_is_gone_is_found_too(what: str) -> None:
    own = [torch.ones(100) for _ in range(10)]
    if what == "containers":
        state = [Fresh(lambda t=t: {"it": t}) for t in own]
    else:
        state = [each for t in own for each in (Fresh(lambda: torch.empty(0)), Fresh(t.detach))]
    assert TorchAdapter(make_roots(None, None, state, None), device="host").measure(set()) == 10 * 400


def test_state_that_appears_later_is_found_at_the_next_move(registered: Any) -> None:
    run = Training("adamw-fused")
    handle = registered(run.net, run.optimizer)
    at_first = handle.state_bytes
    run.step()
    assert handle.offload() == handle.state_bytes > 3 * at_first
    handle.restore()
    run.optimizer.zero_grad()
    assert handle.offload() < 4 * at_first


def test_two_registrations_share_storages_and_each_moves_its_own(registered: Any) -> None:
    shared = nn.Linear(64, 64)
    first, second = registered(shared), registered([shared, nn.Linear(64, 64)])
    size = (64 * 64 + 64) * 4
    assert (first.state_bytes, second.state_bytes) == (size, size)
    assert first.offload() == size
    assert first.parked
    assert not second.parked
    assert second.offload() == size
    first.restore()
    assert GATE.closed
    second.restore()
    assert not GATE.closed


def test_a_backward_pass_may_wait_while_the_state_is_away(registered: Any) -> None:
    plain, moved = Training("sgd-momentum"), Training("sgd-momentum")
    tokens = torch.arange(8)
    handle = registered(moved.net, moved.optimizer)
    losses = [nn.functional.cross_entropy(run.net(tokens), tokens) for run in (plain, moved)]
    handle.offload()
    handle.restore()
    for loss in losses:
        loss.backward()
    assert digests(plain.net) == digests(moved.net)


def test_a_lost_buffer_is_told_and_not_read(registered: Any) -> None:
    model = nn.Linear(256, 256)
    handle = registered(model, verify=True)
    before = digests(model)
    handle.offload()
    buffer = handle._group.state.buffers.current
    assert buffer is not None
    kept = bytes(buffer.bytes(1000, 1))
    buffer.bytes(1000, 1)[:] = bytes([kept[0] ^ 1])
    with pytest.raises(Exception, match="checksum"):
        handle.restore()
    assert handle.parked
    buffer.bytes(1000, 1)[:] = kept
    handle.restore()
    assert digests(model) == before


@pytest.mark.parametrize("kind", ["numpy", "buffer", "shared"])
def test_memory_that_torch_cannot_give_up_is_refused_by_name(kind: str, registered: Any) -> None:
    made = {
        "numpy": lambda: torch.from_numpy(torch.zeros(4, 4).numpy().copy()),
        "buffer": lambda: torch.frombuffer(bytearray(64), dtype=torch.float32),
        "shared": lambda: torch.zeros(4, 4).share_memory_(),
    }[kind]()
    model = nn.Linear(4, 4)
    model.register_buffer("table", made)
    with pytest.raises(ConfigError, match=r"model\.table.*clone") as caught:
        register(model, env={})
    assert caught.value.data == {"tensor": "model.table"}


def test_such_memory_met_later_fails_the_move_and_changes_nothing(registered: Any) -> None:
    model = nn.Linear(4, 4)
    handle = registered(model)
    model.register_buffer("table", torch.zeros(4).share_memory_())
    with pytest.raises(ConfigError, match=r"model\.table"):
        handle.offload()
    assert not handle.parked
    assert not GATE.closed
    model(torch.ones(1, 4))
    del model.table


def test_nothing_moves_inside_an_accelerator_section(registered: Any) -> None:
    model = nn.Linear(4, 4)
    handle = registered(model)
    section = GATE.enter()
    with pytest.raises(StateBusy, match="section"):
        handle.offload(wait=0.01)
    GATE.leave(section)
    handle.offload()
    handle.restore()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing to register"),
        ({"model": 3}, "no 'named_parameters'"),
        ({"model": nn.Linear(1, 1), "mode": "keep"}, "offload or discard"),
        ({"model": nn.Linear(1, 1), "mode": "discard"}, "on_restore"),
        ({"model": nn.Linear(1, 1), "agent": "127.0.0.1:1"}, "job"),
    ],
)
def test_wrong_arguments_are_refused_with_the_next_step(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register(**arguments, env={})


def test_copies_by_torch_give_the_same_bytes(registered: Any) -> None:
    """The way of devices other than the CPU, here from host memory to host memory."""
    run = Training("adamw-fused")
    run.step()
    before = digests(run.net, run.optimizer)
    handle = registered(run.net, run.optimizer, verify=True)
    handle._registration.adapters[0].near = frozenset()
    for _ in range(2):
        handle.offload()
        handle.restore()
        assert digests(run.net, run.optimizer) == before


def test_on_cuda_what_lies_in_host_memory_stays(registered: Any) -> None:
    run = Training("adamw-fused")
    run.step()
    assert TorchAdapter(make_roots(run.net, run.optimizer, None, None), device="cuda").measure(set()) == 0
