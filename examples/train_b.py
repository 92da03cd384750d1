"""REINFORCE on another toy task: a network learns to name the largest of three digits.

Runs anywhere:            python examples/train_b.py
Shares an accelerator:    coslice run --job b -- python examples/train_b.py

A device of 128 MiB (`coslice up --memory 128MiB`) holds one of the two at a time, so their state moves. On a
larger one, jobs that say what they need (`coslice run --need 90MiB ...`) stay side by side and nothing moves.

The same as train_a.py with `with` blocks instead of decorators, and another algorithm.
"""

import time

import torch
from torch import nn

import coslice

QUESTIONS, ANSWERS, DIGITS, WIDTH = 256, 8, 10, 1024
STEPS = 20


def judge(questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """1 for the right digit, less the further it is from it. Slow, as a sandbox or a judge model is."""
    time.sleep(1.2)
    return 1 - (answers - questions.amax(1, keepdim=True)).abs() / (DIGITS - 1)


def main() -> None:
    torch.manual_seed(2)
    torch.set_num_threads(1)
    orchestrator = coslice.connect()

    with orchestrator.on_accelerators(phase="init"):
        model = nn.Sequential(
            nn.Embedding(3 * DIGITS, 128),
            nn.Flatten(),
            nn.Linear(3 * 128, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, DIGITS),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        coslice.workload.register(model=model, optimizer=optimizer)

    places = torch.arange(3) * DIGITS  # the same digit in another place is another token
    questions = answers = rewards = None
    for step in range(STEPS):
        with orchestrator.on_accelerators(phase="train"):
            if questions is not None:
                for _ in range(8):
                    likely = model(questions + places).log_softmax(-1).gather(1, answers)
                    others = (rewards.sum(1, keepdim=True) - rewards) / (ANSWERS - 1)  # leave one out
                    loss = -((rewards - others) * likely).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            questions = torch.randint(DIGITS, (QUESTIONS, 3))
            with torch.no_grad():
                answers = torch.multinomial(model(questions + places).softmax(-1), ANSWERS, replacement=True)
        rewards = judge(questions, answers)
        orchestrator.note("reward", rewards.mean().item(), step=step)
        print(f"b: step {step:2d}  reward {rewards.mean():.2f}", flush=True)


if __name__ == "__main__":
    main()
