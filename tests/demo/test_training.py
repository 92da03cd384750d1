"""The jobs really learn, and the same seed gives the same bits, also when their state moved in between."""

import os

import pytest

torch = pytest.importorskip("torch")

import coslice  # noqa: E402
from coslice.demo.grpo import Settings, advantages, sample, update  # noqa: E402
from coslice.demo.job import digest, optimizer_of, state_bytes  # noqa: E402
from coslice.demo.model import Policy  # noqa: E402
from coslice.demo.task import score  # noqa: E402

SMALL = Settings(questions=8, answers=8, width=96, layers=1, learning_rate=3e-3)


def _train(*, steps: int, move: bool, seed: int = 3) -> tuple[list[float], str]:
    generator = torch.Generator().manual_seed(seed)
    policy = Policy(width=SMALL.width, layers=SMALL.layers)
    policy.reset(generator)
    optimizer = optimizer_of(policy, SMALL)
    handle = coslice.workload.register(model=policy, optimizer=optimizer) if move else None
    rewards = []
    for _ in range(steps):
        batch = sample(policy, SMALL, generator)
        if handle is not None:
            assert handle.offload() > 0
            handle.restore()
        scored = [score("reverse", question, answer) for question, answer in batch.items()]
        rewards.append(sum(scored) / len(scored))
        update(policy, optimizer, batch, scored, SMALL, generator)
    if handle is not None:
        handle.close()
    return rewards, digest(policy)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("COSLICE_")]:
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_rewards_rise() -> None:
    rewards, _ = _train(steps=60, move=False)
    assert sum(rewards[-10:]) / 10 >= sum(rewards[:10]) / 10 + 0.15


def test_moving_state_out_and_in_between_steps_changes_no_bit() -> None:
    assert _train(steps=6, move=True) == _train(steps=6, move=False)


def test_another_seed_gives_other_bits() -> None:
    assert _train(steps=1, move=False)[1] != _train(steps=1, move=False, seed=4)[1]


def test_the_cache_of_keys_and_values_changes_no_choice() -> None:
    generator = torch.Generator().manual_seed(0)
    policy = Policy(width=96, layers=2)
    policy.reset(generator)
    batch = sample(policy, SMALL, generator)
    logits, _ = policy(batch.sequences[:, :-1])
    again = logits[:, -4:].log_softmax(-1).gather(2, batch.sequences[:, -4:, None])[..., 0]
    torch.testing.assert_close(again, batch.log_probabilities, rtol=1e-4, atol=1e-5)


def test_advantages_compare_within_a_group_only() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5])
    gained = advantages(rewards, answers=2).view(2, 2)
    torch.testing.assert_close(gained.mean(1), torch.zeros(2))
    assert gained[0, 1] > 0 > gained[0, 0]
    assert gained[1].abs().max() == 0, "all alike: nothing to learn"


def test_state_is_weights_gradients_and_both_moments() -> None:
    policy = Policy(width=96, layers=1)
    optimizer = optimizer_of(policy, SMALL)
    weights = sum(parameter.nbytes for parameter in policy.parameters())
    assert state_bytes(policy, optimizer) == weights
    policy(torch.zeros(1, 4, dtype=torch.long))[0].sum().backward()
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert 4 * weights <= state_bytes(policy, optimizer) < 4.01 * weights
