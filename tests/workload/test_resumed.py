"""A job that resumes from its checkpoint registers and moves like any other."""

from pathlib import Path

import torch

import coslice


def test_state_of_a_loaded_checkpoint_moves(tmp_path: Path) -> None:
    """``Optimizer.load_state_dict`` keeps the tensors of ``torch.load``, whose memory cannot be resized."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    state = optimizer.state[model.weight]
    assert not state["exp_avg"].untyped_storage().resizable()
    before = {name: tensor.clone() for name, tensor in state.items()}
    held = dict(state)
    handle = coslice.workload.register(model, optimizer, env={})
    assert handle.offload() > 0
    assert handle.parked
    handle.restore()
    for name, tensor in before.items():
        assert held[name] is state[name]
        assert torch.equal(state[name], tensor)
    handle.close()
