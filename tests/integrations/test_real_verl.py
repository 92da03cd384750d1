"""verl's own trainers, of its package, run their own loops here; the accelerators alone are not there.

The trainers are replaced as in a job: by the plugin that verl loads when it is imported. ``make
test-frameworks`` fetches verl.
"""

import asyncio
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from integrations.frameworks import SAMPLER, TRAINER
from integrations.held_calls import HeldCalls

from coslice.errors import ConfigError
from coslice.testing.recording import RecordingOrchestrator

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not here: make test-frameworks", allow_module_level=True)

SEPARATE = [
    "trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1", "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
]  # fmt: skip
FULLY = [
    "actor_rollout_ref.hybrid_engine=False", "trainer.save_freq=2", "trainer.test_freq=2",
    "async_training.trigger_parameter_sync_step=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    yield
    ray.shutdown()


@pytest.fixture
def run(cluster: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCalls]:
    with RecordingOrchestrator(groups=(TRAINER, SAMPLER)) as recording:
        env = recording.env("job", COSLICE_TRAINER_GROUP=TRAINER, COSLICE_SAMPLER_GROUP=SAMPLER)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        from integrations.verl_workers import workers  # imports verl, which loads the plugin

        done = HeldCalls(recording)
        with workers(done.works):
            yield done
        assert not recording.held, "something is still held"
        assert recording.problems() == []


def v1(folder: Path, *overrides: str) -> None:
    """What the driver of verl does, in this process."""
    from integrations.verl_workers import config
    from verl.trainer.main_ppo import TaskRunnerV1

    TaskRunnerV1.__ray_metadata__.modified_class().run(config(folder, *overrides))


def legacy(folder: Path, *overrides: str) -> None:
    from integrations.verl_workers import config
    from verl.trainer.main_ppo_v0 import TaskRunner

    TaskRunner.__ray_metadata__.modified_class().run(config(folder, "trainer.use_v1=False", *overrides))


def fully_asynchronous(folder: Path, *overrides: str) -> None:
    from integrations.verl_workers import config, fully_asynchronous

    given = config(folder, *FULLY, *overrides, name="fully_async_ppo_trainer")
    asyncio.run(fully_asynchronous(given, steps=6)())


BOTH = (TRAINER, SAMPLER)
STEP = ["generate:TS", "sleep:TS", "log_probs:TS", "ref:TS", "update:TS"]


def test_sync_holds_a_whole_step_and_gives_everything_away_between_two(
    run: HeldCalls, tmp_path: Path
) -> None:
    v1(tmp_path)
    step = [*STEP, "sync:TS"]
    assert run.calls == ["build:TS", "sleep:TS", "sync:TS", "generate:TS", *step, *step]
    assert run.acquired == [("init", BOTH), ("eval", BOTH), ("step", BOTH), ("step", BOTH)]


def test_separate_async_gives_the_trainers_away_while_it_waits_for_samples(
    run: HeldCalls, tmp_path: Path
) -> None:
    # verl 0.9.1 passes logging an argument that it does not know, at level INFO
    logging.getLogger("verl.trainer.ppo.v1.trainer_separate_async").setLevel(logging.WARNING)
    v1(tmp_path, *SEPARATE, "actor_rollout_ref.hybrid_engine=False")
    again = ["copy:T", "copy:T", "log_probs:T", "copy:T", "copy:T"]
    step = ["generate:", "copy:T", "log_probs:T", "ref:T", "update:T", *again, "ref:T", "update:T", "sync:T"]
    begin = ["build:TS", "build:TS", "sleep:TS", "sync:TS", "generate:", "generate:"]
    assert run.calls == [*begin, *step, *step]
    assert run.acquired == [("init", BOTH), *[("train", (TRAINER,))] * 4]


def test_legacy(run: HeldCalls, tmp_path: Path) -> None:
    legacy(tmp_path, "trainer.save_freq=2", "trainer.test_freq=2")
    begin = ["build:TS", "sleep:TS", "sync:TS", "generate:TS"]
    assert run.calls == [*begin, *STEP, "sync:TS", *STEP, "save:TS", "sync:TS", "generate:TS"]
    steps = [(phase, BOTH) for phase in ("step", "step", "eval")]
    assert run.acquired == [(phase, BOTH) for phase in ("init", "load", "weight_sync", "eval")] + steps


def test_fully_asynchronous(run: HeldCalls, tmp_path: Path) -> None:
    fully_asynchronous(tmp_path)
    pair = ["wait:", "wait:", "ref:T", "update:T"] * 2
    pair.append("sync:T")
    last = ["wait:", "sync:T", "save:T"]  # no more samples; the weights go out, and are saved, once more
    assert run.calls == ["build:T", "build:T", "sync:T", *pair, *pair, "validate:", "save:T", *pair, *last]
    assert {groups for _, groups in run.acquired} == {(TRAINER,)}


@pytest.mark.parametrize("job", [v1, legacy, fully_asynchronous])
@pytest.mark.parametrize("what", ["build", "update", "sync"])
def test_a_worker_that_fails_leaves_nothing_held(
    job: object, what: str, run: HeldCalls, tmp_path: Path
) -> None:
    assert callable(job)
    run.fails = what
    with pytest.raises(RuntimeError, match="out of memory"):
        job(tmp_path)
    assert run.calls[-1].startswith(f"{what}:T")
    assert not run.recording.held


@pytest.mark.parametrize(
    "overrides", [SEPARATE, ["trainer.v1.trainer_mode=colocate_async"]], ids=["hybrid", "colocate_async"]
)
def test_rollouts_that_use_the_trainers_accelerators_unasked_are_refused(
    overrides: list[str], run: HeldCalls, tmp_path: Path
) -> None:
    from integrations.verl_workers import config
    from verl.trainer.ppo.v1 import get_trainer_cls

    given = config(tmp_path, *overrides)
    with pytest.raises(ConfigError, match="take turns"):
        get_trainer_cls(given.trainer.v1.trainer_mode)(config=given)


def test_a_fully_asynchronous_trainer_that_also_generates_is_refused(run: HeldCalls, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="take turns"):
        fully_asynchronous(tmp_path, "async_training.use_trainer_do_validate=True")
