"""For the real trainers of verl: workers without accelerators, which answer with tensors of the right shapes.

Real: trainer, its loop, data loader, tokenizer, TransferQueue, checkpoint manager. Ours: what would run on
accelerators (the groups of Ray workers and the rollout servers), and the loop that asks those for answers.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import ray
import torch
from verl import DataProto
from verl.utils import tensordict_utils as tu

PROMPT, ANSWER = 4, 3
works: Callable[[str], None] = lambda what: None  # noqa: E731
"""What a worker calls when it is asked something; set by ``workers``."""
FOLDERS = {"ppo_trainer": "trainer/config",
           "fully_async_ppo_trainer": "experimental/fully_async_policy/config"}  # fmt: skip
LOSS = {"mfu": [0.5], "grad_norm": [1.0], "loss": [0.1]}


class Group:
    """A group of Ray workers: actor, reference and, on the same accelerators, rollouts."""

    world_size = 1

    def __init__(self, **_given: Any) -> None:
        self._dispatch_info = {"actor": [0]}

    def spawn(self, prefix_set: Any) -> dict[str, "Group"]:
        return dict.fromkeys(prefix_set, self)

    def init_model(self) -> None:
        works("build")

    def update_weights(self, **_given: Any) -> list[Any]:
        works("sync")
        return [ray.put(None)]

    def update_actor(self, batch: Any) -> Any:
        works("update")
        return tu.get_tensordict({}, {"metrics": dict(LOSS)})

    def compute_log_prob(self, batch: Any) -> Any:
        works("log_probs")
        return _log_probs(batch, ("log_probs", "entropy"))

    def compute_ref_log_prob(self, batch: Any) -> Any:
        works("ref")
        return _log_probs(batch, ("log_probs",))

    def save_checkpoint(self, folder: str, *_given: Any, **_more: Any) -> None:
        works("save")
        Path(folder).mkdir(parents=True, exist_ok=True)

    def save_model_to_cpu(self, _step: int) -> None:
        works("copy")

    restore_model_from_cpu = clear_cpu_model = save_model_to_cpu


def _log_probs(batch: Any, names: tuple[str, ...]) -> Any:
    """One number for each token, of batches in the TransferQueue and of those passed along."""
    if not hasattr(batch, "partition_id"):
        ids = batch["input_ids"]
        zeros = torch.nested.nested_tensor_from_jagged(torch.zeros(ids.values().shape[0]), ids.offsets())
        fields = dict.fromkeys(names, zeros)
        return tu.get_tensordict(fields, {"metrics": {"mfu": 0.5}})
    import transfer_queue as tq

    rows = [torch.zeros(PROMPT + ANSWER)] * len(batch)
    fields = dict.fromkeys(names, torch.nested.as_nested_tensor(rows, layout=torch.jagged))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=tu.get_tensordict(fields))
    return batch


class Replica:
    async def sleep(self) -> None:
        works("sleep")


class Servers:
    """Rollout servers, on the trainer's accelerators or on their own."""

    server_addresses: tuple[str, ...] = ()

    @classmethod
    def create(cls, config: Any, **_given: Any) -> "Servers":
        return cls()

    create_empty = create
    rollout_replicas: tuple[Any, ...] = ()

    def get_replicas(self) -> list[Any]:
        return [Replica()]

    def get_client(self, **_given: Any) -> None:
        return None


class AgentLoops:
    """Has answers at once: in the TransferQueue, or as a batch for the trainer before v1."""

    @classmethod
    def create(cls, config: Any, **_given: Any) -> "AgentLoops":
        loops = cls()
        loops.config = config
        return loops

    config: Any

    def generate_sequences(self, prompts: Any) -> Any:
        works("generate")
        if isinstance(prompts, DataProto):
            return answers(prompts)
        return self._queue(prompts)

    def _queue(self, prompts: Any) -> None:
        import transfer_queue as tq
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        validate = "validate" in prompts and bool(prompts["validate"])
        rollout = self.config.actor_rollout_ref.rollout
        count, queue = (rollout.val_kwargs.n, "val") if validate else (rollout.n, "train")
        keys, fields, tags = [], [], []
        step = int(prompts["global_steps"])
        for i, uid in enumerate(list(prompts["uid"])):
            for session in range(count):
                keys.append(f"{uid}_{session}_0")
                fields.append(
                    {
                        "prompts": torch.arange(PROMPT), "responses": torch.arange(ANSWER),
                        "input_ids": torch.arange(PROMPT + ANSWER),
                        "position_ids": torch.arange(PROMPT + ANSWER),
                        "response_mask": torch.ones(ANSWER, dtype=torch.int64),
                        "loss_mask": torch.ones(ANSWER, dtype=torch.int64),
                        "rm_scores": torch.tensor([0.0] * (ANSWER - 1) + [float(session)]),
                        "rollout_log_probs": torch.zeros(ANSWER),
                        "uid": uid, "num_turns": 1, "data_source": "ours", "session_id": session,
                        "reward_model": {"ground_truth": "1"}, "raw_prompt": prompts["raw_prompt"][i],
                        "extra_fields": {}, "multi_modal_inputs": {},
                    }
                )  # fmt: skip
                tags.append({"status": "success", "prompt_len": PROMPT, "response_len": ANSWER,
                             "seq_len": PROMPT + ANSWER, "global_steps": step, "min_global_steps": step,
                             "max_global_steps": step})  # fmt: skip
        tq.kv_batch_put(keys=keys, partition_id=queue, fields=list_of_dict_to_tensordict(fields), tags=tags)
        done = [{"is_prompt": True, "status": "finished", "global_steps": step}] * len(prompts)
        tq.kv_batch_put(keys=list(prompts["uid"]), partition_id=queue, tags=done)


