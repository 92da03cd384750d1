"""For the real trainers of SkyRL: workers and an engine without accelerators, called without Ray.

Real: experiment, configuration, trainer, its loop, data loader, dispatch, groups' calls, checkpoints. Ours:
the Ray actors behind a group, the servers behind the engine's client, generator, dataset and tokenizer.
Arguments go through the pickling that Ray would do.
"""

import multiprocessing
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import ray
import typing_extensions

started = multiprocessing.get_start_method(allow_none=True)
# pydantic takes no typing.TypedDict before Python 3.12, and SkyRL 0.3.0 gives it some
with patch("typing.TypedDict", typing_extensions.TypedDict):
    from skyrl.backends.skyrl_train.distributed.dispatch import ActorInfo, MeshRank, WorkerOutput
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.workers.worker import PPORayActorGroup
    from skyrl.train import trainer as trainer_module
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints import main_base
    from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer
multiprocessing.set_start_method(started, force=True)  # SkyRL sets it for its own driver

PROMPT, ANSWER = [1, 2, 3], [4, 5]
works: Callable[[str], None] = lambda what: None  # noqa: E731
"""What a worker calls when it is asked something; set by ``workers``."""
NAMES = {
    "init_model": "build", "init_weight_sync_state": "connect", "broadcast_to_inference_engines": "sync",
    "forward": "forward", "forward_backward": "update", "optim_step": "update", "save_checkpoint": "save",
    "load_checkpoint": "load", "save_hf_model": "export",
}  # fmt: skip


