"""GRPO on a toy task: a small transformer learns to write four digits backwards.

Runs anywhere:            python examples/train_a.py
Shares an accelerator:    coslice run --job a -- python examples/train_a.py

A device of 128 MiB (`coslice up --memory 128MiB`) holds one of the two at a time, so their state moves. On a
larger one, jobs that say what they need (`coslice run --need 90MiB ...`) stay side by side and nothing moves.

What is coslice's: the import, `connect`, `register` and a decorator on whatever uses the accelerator.
"""

import time

import torch
from torch import nn

import coslice

QUESTIONS, ANSWERS, DIGITS, LENGTH, WIDTH = 16, 16, 10, 4, 256
STEPS = 20

orchestrator = coslice.connect()


class Writer(nn.Module):
    """Reads the digits and what is written so far; says what might come next."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(DIGITS + 1, WIDTH)
        self.places = nn.Embedding(2 * LENGTH + 1, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        size = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(size)
        seen = self.layers(self.tokens(text) + self.places.weight[:size], mask=mask, is_causal=True)
        return self.head(seen).log_softmax(-1)


@orchestrator.on_accelerators(phase="init")
def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Writer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    coslice.workload.register(model=model, optimizer=optimizer)
    return model, optimizer


@torch.no_grad()
def rollout(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts `1234|4321`, and how likely each digit of the answer was when it was drawn."""
    questions = torch.randint(DIGITS, (QUESTIONS, LENGTH)).repeat_interleave(ANSWERS, 0)
    text = torch.cat([questions, torch.full((len(questions), 1), DIGITS)], 1)
    chances = []
    for _ in range(LENGTH):
        likely = model(text)[:, -1]
        digit = torch.multinomial(likely.exp(), 1)
        chances.append(likely.gather(1, digit))
        text = torch.cat([text, digit], 1)
    return text, torch.cat(chances, 1)


def judge(text: torch.Tensor) -> torch.Tensor:
    """The reward: how many digits are in the right place. Slow, as a sandbox or a judge model is."""
    time.sleep(1.0)
    return (text[:, LENGTH + 1 :] == text[:, :LENGTH].flip(1)).float().mean(1)


@orchestrator.on_accelerators(phase="train")
def train_and_roll_out(model, optimizer, text, before, rewards):
    """Learn from the scored answers, then write new ones: one stay on the accelerator."""
    groups = rewards.view(QUESTIONS, ANSWERS)
    gain = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    gain = gain.view(-1, 1)
    for some in torch.randperm(len(text)).split(32):
        likely = model(text[some, :-1])[:, LENGTH:]
        now = likely.gather(2, text[some, LENGTH + 1 :, None])[..., 0]
        ratio = (now - before[some]).exp()
        loss = -torch.min(ratio * gain[some], ratio.clamp(0.8, 1.2) * gain[some]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return rollout(model)


@orchestrator.on_accelerators(phase="generate")
def first_rollout(model):
    return rollout(model)


def main() -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model, optimizer = build()
    text, before = first_rollout(model)
    for step in range(STEPS):
        rewards = judge(text)
        orchestrator.note("reward", rewards.mean().item(), step=step)
        print(f"a: step {step:2d}  reward {rewards.mean():.2f}", flush=True)
        text, before = train_and_roll_out(model, optimizer, text, before, rewards)


if __name__ == "__main__":
    main()
