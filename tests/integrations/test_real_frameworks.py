"""Do the frameworks still have the methods that the adapters wrap? Read from their packages' source.

Reads and does not import: OpenRLHF needs flash-attn or vLLM for that; the loops of verl and SkyRL run in
``test_real_verl.py`` and ``test_real_skyrl.py``. Says nothing about a run. ``make test-frameworks`` fetches
the packages.
"""

import ast
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.frameworks
FOLDERS = [Path(__file__).parents[2] / "build" / "frameworks", *map(Path, sys.path)]

EXPECTED = [
    ("verl/trainer/ppo/v1/trainer_base.py", "PPOTrainer",
     "init fit on_step_begin on_step_end on_sample_begin on_sample_end on_validate_begin on_validate_end"),
    ("verl/trainer/ppo/v1/trainer_sync.py", "PPOTrainerSync", "on_sample_end on_step_end"),
    ("verl/trainer/ppo/v1/trainer_separate_async.py", "PPOTrainerSeparateAsync", "on_sample_end on_step_end"),
    ("verl/trainer/ppo/ray_trainer.py", "RayPPOTrainer",
     "init_workers fit _validate _load_checkpoint"),
    ("verl/checkpoint_engine/base.py", "CheckpointEngineManager", "update_weights sleep_replicas"),
    ("verl/experimental/fully_async_policy/fully_async_trainer.py", "FullyAsyncTrainer",
     "init_workers fit load_checkpoint _fit_generate _fit_update_weights _save_checkpoint"),
    ("openrlhf/trainer/ppo_trainer.py", "BasePPOTrainer",
     "train_step broadcast_to_vllm save_best_checkpoint save_logs_and_checkpoints fit"),
    ("openrlhf/trainer/ppo_trainer.py", "PPOTrainer", "fit"),
    ("openrlhf/trainer/ppo_trainer_async.py", "TrainingActor", "fit broadcast_to_vllm"),
    ("openrlhf/trainer/ppo_trainer_async.py", "GenerateSamplesActor", "fit"),
    ("openrlhf/trainer/ppo_utils/samples_generator.py", "SamplesGenerator",
     "generate_samples generate_eval_samples"),
]  # fmt: skip


def source(path: str) -> ast.Module:
    for folder in FOLDERS:
        if (folder / path).is_file():
            return ast.parse((folder / path).read_text())
    pytest.skip(f"{path.split('/')[0]} is not here: make test-frameworks")


@pytest.mark.parametrize(("path", "owner", "methods"), EXPECTED)
def test_the_methods_are_there(path: str, owner: str, methods: str) -> None:
    classes = [n for n in source(path).body if isinstance(n, ast.ClassDef) and n.name == owner]
    assert classes, f"{path} has no class {owner}"
    known = {n.name for n in classes[0].body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}
    assert set(methods.split()) <= known


def test_verl_loads_plugins_and_keeps_its_trainers_in_a_registry() -> None:
    named = {n.id for n in ast.walk(source("verl/trainer/ppo/v1/trainer_base.py")) if isinstance(n, ast.Name)}
    assert "TRAINER_REGISTRY" in named
    texts = {n.value for n in ast.walk(source("verl/__init__.py")) if isinstance(n, ast.Constant)}
    assert "verl.plugins" in texts