class Actor:
    """A Ray actor: one worker of a group."""

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)

        def remote(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = pickle.loads(ray.cloudpickle.dumps((args, kwargs)))
            works(NAMES.get(method, method))
            return self._answer(method, *args)

        return SimpleNamespace(remote=remote)

    def _answer(self, method: str, *args: Any) -> Any:
        if method == "forward":
            length = args[0].metadata["response_length"]
            return WorkerOutput(loss_fn_outputs=[{"logprobs": [0.0] * length}] * len(args[0]))
        if method == "forward_backward":
            return WorkerOutput(metrics={"loss": 0.1})
        if method in ("init_weight_sync_state", "broadcast_to_inference_engines"):
            assert isinstance(args[0], RemoteInferenceClient), "what the real worker asks"
        return {"optim_step": 1.0, "get_ray_node_id": "node"}.get(method)


class Group(PPORayActorGroup):
    def __init__(self, *_given: Any, **_more: Any) -> None:
        self._actor_handlers = [Actor()]
        rank = MeshRank(dp=0, sp=0, tp=0, pp=0, world_size=1, dp_size=1, pp_size=1)
        self.actor_infos = [ActorInfo(self._actor_handlers[0], rank)]


class Engine(RemoteInferenceClient):
    """The servers are not there."""

    async def sleep(self, *_given: Any, **_more: Any) -> None:
        works("sleep")

    async def wake_up(self, *_given: Any, **_more: Any) -> None:
        works("wake")

    async def pause_generation(self, *_given: Any, **_more: Any) -> None:
        works("pause")

    async def resume_generation(self) -> None:
        works("resume")


def engine(*_given: Any, **_more: Any) -> Any:
    works("engine")
    groups = {"router": None, "server_groups": [], "prefill_server_groups": [], "decode_server_groups": []}
    return Engine(proxy_url="", server_urls=["ours"], data_parallel_size=1), SimpleNamespace(**groups)


class Generator:
    async def generate(self, input_batch: Any) -> Any:
        evaluates = input_batch["batch_metadata"].training_phase == "eval"
        works("eval" if evaluates else "generate")
        count = len(input_batch["prompts"])
        return {
            "prompt_token_ids": [PROMPT] * count, "response_ids": [ANSWER] * count,
            "rewards": [float(i % 2) for i in range(count)], "loss_masks": [[1] * len(ANSWER)] * count,
            "stop_reasons": ["stop"] * count, "rollout_logprobs": [[0.0] * len(ANSWER)] * count,
            "rollout_metrics": {},
        }  # fmt: skip


class Prompts:
    """Four of them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> Any:
        prompt = [{"role": "user", "content": f"w{item}"}]
        return {"prompt": prompt, "env_class": None, "env_extras": {"data_source": "ours"}, "uid": str(item)}

    def collate_fn(self, items: list[Any]) -> list[Any]:
        return items


class Tokenizer:
    pad_token_id, eos_token_id = 0, 9

    def decode(self, _ids: Any, **_more: Any) -> str:
        return "an answer"


class Experiment(main_base.BasePPOExp):  # type: ignore[misc]
    """As a user derives one; only the placement group for colocation is Ray's."""

    def get_train_dataset(self) -> Any:
        return Prompts()

    get_eval_dataset = get_train_dataset

    def get_generator(self, *_given: Any) -> Any:
        return Generator()

    def get_colocate_pg(self, *_given: Any) -> None:
        return None


class FullyAsynchronous(Experiment):
    def get_trainer(self, *_given: Any, **given: Any) -> Any:
        return FullyAsyncRayPPOTrainer(**given)


def config(folder: Path, *overrides: str) -> Any:
    """SkyRL's own defaults, small: two epochs of one step each."""
    given = [
        f"trainer.ckpt_path={folder}/checkpoints", f"trainer.export_path={folder}/exports",
        f"trainer.log_path={folder}/logs", "trainer.policy.model.path=ours", "trainer.logger=console",
        "trainer.epochs=2", "trainer.train_batch_size=4", "trainer.policy_mini_batch_size=2",
        "trainer.eval_batch_size=4", "trainer.eval_interval=2", "trainer.ckpt_interval=2",
        "trainer.update_ref_every_epoch=true", "trainer.resume_mode=none", "trainer.dump_eval_results=false",
        "trainer.print_example_interval=0", "trainer.enable_ray_gpu_monitor=false",
        "trainer.placement.colocate_all=false", "generator.n_samples_per_prompt=2",
        "generator.inference_engine.enable_ray_prometheus_stats=false", "data.dataloader.num_workers=0",
        *overrides,
    ]  # fmt: skip
    return SkyRLTrainConfig.from_cli_overrides(given)


@contextmanager
def workers(trace: Callable[[str], None]) -> Iterator[None]:
    """Put ours in the place of what needs accelerators or Ray, where SkyRL looks for it."""
    package = "skyrl.backends.skyrl_train"
    # importing these two needs flash-attn and vLLM's router
    modules = {
        f"{package}.workers.fsdp.fsdp_worker": {
            "PolicyWorker": None,
            "CriticWorker": None,
            "RefWorker": None,
        },
        f"{package}.inference_servers.setup": {"build_new_inference_client": engine},
    }
    changes = [
        patch(f"{__name__}.works", trace),
        patch.object(main_base, "get_tokenizer", lambda *_given, **_more: Tokenizer()),
        patch.object(trainer_module, "PPORayActorGroup", Group),
        patch.object(trainer_module, "placement_group", lambda *_given, **_more: None),
        patch.object(trainer_module, "get_ray_pg_ready_with_timeout", lambda *_given, **_more: None),
        patch.object(trainer_module, "ResolvedPlacementGroup", lambda group: group),
        patch.object(trainer_module, "run_on_each_node", lambda *_given: None),
        patch.object(trainer_module, "configure_ray_worker_logging", lambda: None),
        patch("ray.get", lambda answers: answers),
        patch("ray.put", lambda value: value),
    ]
    with ExitStack() as stack:
        for name, contents in modules.items():
            sys.modules[name] = module = ModuleType(name)
            vars(module).update(contents)
            stack.callback(sys.modules.pop, name)
        for change in changes:
            stack.enter_context(change)
        yield
