"""Using state that is away raises an error that says so, and looking at its shape does not."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from workload.nets import Training

from coslice.errors import StateOffloaded
from coslice.gate import GATE
from coslice.workload.adapters.torch_guard import Guard


@pytest.fixture
def parked(registered: Any) -> Iterator[Training]:
    run = Training("adamw-fused")
    run.step()
    handle = registered(run.net, run.optimizer)
    handle.offload()
    yield run
    handle.restore()
    run.step()


def first(run: Training) -> Any:
    return run.optimizer.state[run.net.scale]["exp_avg"]


USES: dict[str, Callable[[Training], Any]] = {
    "arithmetic": lambda run: run.net.head.weight + 1,
    "in place": lambda run: run.net.head.weight.data.add_(1),
    "indexing": lambda run: run.net.head.weight[0, 0],
    "item": lambda run: run.net.scale.item(),
    "bool": lambda run: bool(run.net.scale),
    "comparison": lambda run: run.net.scale == 1,
    "iteration": lambda run: list(run.net.head.weight),
    "numpy": lambda run: run.net.head.weight.numpy(),
    "detach": lambda run: run.net.head.weight.detach(),
    "data": lambda run: run.net.head.weight.data,
    "data_ptr": lambda run: run.net.head.weight.data_ptr(),
    "target of a copy": lambda run: run.net.head.weight.copy_(torch.zeros(32, 16)),
    "source of a copy": lambda run: torch.empty(32, 16).copy_(run.net.head.weight),
    "out=": lambda run: torch.ones(32, 16, out=run.net.head.weight),
    "in a list": lambda run: torch.stack([torch.ones(()), run.net.scale]),
    "functional": lambda run: nn.functional.linear(torch.ones(1, 16), run.net.head.weight),
    "forward of a part": lambda run: run.net.body(torch.ones(2, 16)),
    "buffer": lambda run: run.net.body[1].running_mean.sum(),
    "gradient": lambda run: run.net.head.weight.grad.norm(),
    "clipping": lambda run: nn.utils.clip_grad_norm_(run.net.parameters(), 1.0),
    "optimizer state": lambda run: first(run) * 2,
    "state_dict": lambda run: run.net.state_dict(),
    "load_state_dict": lambda run: run.net.load_state_dict(Training("adamw-loop").net.state_dict()),
    "saving": lambda run: torch.save(run.net.scale, io.BytesIO()),
    "deepcopy": lambda run: copy.deepcopy(run.net),
    "to": lambda run: run.net.to(torch.float64),
    "zeroing gradients": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "dlpack": lambda run: torch.from_dlpack(run.net.scale),
    "setting data": lambda run: setattr(run.net.scale, "data", torch.ones(())),
}


@pytest.mark.parametrize("use", USES)
def test_use_of_parked_state_raises(use: str, parked: Training) -> None:
    # load_state_dict collects the errors of all its copies into a RuntimeError of its own
    kind = RuntimeError if use == "load_state_dict" else StateOffloaded
    with pytest.raises(kind, match="acquire"):
        USES[use](parked)


def test_the_message_names_the_tensor_the_module_and_the_optimizer(parked: Training) -> None:
    with pytest.raises(StateOffloaded, match=r"weights 'model\.scale'.*\(by mul\)"):
        parked.net.scale * 2
    with pytest.raises(StateOffloaded, match="module 'model' was called"):
        parked.net(torch.arange(4))
    with pytest.raises(StateOffloaded, match="a step of 'optimizer'"):
        parked.optimizer.step()
    with pytest.raises(StateOffloaded, match="optimizer 'optimizer"):
        first(parked).sum()


def test_a_section_cannot_begin(parked: Training) -> None:
    with pytest.raises(StateOffloaded, match="acquire"):
        GATE.enter()


def test_what_reads_no_memory_works(parked: Training) -> None:
    weight = parked.net.head.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (32, 16)
    assert (weight.dtype, weight.device.type, weight.dim()) == (torch.float32, "cpu", 2)
    assert (weight.numel(), weight.stride(), len(weight)) == (512, (16, 1), 32)
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert weight in {weight}
    assert "host memory" in repr(weight)
    assert "Embedding(32, 16)" in repr(parked.net)
    assert sum(p.numel() for p in parked.net.parameters()) > 0
    weight.requires_grad_(False)
    weight.requires_grad_(True)


def test_gradients_may_be_dropped_while_the_state_is_away(registered: Any) -> None:
    plain, moved = Training("adamw-fused"), Training("adamw-fused")
    handle = registered(moved.net, moved.optimizer)
    assert plain.step() == moved.step()
    handle.offload()
    moved.optimizer.zero_grad()
    handle.restore()
    assert moved.net.scale.grad is None
    assert plain.step() == moved.step()


def test_afterwards_every_class_is_what_it_was(registered: Any) -> None:
    class Special(nn.Parameter):
        pass

    run = Training("adamw-fused")
    run.net.special = Special(torch.ones(3))
    run.step()
    handle = registered(run.net, run.optimizer)
    tensors = [*run.net.parameters(), *run.net.buffers(), first(run)]
    before = [type(tensor) for tensor in tensors]
    handle.offload()
    assert all(type(tensor) is not kind for tensor, kind in zip(tensors, before, strict=True))
    handle.restore()
    assert [type(tensor) for tensor in tensors] == before
    assert not run.net._forward_pre_hooks


def test_a_tensor_with_the_id_of_one_that_is_gone_is_guarded() -> None:
    """A guard that was never lifted went with its tensors (a forked child drops its parent's)."""
    gone = [torch.ones(2) for _ in range(100)]
    ids = set(map(id, gone))
    guard = Guard()
    while gone:
        guard.tensor(gone.pop(), "gone")
    del guard
    fresh = [torch.ones(2) for _ in range(1000)]
    again = [tensor for tensor in fresh if id(tensor) in ids]
    assert again
    guard = Guard()
    for tensor in again:
        guard.tensor(tensor, "fresh")
    for tensor in again:
        with pytest.raises(StateOffloaded, match="fresh is in host memory"):
            tensor.sum()
    guard.lift()
    assert all(type(tensor) is torch.Tensor for tensor in again)
