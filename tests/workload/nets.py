"""Small models with everything awkward in them, and what tests compare: the bytes of every storage."""

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]


class Factored(torch.optim.Optimizer):
    """Like Adafactor: nested state of other shapes, and a tensor of the optimizer's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.05)})
        self.clock = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.clock += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                square = p.grad.square() + 1e-30
                factors = self.state[p].setdefault(
                    "factors",
                    [torch.zeros_like(square.mean(-1)), {"column": torch.zeros_like(square.sum(0))}],
                )
                factors[0].lerp_(square.mean(-1), 0.1)
                factors[1]["column"].lerp_(square.sum(0), 0.1)
                p -= group["lr"] / self.clock * p.grad / (factors[1]["column"] + 1e-3).sqrt()


OPTIMIZERS: Optimizers = {
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False, fused=False, amsgrad=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "factored": Factored,
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


class Net(nn.Module):
    """Tied weights, a buffer, a view of a weight as a parameter of its own, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU())
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.row = nn.Parameter(self.body[0].weight.detach()[0])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.embed(tokens)) * self.scale) + self.row.sum()
        return out


class Training:
    """A deterministic run of ``Net``: two of them with the same optimizer go the same way, bit for bit."""

    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(7)
        self.net = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        self._data = torch.Generator().manual_seed(11)

    def step(self) -> float:
        tokens = torch.randint(0, 32, (8,), generator=self._data)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.net(tokens), tokens)
            loss.backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            return float(self.optimizer.step(closure).detach())
        loss = closure()
        self.optimizer.step()
        return float(loss.detach())


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, nn.Module):
        yield from tensors_of(list(value.parameters()))
        yield from tensors_of(list(value.buffers()))
    elif isinstance(value, torch.optim.Optimizer):
        yield from tensors_of([value.state, value.param_groups])
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from tensors_of(inner)


def digests(*values: Any) -> list[str]:
    """sha256 of the bytes of every storage, in a fixed order. Makes no numpy array over them."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors_of(list(values))}
    return [hashlib.sha256(ctypes.string_at(s.data_ptr(), s.nbytes())).hexdigest() for s in storages.values()]
