"""Adapters of frameworks against the documented order of their calls, with stub workers.

What is real: the adapter, the client, a server that records. Whether the framework still has these methods is
for ``test_real_frameworks.py``, which needs the packages.
"""

import asyncio
import functools
import inspect
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from integrations.frameworks import SAMPLER, TRAINER, Told, told, unconfigured

from coslice.integrations import nemo_rl, openrlhf, skyrl, slime, verl
from coslice.integrations.wrapping import Phases


class Worker:
    """Methods named at construction; each says so in the trace when it is called."""

    def __init__(self, told: Told, *names: str, coroutines: tuple[str, ...] = ()) -> None:
        for name in names:
            setattr(self, name, self._plain(told, name))
        for name in coroutines:
            setattr(self, name, self._coroutine(told, name))

    def _plain(self, told: Told, name: str) -> Any:
        return lambda *args, **kwargs: told.works(name)

    def _coroutine(self, told: Told, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> None:
            told.works(name)

        return call


# ── verl ───────────────────────────────────────────────────────────────────


class V1Trainer:
    """The documented loop of a v1 trainer: hooks around sampling, training and the end of a step."""

    def __init__(self, told: Told, steps: int = 2) -> None:
        self.told, self.steps = told, steps

    def init(self) -> None:
        self.told.works("build")

    def fit(self, agents: object) -> None:
        self.on_validate_begin()
        self.told.works("validate")
        self.on_validate_end()
        for _ in range(self.steps):
            self.on_step_begin()
            self.told.works("prompts")
            self.on_sample_begin()
            self.told.works("sample")
            self.on_sample_end()
            self.told.works("train")
            self.on_step_end()
            self.told.works("log")

    def on_validate_begin(self) -> None: ...
    def on_validate_end(self) -> None: ...
    def on_step_begin(self) -> None: ...
    def on_sample_begin(self) -> None: ...
    def on_sample_end(self) -> None:
        self.told.works("sleep")

    def on_step_end(self) -> None:
        self.told.works("sync")


def test_verl_sync_gives_its_one_group_away_between_steps() -> None:
    with told("pool") as (callback, _):
        trainer = verl.shared(V1Trainer, separate=False, callback=lambda: callback)(callback)
        trainer.init()
        trainer.fit(None)
        step = ["prompts:pool", "sample:pool", "sleep:pool", "train:pool", "sync:pool", "log:"]
        assert callback.trace == ["build:pool", "validate:pool", *step, *step]


def test_verl_separate_async_gives_the_trainers_away_while_it_waits_for_samples() -> None:
    with told() as (callback, _):
        trainer = verl.shared(V1Trainer, separate=True, callback=lambda: callback)(callback)
        trainer.init()
        trainer.fit(None)
        step = ["prompts:", "sample:", "sleep:", "train:T", "sync:T", "log:"]
        assert callback.trace == ["build:TS", "validate:", *step, *step]


def test_verl_gives_everything_up_when_training_fails() -> None:
    class Fails(V1Trainer):
        def on_step_end(self) -> None:
            raise RuntimeError("out of memory")

    with told() as (callback, _):
        trainer = verl.shared(Fails, separate=False, callback=lambda: callback)(callback)
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer.fit(None)


class LegacyTrainer:
    """The documented loop of the trainer before v1."""

    def __init__(self, told: Told) -> None:
        self.told = told
        self.async_rollout_manager = Worker(told, "generate_sequences")
        self.checkpoint_manager = Worker(told, "sleep_replicas", "update_weights")

    def fit(self) -> None:
        self.checkpoint_manager.update_weights(0)
        self._validate()
        for step in range(2):
            self.async_rollout_manager.generate_sequences(None)
            self.checkpoint_manager.sleep_replicas()
            self.told.works("reward")
            self._compute_old_log_prob(None)
            self._update_actor(None)
            self.checkpoint_manager.update_weights(step)

    def _validate(self) -> None:
        self.async_rollout_manager.generate_sequences(None)

    def _compute_old_log_prob(self, batch: object) -> None:
        self.told.works("log_probs")

    def _update_actor(self, batch: object) -> None:
        self.told.works("update")


def test_verl_legacy() -> None:
    with told() as (callback, _):
        verl.share(LegacyTrainer(callback), callback=callback).fit()
        step = ["generate_sequences:TS", "sleep_replicas:TS", "reward:TS", "log_probs:TS", "update:TS"]
        step.append("update_weights:TS")
        assert callback.trace == ["update_weights:TS", "generate_sequences:TS", *step, *step]


def test_verl_fully_async_gives_the_trainers_away_while_the_queue_is_empty() -> None:
    class FullyAsync:
        def __init__(self, told: Told) -> None:
            self.told = told

        async def fit(self) -> None:
            for _ in range(2):
                await self._fit_generate()
                self.told.works("update")

        async def _fit_generate(self) -> None:
            self.told.works("wait")

    with told() as (callback, _):
        asyncio.run(verl.share(FullyAsync(callback), callback=callback).fit())
        assert callback.trace == ["wait:", "update:T"] * 2


# ── OpenRLHF ───────────────────────────────────────────────────────────────


class PPOTrainer:
    def __init__(self, told: Told) -> None:
        self.told = told
        self.samples_generator = Worker(told, "generate_samples", "generate_eval_samples")

    def fit(self) -> None:
        for _ in range(2):
            self.samples_generator.generate_samples()
            self.train_step([], 0)
            self.save_logs_and_checkpoints(0)
            self.told.works("log")
        self.samples_generator.generate_eval_samples()

    def train_step(self, samples: object, step: int) -> None:
        self.told.works("train")
        self.broadcast_to_vllm()

    def broadcast_to_vllm(self) -> None:
        self.told.works("broadcast")

    def save_logs_and_checkpoints(self, step: int) -> None:
        self.told.works("save")


def test_openrlhf() -> None:
    with told() as (callback, recording):
        openrlhf.share(PPOTrainer(callback), callback=callback).fit()
        step = ["generate_samples:S", "train:T", "broadcast:TS", "save:T", "log:"]
        assert callback.trace == [*step, *step, "generate_eval_samples:S"]
        assert ("acquire", "weight_sync", (SAMPLER,)) in recording.turns()


def test_openrlhf_holds_both_until_the_driver_starts_training() -> None:
    class ActorClass:
        def remote(self) -> "ActorClass":
            return self

        def fit(self) -> None:
            callback.works("fit")

        def get_max_steps(self) -> None:
            callback.works("get_max_steps")

    with told() as (callback, _):
        callback.on_phase_begin("init")
        trainer = openrlhf.Launch(ActorClass(), callback).remote()
        trainer.get_max_steps()
        trainer.fit()
        assert callback.trace == ["get_max_steps:TS", "fit:"]


# ── SkyRL ──────────────────────────────────────────────────────────────────


def decorated(method: Callable[..., Any]) -> Callable[..., Any]:
    """As ``torch.no_grad`` does: it hides that the method is a coroutine."""

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        return method(*args)

    return call


class SkyTrainer:
    colocate_all = False

    def __init__(self, told: Told) -> None:
        self.told, self.dispatch = told, None
        self.inference_engine_client = Worker(told, coroutines=("sleep",))

    def build_models(self, *workers: object) -> None:
        self.told.works("build")
        self.dispatch = Worker(self.told, coroutines=("save_weights_for_sampler",))

    async def train(self) -> None:
        self.init_weight_sync_state()
        self.load_checkpoints()
        await self.dispatch.save_weights_for_sampler()
        await self.eval()
        for _ in range(2):
            await self.generate({})
            if self.colocate_all:
                await self.inference_engine_client.sleep()
            self.told.works("rewards")
            self.fwd_logprobs_values_reward({})
            self.train_critic_and_policy({})
            self.update_ref_with_policy()
            await self.dispatch.save_weights_for_sampler()
        if self.colocate_all:
            await self.inference_engine_client.sleep()

    def init_weight_sync_state(self) -> None:
        self.told.works("connect")

    def load_checkpoints(self) -> None:
        self.told.works("load")

    def update_ref_with_policy(self) -> None:
        self.told.works("reference")

    @decorated
    async def eval(self) -> None:
        self.told.works("eval")

    @decorated
    async def generate(self, given: object) -> None:
        self.told.works("generate")

    def fwd_logprobs_values_reward(self, given: object) -> None:
        self.told.works("forward")

    def train_critic_and_policy(self, given: object) -> None:
        self.told.works("update")


class SkyExperiment:
    def __init__(self, told: Told) -> None:
        self.told = told

    def get_trainer(self) -> SkyTrainer:
        return SkyTrainer(self.told)

    def _setup_trainer(self) -> SkyTrainer:
        self.told.works("engine")
        trainer = self.get_trainer()
        trainer.build_models(None, None, None)
        return trainer

    def run(self) -> None:
        asyncio.run(self._setup_trainer().train())


def test_skyrl() -> None:
    with told() as (callback, _):
        skyrl.share(SkyExperiment(callback), callback=callback).run()
        step = [
            "generate:S",
            "rewards:",
            "forward:T",
            "update:T",
            "reference:T",
            "save_weights_for_sampler:TS",
        ]
        begin = ["engine:TS", "build:TS", "connect:TS", "load:T", "save_weights_for_sampler:TS", "eval:S"]
        assert callback.trace == [*begin, *step, *step]


def test_skyrl_colocated_holds_until_the_engine_sleeps() -> None:
    class Colocated(SkyTrainer):
        colocate_all = True

    with told() as (callback, _):
        trainer = skyrl.share(Colocated(callback), callback=callback)
        trainer.build_models(None, None, None)
        asyncio.run(trainer.train())
        assert {"generate:TS", "eval:TS", "sleep:TS", "rewards:"} <= set(callback.trace)
        assert "sleep:" not in callback.trace  # also not when all is done


def test_skyrl_workers_get_the_engines_client_without_phases() -> None:
    with told() as (callback, _):
        trainer = SkyTrainer(callback)
        trainer.colocate_all, client = True, SimpleNamespace(url="here")
        trainer.inference_engine_client = client
        engine = skyrl.share(trainer, callback=callback).inference_engine_client
        assert engine is not client
        assert engine.url == "here"
        assert pickle.loads(pickle.dumps(engine)) == client


def test_skyrl_fully_async_shares_the_trainers_only() -> None:
    class FullyAsync(SkyTrainer):
        async def train(self) -> None:
            await self.dispatch.save_weights_for_sampler()
            for _ in range(2):
                await self._collect_generation_mini_batch()
                self.train_critic_and_policy({})
                await self.dispatch.save_weights_for_sampler()
                await self.eval()

        async def _collect_generation_mini_batch(self) -> None:
            self.told.works("collect")

    with told() as (callback, _):
        trainer = skyrl.share(FullyAsync(callback), callback=callback)
        trainer.build_models(None, None, None)
        asyncio.run(trainer.train())
        step = ["collect:", "update:T", "save_weights_for_sampler:T", "eval:"]
        assert callback.trace == ["build:TS", "save_weights_for_sampler:T", *step, *step]


# ── slime, NeMo-RL ─────────────────────────────────────────────────────────


def test_slime(monkeypatch: pytest.MonkeyPatch) -> None:
    with told() as (_, recording):
        env = recording.env("slime", COSLICE_TRAINER_GROUP=TRAINER, COSLICE_SAMPLER_GROUP=SAMPLER)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        callback = slime.Callback("what slime passes", key="is ignored")
        for phase, role in (("init", "both"), ("generate", "sampler"), ("train", "trainer")):
            callback.on_phase_begin(phase, role, {"step": 1})
            callback.on_phase_end(phase, role, {"step": 1})
        callback.on_phase_begin("weight_sync", "both")
        callback.close()
        taken = [turn[1:] for turn in recording.turns() if turn[0] == "acquire"]
    assert taken == [
        ("init", (TRAINER, SAMPLER)),
        ("generate", (SAMPLER,)),
        ("train", (TRAINER,)),
        ("weight_sync", (TRAINER, SAMPLER)),
    ]


def test_nemo_rl() -> None:
    with told() as (callback, _):
        policy = Worker(
            callback, "prepare_for_lp_inference", "get_logprobs", "prepare_for_training", "train",
            "offload_before_refit", "offload_after_refit",
        )  # fmt: skip
        engine = Worker(callback, "prepare_for_generation", "generate", "finish_generation")
        phases = nemo_rl.share(policy, engine, callback=callback)
        assert phases is not None
        for _ in range(2):
            policy.offload_before_refit()  # type: ignore[attr-defined]
            callback.works("refit")
            policy.offload_after_refit()  # type: ignore[attr-defined]
            engine.prepare_for_generation()  # type: ignore[attr-defined]
            engine.generate()  # type: ignore[attr-defined]
            engine.finish_generation()  # type: ignore[attr-defined]
            callback.works("rewards")
            policy.prepare_for_lp_inference()  # type: ignore[attr-defined]
            policy.get_logprobs()  # type: ignore[attr-defined]
            policy.prepare_for_training()  # type: ignore[attr-defined]
            policy.train()  # type: ignore[attr-defined]
            callback.works("log")
        phases.close()
        step = [
            "offload_before_refit:TS", "refit:TS", "offload_after_refit:TS", "prepare_for_generation:S",
            "generate:S", "finish_generation:S", "rewards:", "prepare_for_lp_inference:T", "get_logprobs:T",
            "prepare_for_training:T", "train:T", "log:",
        ]  # fmt: skip
        assert callback.trace == [*step, *step]


# ── all ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("share", [verl.share, openrlhf.share, skyrl.share, nemo_rl.share])
def test_twice_is_once(share: Any) -> None:
    with told() as (callback, _):
        stub = PPOTrainer(callback)
        stub.async_rollout_manager = Worker(callback)  # type: ignore[attr-defined]
        stub.checkpoint_manager = Worker(callback)  # type: ignore[attr-defined]
        share(stub, callback=callback)
        before = dict(vars(stub))
        share(stub, callback=callback)
        assert vars(stub) == before


NOTHING = {
    "ray": "from coslice.integrations.ray import runtime_env\nassert runtime_env('a', 'g') == {}",
    "trl": "from coslice.integrations.trl import share\ns = S()\nassert share(s) is s and vars(s) == {}\n"
    "import sys\nassert not {'trl', 'transformers', 'torch'} & set(sys.modules)",
    "verl": "import coslice.integrations.verl as v, sys\nn = len(sys.meta_path)\n"
    "import coslice.integrations.verl_plugin as p\nassert p.plugin is False and len(sys.meta_path) == n\n"
    "assert vars(v.share(S())) == {}",
    "openrlhf": "from coslice.integrations.openrlhf import share\nassert vars(share(S())) == {}",
    "skyrl": "from coslice.integrations.skyrl import share\nassert vars(share(S())) == {}",
    "nemo_rl": "from coslice.integrations.nemo_rl import share\ns = S()\n"
    "assert share(s) is None and vars(s) == {}",
    "slime": "from coslice.integrations.slime import Callback\nc = Callback()\nassert c.enabled is False\n"
    "c.on_phase_begin('init'); c.on_phase_end('init'); c.close()",
}


@pytest.mark.parametrize("name", NOTHING)
def test_without_an_orchestrator_nothing_is_wrapped_and_grpc_is_not_imported(name: str) -> None:
    stub = "class S:\n    def fit(self): pass\n    def train_step(self): pass\n    def generate(self): pass\n"
    unconfigured(stub + NOTHING[name])


def opaque(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: method(*args)


class Called:
    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    async def __call__(self, *args: Any) -> Any:
        return await self.method(*args)


def for_all(method: Callable[..., Any]) -> Callable[..., Any]:
    """As verl's ``auto_await`` does: a coroutine awaits the method, for anybody else it is run at once."""

    @functools.wraps(method)
    def call(*args: Any) -> Any:
        caller = sys._getframe(1).f_code
        if caller.co_flags & inspect.CO_COROUTINE:
            return method(*args)
        with ThreadPoolExecutor(1) as pool:  # a loop may run in this thread
            return pool.submit(asyncio.run, method(*args)).result()

    return call


WRAPPED: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "decorated": decorated,
    "twice decorated": lambda method: decorated(decorated(method)),
    "partial": lambda method: functools.partial(method, "given"),
    "decorated partial": lambda method: decorated(functools.partial(method, "given")),
    "partial of a decorated one": lambda method: functools.partial(decorated(method), "given"),
    "object": Called,
    "decorated object": lambda method: decorated(Called(method)),
    "for all": for_all,
}


class Generates:
    def __init__(self, told: Told, around: Callable[[Callable[..., Any]], Any]) -> None:
        self.told, self.loop = told, threading.current_thread()
        self.generate, self.enabled, self.waited = around(self._generate), True, list[bool]()
        phases = Phases(self)
        phases.around(self, "generate", "generate")
        phases.around(self, "generate", "update", "trainer")

    async def _generate(self, *given: object) -> str:
        self.told.works("begins")
        await asyncio.sleep(0)
        self.told.works("ends")
        return "done"

    def on_phase_begin(self, phase: str, role: str = "") -> None:
        self.waited.append(threading.current_thread() is self.loop)
        self.told.on_phase_begin(phase, role)

    def on_phase_end(self, phase: str, role: str = "") -> None:
        self.told.on_phase_end(phase, role)

    def close(self) -> None:
        self.told.close()


@pytest.mark.parametrize("around", WRAPPED.values(), ids=WRAPPED)
def test_a_hidden_coroutine_is_a_phase_to_its_end_and_the_loop_goes_on_while_it_waits(
    around: Callable[[Callable[..., Any]], Any],
) -> None:
    async def scenario(stub: Generates) -> None:
        assert await stub.generate() == "done"

    with told() as (callback, _):
        stub = Generates(callback, around)
        asyncio.run(scenario(stub))
        assert callback.trace == ["begins:TS", "ends:TS"]
        assert stub.waited == [False, False]


def test_a_coroutine_that_nobody_can_see_is_a_phase_to_its_end_too() -> None:
    with told() as (callback, _):
        stub = Generates(callback, opaque)
        assert asyncio.run(stub.generate()) == "done"
        assert callback.trace == ["begins:TS", "ends:TS"]


@pytest.mark.parametrize("looping", [False, True])
def test_a_method_that_runs_its_coroutine_for_a_plain_caller_still_does(looping: bool) -> None:
    def plain(stub: Generates) -> None:
        assert stub.generate() == "done"

    async def scenario(stub: Generates) -> None:
        plain(stub)

    with told() as (callback, _):
        stub = Generates(callback, for_all)
        if looping:
            asyncio.run(scenario(stub))
        else:
            plain(stub)
        assert callback.trace == ["begins:TS", "ends:TS"]


def test_a_hidden_coroutine_that_fails_ends_its_phase() -> None:
    async def fails(*given: object) -> None:
        raise RuntimeError("out of memory")

    async def scenario(stub: Generates) -> None:
        with pytest.raises(RuntimeError, match="out of memory"):
            await stub.generate()
        assert callback.callback.held == ()

    with told() as (callback, _):
        asyncio.run(scenario(Generates(callback, lambda method: decorated(fails))))


def test_a_cancelled_wait_leaves_nothing_held() -> None:
    class Slow:
        async def generate(self) -> None:
            started.set()
            await asyncio.Event().wait()

    started = asyncio.Event()

    async def scenario(callback: Told) -> None:
        slow = Slow()
        Phases(callback).around(slow, "generate", "generate")
        task = asyncio.ensure_future(slow.generate())
        await started.wait()
        assert callback.callback.held == (SAMPLER,)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with told() as (callback, _):
        asyncio.run(asyncio.wait_for(scenario(callback), 30))
