"""What did not change is not copied again, parts of the state move alone, and every way ends bit-equal."""

from typing import Any

import pytest
import torch
from torch import nn
from workload.nets import digests

from coslice.errors import NoRoom, OperationFailed, StateLost
from coslice.gate import GATE
from coslice.workload.adapters import torch_copy
from coslice.workload.registry import GroupState

MIB = 1 << 20


class Many(nn.Module):
    """Layers of a quarter MiB and one of 3 MiB and a bit, the first layers frozen."""

    def __init__(self, layers: int = 24, frozen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(256, 256)) for _ in range(layers))
        self.wide = nn.Parameter(torch.randn(3, 262_147))
        for layer in list(self.layers)[:frozen]:
            layer.requires_grad_(False)


def trained(model: Many, *, fused: bool = True) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    step(model, optimizer)
    return optimizer


def step(model: Many, optimizer: torch.optim.Optimizer, only: int | None = None) -> None:
    """One step on all layers, or on one."""
    chosen = list(model.parameters()) if only is None else [model.layers[only]]
    for parameter in (p for p in chosen if p.requires_grad):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def state_of(handle: Any) -> GroupState:
    state: GroupState = handle._group.state
    return state


@pytest.mark.parametrize("way", ["host", "device"])
@pytest.mark.parametrize("fused", [True, False])
def test_after_a_step_on_one_layer_only_that_layer_is_copied(
    way: str, fused: bool, registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused optimizers count no versions: only the bytes themselves tell."""
    monkeypatch.setattr(torch_copy, "PIECE", 64 << 10)
    model = Many()
    optimizer = trained(model, fused=fused)
    handle = registered(model, optimizer, verify=True)
    if way == "device":
        handle._registration.adapters[0].near = frozenset()
    state = state_of(handle)
    first = state.move_out(wait=0)
    state.move_in()
    assert first.copied == first.bytes
    unchanged = state.move_out(wait=0)
    state.move_in()
    assert (unchanged.copied, unchanged.bytes) == (0, first.bytes)
    step(model, optimizer, only=7)
    before = digests(model, optimizer)
    second = state.move_out(wait=0)
    state.move_in()
    layer = 3 * 256 * 256 * 4  # the parameter and its two moments
    steps = len(list(model.parameters())) * 4
    assert layer <= second.copied <= layer + steps
    assert digests(model, optimizer) == before
    step(model, optimizer)
    everything = state.move_out(wait=0)
    state.move_in()
    assert everything.copied >= 0.9 * everything.bytes


def test_gradients_that_come_and_go_move_nothing_else(registered: Any) -> None:
    model = Many()
    optimizer = trained(model)
    state = state_of(registered(model, optimizer))
    state.move_out(wait=0)
    state.move_in()
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    with_gradients = state.move_out(wait=0)
    state.move_in()
    assert with_gradients.copied == sum(p.nbytes for p in model.parameters())
    optimizer.zero_grad()
    assert state.move_out(wait=0).copied == 0
    state.move_in()


def test_without_it_everything_is_copied_every_time(registered: Any) -> None:
    model = Many()
    state = state_of(registered(model, incremental=False))
    for _ in range(2):
        move = state.move_out(wait=0)
        state.move_in()
        assert move.copied == move.bytes


def test_the_proof_catches_a_change_that_was_missed(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Many()
    handle = registered(model, verify=True)
    handle._registration.adapters[0].near = frozenset()
    state = state_of(handle)
    blind = torch_copy._digests
    monkeypatch.setattr(torch_copy, "_digests", lambda content: blind(content) * 0)
    state.move_out(wait=0)
    state.move_in()
    with torch.no_grad():
        model.wide[1, 5] += 1
    before = digests(model)
    with pytest.raises(OperationFailed, match="differ after the copy"):
        state.move_out(wait=0)
    assert not state.parked()
    assert not GATE.closed
    assert digests(model) == before


def test_pages_that_were_lent_meanwhile_are_written_again(registered: Any) -> None:
    model = Many()
    handle = registered(model)
    handle._registration.adapters[0].near = frozenset()
    state = state_of(handle)
    before = digests(model)
    state.move_out(wait=0)
    state.move_in()
    buffer = state.buffers.current
    assert buffer is not None
    buffer.bytes(0, buffer.size)[:] = bytes(buffer.size)
    buffer.generation += 1  # as the agent says when it had lent the pages
    move = state.move_out(wait=0)
    assert move.copied == move.bytes
    state.move_in()
    assert digests(model) == before


# ── parts ──────────────────────────────────────────────────────────────────


def test_a_part_leaves_and_only_that_part_comes_back(registered: Any) -> None:
    model = Many()
    optimizer = trained(model)
    state = state_of(registered(model, optimizer, verify=True))
    before, size = digests(model, optimizer), state.measure()
    part = state.move_out(wait=0, least=5 * MIB)
    assert 5 * MIB <= part.bytes < 5 * MIB + 256 * 1024
    assert (state.parked_bytes, state.measure()) == (part.bytes, size)
    assert GATE.closed
    rest = state.move_out(wait=0)
    assert part.bytes + rest.bytes == size
    assert state.move_in().bytes == size
    again = state.move_out(wait=0, least=5 * MIB)
    assert (again.bytes, again.copied) == (part.bytes, 0)  # the same part, which was there already
    assert state.move_in().bytes == part.bytes
    assert not GATE.closed
    assert digests(model, optimizer) == before


def test_frozen_weights_stay_longest_and_what_was_used_longest_ago_leaves_first(registered: Any) -> None:
    model = Many(frozen=20)
    optimizer = trained(model)
    handle = registered({"body": model}, {"moments": optimizer})
    state = state_of(handle)
    handle.used("moments")
    trainable = [p for p in model.parameters() if p.requires_grad]
    state.move_out(wait=0, least=1)
    assert any(p.untyped_storage().nbytes() == 0 for p in trainable)
    state.move_in()
    handle.used("body")
    state.move_out(wait=0, least=1)
    moments = [m for s in optimizer.state.values() for m in s.values()]
    assert any(m.untyped_storage().nbytes() == 0 for m in moments)
    state.move_in()
    moving = sum(p.nbytes for p in trainable) + sum(m.nbytes for m in moments)
    state.move_out(wait=0, least=moving)
    assert all(p.untyped_storage().nbytes() > 0 for p in list(model.layers)[:20])
    state.move_in()
    assert state.move_out(wait=0, least=1 << 40).bytes == state.measure()
    state.move_in()


# ── at the same time as another's state ────────────────────────────────────


def test_memory_is_given_up_part_by_part(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coslice.workload.adapters.torch.PART", MIB)
    model = Many()
    state = state_of(registered(model, verify=True))
    before, heard = digests(model), list[int]()
    total = state.move_out(wait=0, give_way=heard.append).bytes
    assert heard[-1] == total
    assert len(heard) > 4
    assert heard == sorted(set(heard))
    ahead = state.bring_ahead(total // 2)
    assert total // 4 < ahead <= total // 2
    assert (state.parked_bytes, GATE.closed) == (total, True)
    assert state.bring_ahead(0) == 0
    assert state.bring_ahead(total) == total
    assert state.move_in().bytes == total
    assert digests(model) == before


def test_when_giving_way_fails_what_left_is_parked_and_comes_back(
    registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coslice.workload.adapters.torch.PART", MIB)
    model = Many()
    state = state_of(registered(model))
    before = digests(model)

    def full(gone: int) -> None:
        if gone > 2 * MIB:
            raise NoRoom("the other one is gone")

    with pytest.raises(NoRoom):
        state.move_out(wait=0, give_way=full)
    assert 2 * MIB < state.parked_bytes < state.measure()
    assert GATE.closed
    state.move_in()
    assert digests(model) == before
    assert not GATE.closed


def test_what_came_ahead_is_checked_and_leaves_again_with_the_rest(
    registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coslice.workload.adapters.torch.PART", MIB)
    model = Many()
    state = state_of(registered(model, verify=True))
    before = digests(model)
    total = state.move_out(wait=0, least=6 * MIB).bytes
    state.bring_ahead(total)
    rest = state.move_out(wait=0)  # the turn went to somebody else
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    buffer = state.buffers.current
    assert buffer is not None
    kept = bytes(buffer.bytes(77, 1))
    buffer.bytes(77, 1)[:] = bytes([kept[0] ^ 1])
    with pytest.raises(StateLost, match="checksum"):
        state.bring_ahead(total + rest.bytes)
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    buffer.bytes(77, 1)[:] = kept
    state.move_in()
    assert digests(model) == before
