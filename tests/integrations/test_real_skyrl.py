"""SkyRL's own trainers, of its package, run their own loops here; the accelerators, and Ray, are not there.

``make test-frameworks`` fetches SkyRL.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from integrations.frameworks import SAMPLER, TRAINER
from integrations.held_calls import HeldCalls

from coslice.integrations.skyrl import share
from coslice.testing.recording import RecordingOrchestrator

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]
if importlib.util.find_spec("skyrl") is None:
    pytest.skip("SkyRL is not here: make test-frameworks", allow_module_level=True)

COLOCATED = "trainer.placement.colocate_all=true"
FULLY = [
    "trainer.epochs=1", "trainer.train_batch_size=2", "trainer.fully_async.enabled=true",
    "trainer.fully_async.max_staleness_steps=1", "trainer.fully_async.num_parallel_generation_workers=2",
    "trainer.algorithm.policy_loss_type=rollout_is", "generator.batched=false",
]  # fmt: skip
BOTH = (TRAINER, SAMPLER)


class Run(HeldCalls):
    @property
    def trace(self) -> list[str]:
        """Without the housekeeping of workers, and with repeated calls once."""
        from integrations.skyrl_workers import NAMES

        told = {*NAMES.values(), "engine", "sleep", "wake", "pause", "resume", "eval", "generate"}
        kept = [call for call in self.calls if call.split(":")[0] in told]
        return [call for call, before in zip(kept, ["", *kept], strict=False) if call != before]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    from integrations.skyrl_workers import workers

    with RecordingOrchestrator(groups=BOTH) as recording:
        env = recording.env("job", COSLICE_TRAINER_GROUP=TRAINER, COSLICE_SAMPLER_GROUP=SAMPLER)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        done = Run(recording)
        with workers(done.works):
            yield done
        assert not recording.held, "something is still held"
        assert recording.problems() == []
        ours = [call for call in done.calls if call.split(":")[0] not in ("eval", "generate")]
        assert [call for call in ours if ":T" not in call] == [], "a worker was asked while nothing was held"


def separate(folder: Path, *overrides: str) -> None:
    from integrations.skyrl_workers import Experiment, config

    share(Experiment(config(folder, *overrides))).run()


def colocated(folder: Path) -> None:
    separate(folder, COLOCATED)


def fully_asynchronous(folder: Path) -> None:
    from integrations.skyrl_workers import FullyAsynchronous, config

    share(FullyAsynchronous(config(folder, *FULLY))).run()


SYNC = ["pause:TS", "sync:TS", "resume:TS"]


def test_separate_accelerators(run: Run, tmp_path: Path) -> None:
    separate(tmp_path)
    step = ["generate:S", "forward:T", "update:T", "save:T"]
    begin = ["engine:TS", "build:TS", "connect:TS", *SYNC, "eval:S"]
    assert run.trace == [*begin, *step, "export:T", "build:T", *SYNC, *step, *SYNC, "eval:S"]
    begun = [("init", BOTH), ("weight_sync", BOTH), ("weight_sync", BOTH), ("eval", (SAMPLER,))]
    turn = [("generate", (SAMPLER,)), ("train", (TRAINER,)), ("weight_sync", (SAMPLER,))]
    assert run.acquired == [*begun, *turn, *turn, ("eval", (SAMPLER,))]


def test_colocated_holds_all_until_the_engine_sleeps(run: Run, tmp_path: Path) -> None:
    colocated(tmp_path)
    sync = ["wake:TS", "sync:TS", "wake:TS"]
    step = ["generate:TS", "sleep:TS", "forward:T", "update:T", "save:T"]
    begin = ["engine:TS", "sleep:TS", "build:TS", "connect:TS", *sync, "eval:TS"]
    last = ["eval:TS", "sleep:TS"]
    assert run.trace == [*begin, *step, "export:T", "build:T", *sync, *step, *sync, *last]


def test_a_run_that_is_resumed_loads_with_the_trainers(run: Run, tmp_path: Path) -> None:
    separate(tmp_path)
    run.calls.clear()
    separate(tmp_path, "trainer.resume_mode=latest")
    assert run.trace == ["engine:TS", "build:TS", "connect:TS", "load:T", *SYNC, "eval:S", "save:T"]


def test_fully_asynchronous_shares_the_trainers_only(run: Run, tmp_path: Path) -> None:
    fully_asynchronous(tmp_path)
    sync = ["pause:T", "sync:T", "resume:T"]
    step = ["forward:T", "update:T", *sync]
    begin = ["engine:TS", "build:TS", "connect:T", *sync, "eval:"]
    trace = [call for call in run.trace if not call.startswith("generate:")]
    assert trace == [*begin, *step, *step, "eval:", "save:T", "export:T", "build:T", "save:T"]


@pytest.mark.parametrize("job", [separate, colocated, fully_asynchronous])
@pytest.mark.parametrize("what", ["engine", "build", "connect", "update", "sync"])
def test_a_worker_that_fails_leaves_nothing_held(job: object, what: str, run: Run, tmp_path: Path) -> None:
    assert callable(job)
    run.fails = what
    with pytest.raises(RuntimeError, match="out of memory"):
        job(tmp_path)
    asked = [call for call in run.trace if not call.startswith(("generate:", "resume:"))]
    assert asked[-1].startswith(f"{what}:T")
    assert not run.recording.held
