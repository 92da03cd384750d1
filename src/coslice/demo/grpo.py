"""Group-relative policy optimization, in its plainest form.

Several answers to each question; an answer's advantage is its reward against the others of its group; a
clipped policy-gradient loss. Deterministic: one thread, one generator on the CPU, a fixed order of
everything. The batch between sampling and training is ordinary host memory and small; only the policy, its
gradients and the optimizer's moments are state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coslice.demo.model import Policy
from coslice.demo.task import DIGITS, LENGTH, SEPARATOR, to_text


@dataclass(frozen=True)
class Settings:
    questions: int
    answers: int = 16
    """To each question: one group."""
    minibatch: int = 32
    """Sequences per optimizer step."""
    chunk: int = 16
    """Sequences computed on at once: bounds what activations take beside the state."""
    learning_rate: float = 5e-4
    clip: float = 0.2
    width: int = 288
    layers: int = 2

    @property
    def batch(self) -> int:
        return self.questions * self.answers


@dataclass(frozen=True)
class Batch:
    """Sequences question + separator + answer (batch, 2·LENGTH+1) and what the policy thought of each answer
    token when it drew it (batch, LENGTH)."""

    sequences: Tensor
    log_probabilities: Tensor

    def items(self) -> list[tuple[str, str]]:
        """Question and answer of each sequence as text: what the verifier gets."""
        return [(to_text(row[:LENGTH]), to_text(row[LENGTH + 1 :])) for row in self.sequences.tolist()]


@torch.no_grad()
def sample(policy: Policy, settings: Settings, generator: torch.Generator) -> Batch:
    """New questions and, from the policy as it is, answers to them; a chunk of questions at a time."""
    questions = torch.randint(DIGITS, (settings.questions, LENGTH), generator=generator)
    separator = torch.full((settings.questions, 1), SEPARATOR)
    prompts = torch.cat([questions, separator], 1).repeat_interleave(settings.answers, 0)
    answered = [_answer(policy, chunk, generator) for chunk in prompts.split(2 * settings.chunk)]
    sequences, log_probabilities = zip(*answered, strict=True)
    return Batch(torch.cat(sequences), torch.cat(log_probabilities))


def _answer(policy: Policy, sequences: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    logits, cache = policy(sequences)
    drawn: list[Tensor] = []
    for position in range(LENGTH):
        log_probabilities = logits[:, -1].log_softmax(-1)
        token = torch.multinomial(log_probabilities.exp(), 1, generator=generator)
        drawn.append(log_probabilities.gather(1, token))
        sequences = torch.cat([sequences, token], 1)
        if position < LENGTH - 1:
            logits, cache = policy(token, cache)
    return sequences, torch.cat(drawn, 1)


def advantages(rewards: Tensor, *, answers: int) -> Tensor:
    """Rewards (batch,) against their group's mean, in units of its spread: (batch, 1)."""
    groups = rewards.view(-1, answers)
    spread = groups.std(1, keepdim=True) + 1e-4
    return ((groups - groups.mean(1, keepdim=True)) / spread).view(-1, 1)


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch, rewards: list[float], settings: Settings,
    generator: torch.Generator,
) -> None:  # fmt: skip
    """One pass over the batch in minibatches, one optimizer step each."""
    advantage = advantages(torch.tensor(rewards), answers=settings.answers)
    for minibatch in torch.randperm(settings.batch, generator=generator).split(settings.minibatch):
        for chunk in minibatch.split(settings.chunk):
            loss = _loss(policy, batch, advantage, chunk, clip=settings.clip)
            (loss * len(chunk) / len(minibatch)).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        # Gradients keep their storage, as they do in frameworks with one flat gradient buffer.
        optimizer.zero_grad(set_to_none=False)


def _loss(policy: Policy, batch: Batch, advantage: Tensor, chunk: Tensor, *, clip: float) -> Tensor:
    sequences = batch.sequences[chunk]
    logits, _ = policy(sequences[:, :-1])
    log_probabilities = logits[:, LENGTH:].log_softmax(-1)
    now = log_probabilities.gather(2, sequences[:, LENGTH + 1 :, None])[..., 0]
    ratio = (now - batch.log_probabilities[chunk]).exp()
    gain = torch.min(ratio * advantage[chunk], ratio.clamp(1 - clip, 1 + clip) * advantage[chunk])
    loss: Tensor = -gain.mean()
    return loss
