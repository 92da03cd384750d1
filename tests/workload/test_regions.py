"""Regions, the mode discard, callbacks, and moves that fail half way: all or nothing."""

import os
from typing import Any

import pytest
import torch
from torch import nn
from workload.nets import Training, digests

from coslice.errors import ConfigError, NoRoom, OperationFailed, StateOffloaded
from coslice.gate import GATE
from coslice.workload.adapters import torch as torch_adapter
from coslice.workload.buffers import LocalBuffers


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16)
        self.lora_a, self.lora_b = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.lora_b(self.lora_a(x))
        return out


def lora_run() -> tuple[Lora, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Lora()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    return model, optimizer


FLOAT = 4
BASE, ADAPTER = (16 * 16 + 16) * FLOAT, 2 * 16 * 2 * FLOAT
OPTIMIZER = 2 * (BASE + ADAPTER) + 4 * FLOAT  # two moments, and a step count for each of four parameters


@pytest.mark.parametrize(
    ("tags", "size"),
    [
        (("weights",), BASE),
        (("adapter",), ADAPTER),
        (("optimizer",), OPTIMIZER),
        (("gradients",), BASE + ADAPTER),
        (("weights", "optimizer"), BASE + OPTIMIZER),
        (("unknown",), 0),
        ((), 2 * (BASE + ADAPTER) + OPTIMIZER),
    ],
)
def test_only_the_regions_asked_for_move(tags: tuple[str, ...], size: int, registered: Any) -> None:
    model, optimizer = lora_run()
    before = digests(model, optimizer)
    handle = registered(model, optimizer)
    assert handle.offload(tags=tags) == size
    assert handle.state_bytes == 2 * (BASE + ADAPTER) + OPTIMIZER
    assert handle.restore() == size
    assert digests(model, optimizer) == before


def test_a_region_that_stays_can_be_used(registered: Any) -> None:
    model, optimizer = lora_run()
    handle = registered(model, optimizer)
    handle.offload(tags=["optimizer"])
    model(torch.ones(2, 16))
    with pytest.raises(StateOffloaded, match="a step of 'optimizer'"):
        optimizer.step()


def test_regions_leave_one_after_the_other_and_return_together(registered: Any) -> None:
    model, optimizer = lora_run()
    before = digests(model, optimizer)
    handle = registered(model, optimizer)
    assert handle.offload(tags=["optimizer"]) == OPTIMIZER
    assert handle.offload() == 2 * (BASE + ADAPTER)
    assert handle.offload() == 0
    assert handle.restore() == OPTIMIZER + 2 * (BASE + ADAPTER)
    assert digests(model, optimizer) == before


def test_users_choose_tags_by_object_and_by_name(registered: Any) -> None:
    actor, critic = nn.Linear(8, 8), nn.Linear(8, 8)
    handle = registered({"actor": actor, "critic": critic}, tags={"critic.bias": "small"})
    assert handle.offload(tags=["actor"]) == (64 + 8) * FLOAT
    assert handle.offload(tags=["small"]) == 8 * FLOAT
    assert handle.offload(tags=["critic"]) == 64 * FLOAT


def test_discarded_bytes_are_filled_again_by_the_callback(registered: Any) -> None:
    model = nn.Linear(64, 64)
    checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
    handle = registered(model, mode="discard", on_restore=lambda: model.load_state_dict(checkpoint))
    before = digests(model)
    assert handle.offload() == (64 * 64 + 64) * FLOAT
    assert handle._group.state.buffers.current is None
    handle.restore()
    assert digests(model) == before


def test_discarding_without_a_callback_is_refused(registered: Any) -> None:
    handle = registered(nn.Linear(8, 8))
    with pytest.raises(ConfigError, match=r"model cannot be discarded.*on_restore"):
        handle.offload(mode="discard")
    assert not handle.parked
    assert not GATE.closed


@pytest.mark.parametrize("payload", [b"", b"kept" * 1000, bytearray(7), None])
def test_callbacks_get_their_bytes_back(payload: Any, registered: Any) -> None:
    got: list[Any] = []
    handle = registered(on_snapshot=lambda: payload, on_restore=got.append)
    handle.offload()
    assert handle.parked
    handle.restore()
    assert got == [payload]
    assert not handle.parked


def test_bytes_of_callbacks_are_not_read_from_a_file_that_was_cut_short(registered: Any) -> None:
    """It would end the process (SIGBUS)."""
    got: list[Any] = []
    handle = registered(on_snapshot=lambda: b"kept" * 10_000, on_restore=got.append)
    handle.offload()
    buffer = handle._group.state.buffers.current
    size = os.fstat(buffer.fd).st_size
    os.ftruncate(buffer.fd, 4096)
    with pytest.raises(OperationFailed, match="cut"):
        handle.restore()
    assert (got, handle.parked) == ([], True)
    os.ftruncate(buffer.fd, size)
    handle.restore()
    assert len(got) == 1


def test_callbacks_run_while_the_tensors_are_there(registered: Any) -> None:
    model = nn.Linear(4, 4)
    sums: list[float] = []
    handle = registered(
        model,
        on_snapshot=lambda: sums.append(float(model.weight.detach().sum())),
        on_restore=lambda: sums.append(float(model.weight.detach().sum())),
    )
    handle.offload()
    handle.restore()
    assert sums[0] == sums[1]


def test_a_snapshot_callback_may_raise_anything_and_nothing_has_moved(registered: Any) -> None:
    for error in (SystemExit(3), KeyboardInterrupt(), ValueError("no")):

        def raises(error: BaseException = error) -> None:
            raise error

        model = nn.Linear(4, 4)
        handle = registered(model, on_snapshot=raises)
        with pytest.raises(OperationFailed, match=f"on_snapshot raised {type(error).__name__}.*job's own"):
            handle.offload()
        assert not handle.parked
        assert not GATE.closed
        model(torch.ones(1, 4))


def test_a_restore_callback_that_fails_is_called_again(registered: Any) -> None:
    calls: list[Any] = []

    def fails_once(data: bytes) -> None:
        calls.append(data)
        if len(calls) == 1:
            raise SystemExit

    model = nn.Linear(4, 4)
    before = digests(model)
    handle = registered(model, on_snapshot=lambda: b"mine", on_restore=fails_once)
    handle.offload()
    with pytest.raises(OperationFailed, match="on_restore raised SystemExit"):
        handle.restore()
    assert GATE.closed
    handle.restore()
    assert calls == [b"mine", b"mine"]
    assert not GATE.closed
    assert digests(model) == before


class SmallBuffers(LocalBuffers):
    """Host memory for ``limit`` bytes."""

    limit = 0

    def obtain(self, size: int, *, keep: int = 0) -> Any:
        if size > self.limit:
            raise NoRoom(f"{size} bytes do not fit into {self.limit}")
        return super().obtain(size, keep=keep)


def test_without_host_memory_nothing_moves_and_callbacks_are_undone(registered: Any) -> None:
    order: list[str] = []
    run = Training("adamw-fused")
    run.step()
    before = digests(run.net, run.optimizer)
    handle = registered(
        run.net,
        run.optimizer,
        on_snapshot=lambda: order.append("snapshot"),
        on_restore=lambda: order.append("restore"),
    )
    handle._group.state.buffers = SmallBuffers()
    with pytest.raises(NoRoom, match="do not fit"):
        handle.offload()
    assert order == ["snapshot", "restore"]
    assert not handle.parked
    assert not GATE.closed
    assert digests(run.net, run.optimizer) == before


@pytest.mark.parametrize("step", ["save", "free"])
def test_a_move_out_that_breaks_half_way_is_undone(
    step: str, registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Training("adamw-fused"), Training("adamw-fused")
    first.step(), second.step()
    before = digests(first.net, second.net)
    handles = [registered(run.net, run.optimizer) for run in (first, second)]
    original = getattr(torch_adapter.TorchTaken, step)
    calls: list[Any] = []

    def breaks_at_the_second(self: Any, *args: Any) -> None:
        calls.append(self)
        original(self, *args)
        if len(calls) == 2:
            raise RuntimeError("the driver is gone")

    monkeypatch.setattr(torch_adapter.TorchTaken, step, breaks_at_the_second)
    with pytest.raises(OperationFailed, match="the driver is gone"):
        handles[0]._group.state.move_out(wait=0.0)
    assert len(calls) == 2
    assert not any(handle.parked for handle in handles)
    assert not GATE.closed
    assert digests(first.net, second.net) == before
    assert first.step() == second.step()


def test_a_restore_without_room_leaves_everything_parked_for_another_try(
    registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Training("adamw-fused")
    run.step()
    before = digests(run.net, run.optimizer)
    handle = registered(run.net, run.optimizer)
    size = handle.offload()
    monkeypatch.setattr(torch_adapter.TorchTaken, "allocate", _no_room_for_the_last)
    with pytest.raises(NoRoom, match="no room on the device"):
        handle.restore()
    assert handle.parked
    assert handle._group.state.parked_bytes == size
    with pytest.raises(StateOffloaded):
        run.net.scale + 1
    monkeypatch.undo()
    handle.restore()
    assert digests(run.net, run.optimizer) == before


def _no_room_for_the_last(self: torch_adapter.TorchTaken) -> None:
    for block in self.blocks[:-1]:
        block.storage.resize_(block.nbytes)
    raise NoRoom("no room on the device")


def test_callbacks_see_the_tensors_of_every_registration(registered: Any) -> None:
    sums: list[float] = []
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def look() -> None:
        sums.append(sum(float(model.weight.detach().sum()) for model in models))

    handles = [registered(model, on_snapshot=look, on_restore=look) for model in models]
    handles[0]._group.state.move_out(wait=0.0)
    handles[0]._group.state.move_in()
    assert len(sums) == 4
    assert len(set(sums)) == 1


def test_a_discarded_region_is_filled_again_too(registered: Any) -> None:
    model, optimizer = lora_run()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = digests(model, optimizer)
    handle = registered(model, optimizer, on_restore=lambda: model.load_state_dict(weights))
    assert handle.offload(tags=["weights"], mode="discard") == BASE
    handle.restore()
    assert digests(model, optimizer) == before
