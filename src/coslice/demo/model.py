"""A small decoder-only transformer, trained from scratch by the demo's jobs. Plain PyTorch, no coslice."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from coslice.demo.task import DIGITS, LENGTH, VOCABULARY

HEAD = 48
Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, (batch, heads, positions so far, HEAD)."""


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.before_widening = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, positions, width = x.shape
        projected = self.query_key_value(self.before_attention(x)).view(batch, positions, 3, self.heads, HEAD)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=past is None)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, positions, width))
        x = x + self.narrow(functional.gelu(self.widen(self.before_widening(x))))
        return x, (key, value)


class Policy(nn.Module):
    """Tokens (batch, positions) to logits over the digits (batch, positions, DIGITS)."""

    def __init__(self, *, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(2 * LENGTH + 1, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, DIGITS, bias=False)

    def reset(self, generator: torch.Generator) -> None:
        """Draw all weights anew from ``generator``, in a fixed order."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.constant_(parameter, float(name.endswith("weight")))
            elif name.startswith(("tokens", "positions")):
                nn.init.normal_(parameter, std=0.3, generator=generator)
            elif name.startswith("head"):
                nn.init.normal_(parameter, std=0.02, generator=generator)
            else:
                nn.init.kaiming_uniform_(parameter, a=5**0.5, generator=generator)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """With a ``cache`` of the positions before, ``tokens`` is the one position that follows them."""
        start = cache[0][0].shape[2] if cache else 0
        x = self.tokens(tokens) + self.positions.weight[start : start + tokens.shape[1]]
        grown: Cache = []
        for index, layer in enumerate(self.layers):
            x, kept = layer(x, cache[index] if cache else None)
            grown.append(kept)
        logits: Tensor = self.head(self.norm(x))
        return logits, grown