def answers(prompts: Any) -> Any:
    """Prompts with their answers and rewards, padded, as a rollout returns them."""
    rows = len(prompts)
    whole = torch.arange(1, PROMPT + ANSWER + 1).repeat(rows, 1)
    tensors = {
        "prompts": whole[:, :PROMPT], "responses": whole[:, PROMPT:], "input_ids": whole,
        "attention_mask": torch.ones_like(whole), "position_ids": whole - 1,
        "response_mask": torch.ones(rows, ANSWER, dtype=torch.int64),
        "rm_scores": torch.rand(rows, ANSWER), "rollout_log_probs": torch.zeros(rows, ANSWER),
    }  # fmt: skip
    plain = {"multi_modal_inputs": np.array([{}] * rows, dtype=object),
             "__num_turns__": np.ones(rows, dtype=np.int32)}  # fmt: skip
    return DataProto.from_dict(tensors, plain, meta_info={"timing": {}})


def rewards(**_given: Any) -> Any:
    return SimpleNamespace(reward_loop_worker_handles=[], reward_loop_workers=[])


def _as_it_is(class_dict: Any) -> Any:
    return class_dict


@contextmanager
def workers(trace: Callable[[str], None]) -> Iterator[None]:
    """Put ours in the place of what needs accelerators, in the modules of verl that use it."""
    import verl.trainer.ppo.ray_trainer as legacy
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.experimental.fully_async_policy import fully_async_trainer
    from verl.trainer.ppo.v1 import trainer_base, trainer_separate_async

    class Weights(CheckpointEngineManager):
        """Between processes, which needs a backend for accelerators: ours only asks the workers."""

        def __init__(self, config: Any, actor_wg: Group, replicas: list[Replica]) -> None:
            self.actor_wg, self.replicas = actor_wg, replicas

        def update_weights(self, global_steps: int | None = None) -> Any:
            return ray.get(self.actor_wg.update_weights(global_steps=global_steps)) and {}

    class AwaitedWeights(Weights):
        async def update_weights(self, global_steps: int | None = None) -> Any:
            return super().update_weights(global_steps)

    here = globals()
    here["works"] = trace
    changes = [
        patch.object(fully_async_trainer, "CheckpointEngineManager", AwaitedWeights),
        patch("verl.experimental.separation.ray_trainer.create_colocated_worker_cls", _as_it_is),
        patch.object(trainer_base, "RayWorkerGroup", Group),
        patch.object(trainer_base, "create_colocated_worker_cls", _as_it_is),
        patch.object(trainer_base, "RewardLoopManager", rewards),
        patch.object(trainer_base, "LLMServerManager", Servers),
        patch.object(trainer_separate_async, "LLMServerManager", Servers),
        patch.object(trainer_separate_async, "CheckpointEngineManager", Weights),
        patch.object(legacy, "LLMServerManager", Servers),
        patch.object(legacy, "create_colocated_worker_cls", _as_it_is),
        patch("verl.single_controller.ray.RayWorkerGroup", Group),
        patch("verl.experimental.reward_loop.RewardLoopManager", rewards),
        patch.object(trainer_base.ResourcePoolManager, "_check_resource_available", lambda self: None),
    ]
    for change in changes:
        change.start()
    try:
        yield
    finally:
        for change in changes:
            change.stop()


# ── a model that nobody runs, and its data ─────────────────────────────────


def model(folder: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)} | {"<pad>": 60, "<eos>": 61}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
             "num_key_value_heads": 1, "vocab_size": 64}  # fmt: skip
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **shape}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def data(folder: Path) -> Path:
    import pandas

    rows = [
        {"prompt": [{"role": "user", "content": f"w{i} w1"}], "data_source": "ours",
         "reward_model": {"ground_truth": "1", "style": "rule"}, "extra_info": {"index": i}}
        for i in range(12)
    ]  # fmt: skip
    pandas.DataFrame(rows).to_parquet(folder / "data.parquet")
    return folder / "data.parquet"


def config(folder: Path, *overrides: str, name: str = "ppo_trainer") -> Any:
    """verl's own defaults, small."""
    import verl
    from hydra import compose, initialize_config_dir

    package = Path(verl.__file__).parent
    parquet = folder / "data.parquet" if (folder / "data.parquet").exists() else data(folder)
    path = model(folder)
    given = [
        f"actor_rollout_ref.model.path={path}", f"data.train_files={parquet}", f"data.val_files={parquet}",
        "data.train_batch_size=4", "data.val_max_samples=4", "data.max_prompt_length=8",
        "data.max_response_length=8", "data.dataloader_num_workers=0", "data.return_raw_chat=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.agent.num_workers=1",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=integrations.verl_workers.AgentLoops",
        "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True",
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
        "algorithm.adv_estimator=grpo", "trainer.logger=[console]", "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=2", "trainer.total_epochs=1", "trainer.device=cpu",
        "trainer.resume_mode=disable", f"trainer.default_local_dir={folder}/checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        *overrides,
    ]  # fmt: skip
    with initialize_config_dir(str(package / FOLDERS[name]), version_base=None):
        return compose(name, given)


# ── the rollouts' side of the fully asynchronous trainer ───────────────────


class Asked:
    """A method of a Ray actor: the answer is there already."""

    def __init__(self, answer: Any, what: str = "") -> None:
        self._answer, self._what = answer, what

    def remote(self, *_given: Any) -> Any:
        if self._what:
            works(self._what)
        return ray.put(self._answer)


class Rollouter:
    def __init__(self) -> None:
        self.get_replicas = Asked([])
        self.get_total_produced_samples, self.get_completed_steps = Asked(0), Asked(0)
        self.save_checkpoint = Asked(None)
        self.reset_staleness, self.do_validate = Asked({}), Asked({"val/reward": 0.5}, "validate")


class Queue:
    """``steps`` × ``batch`` samples, then the end."""

    def __init__(self, steps: int, batch: int) -> None:
        self.left = steps * batch

    async def get_sample(self) -> tuple[Any, int]:
        from verl.experimental.fully_async_policy.detach_utils import RolloutSample

        works("wait")
        if not self.left:
            return None, 0
        self.left -= 1
        batch = answers(range(2))
        more = {"min_global_steps": [0] * 2, "max_global_steps": [0] * 2, "uid": [f"u{self.left}"] * 2}
        batch.non_tensor_batch |= {name: np.array(value, dtype=object) for name, value in more.items()}
        batch.meta_info["metrics"] = [{"generate_sequences": 0.1, "tool_calls": 0.0}] * 2
        sample = RolloutSample(full_batch=batch, sample_id=str(self.left), epoch=0, rollout_status={})
        return ray.cloudpickle.dumps(sample), self.left

    def get_queue_size_sync(self) -> int:
        return self.left


def fully_asynchronous(config: Any, *, steps: int) -> Any:
    """A trainer with its workers, before they are built, and the coroutine that does what its driver does."""
    from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
    from verl.single_controller.ray import ResourcePoolManager
    from verl.trainer.ppo.utils import Role
    from verl.utils import hf_tokenizer
    from verl.workers.engine_workers import ActorRolloutRefWorker

    roles = (Role.Actor, Role.RefPolicy)
    trainer = FullyAsyncTrainer.__ray_metadata__.modified_class(
        config,
        hf_tokenizer(config.actor_rollout_ref.model.path),
        dict.fromkeys(roles, ray.remote(ActorRolloutRefWorker)),
        ResourcePoolManager({"pool": [1]}, dict.fromkeys(roles, "pool")),
        Group,
    )

    async def drive() -> None:
        await trainer.init_workers()
        await trainer.set_rollouter(Rollouter())
        trainer.set_total_train_steps(steps)
        trainer.set_message_queue_client(Queue(steps, trainer.required_samples))
        await trainer.load_checkpoint()
        await trainer._fit_update_weights()
        await trainer.fit()

    return drive
