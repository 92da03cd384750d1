"""OpenRLHF: ``python -m coslice.integrations.openrlhf`` in place of ``python -m openrlhf.cli.train_ppo_ray``.

Generation and evaluation use the sampler's accelerators, a training step the trainer's, building the models
and broadcasting weights both. The asynchronous trainer's actors take their turns each for its own role.
Without an orchestrator it is the same as the framework's own command.
"""

import importlib
import os
import runpy
from typing import Any, TypeVar

from coslice.client.phases import PhaseCallback
from coslice.integrations.wrapping import Enabled, phases_of

T = TypeVar("T")
COMMAND = "openrlhf.cli.train_ppo_ray"


def share(actor: T, *, callback: Enabled | None = None) -> T:
    """Make a ``PPOTrainer``, ``TrainingActor`` or ``GenerateSamplesActor`` take turns; returns it."""
    phases = phases_of(actor, callback)
    if phases is None:
        return actor
    generator = getattr(actor, "samples_generator", None)
    if generator is not None:
        phases.around(generator, "generate_samples", "generate")
        phases.around(generator, "generate_eval_samples", "eval")
    # The weights are broadcast inside a training step: the sampler's accelerators come on top, and go first.
    phases.opens(actor, "train_step", "train")
    phases.closes(actor, "save_logs_and_checkpoints", "train")  # follows every step
    phases.around(actor, "broadcast_to_vllm", "weight_sync")
    phases.around(actor, "save_best_checkpoint", "save")
    phases.last(actor, "fit")
    return actor


def shared(actor_class: Any) -> Any:
    """The same Ray actor class, whose instances take turns."""
    import ray

    original: Any = actor_class.__ray_metadata__.modified_class

    class Shared(original):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            share(self)

    Shared.__name__ = Shared.__qualname__ = getattr(original, "__name__", "Shared")
    return ray.remote(Shared)


class Launch:
    """Stands for an actor class in the framework's driver: everything before ``fit`` is the phase init."""

    def __init__(self, actor_class: Any, callback: Enabled) -> None:
        self._actor_class, self._callback = actor_class, callback

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return _Handle(self._actor_class.remote(*args, **kwargs), self._callback)


class _Handle:
    def __init__(self, handle: Any, callback: Enabled) -> None:
        self._handle, self._callback = handle, callback

    def __getattr__(self, name: str) -> Any:
        if name == "fit":
            self._callback.on_phase_end("init")
        return getattr(self._handle, name)


def main() -> None:
    callback = PhaseCallback.from_env()
    if callback.enabled and os.environ.get("COSLICE_ORCHESTRATOR"):
        _prepare(callback)
    try:
        runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)
    finally:
        callback.close()


def _prepare(callback: Enabled) -> None:
    from coslice.integrations.ray import carry

    ppo_trainer: Any = importlib.import_module("openrlhf.trainer.ppo_trainer")
    ppo_trainer_async: Any = importlib.import_module("openrlhf.trainer.ppo_trainer_async")

    carry()
    for name in ("GenerateSamplesActor", "TrainingActor"):
        setattr(ppo_trainer_async, name, shared(getattr(ppo_trainer_async, name)))
    ppo_trainer.PPOTrainer = Launch(shared(ppo_trainer.PPOTrainer), callback)
    ppo_trainer_async.PPOTrainerAsync = Launch(ppo_trainer_async.PPOTrainerAsync, callback)
    callback.on_phase_begin("init")


if __name__ == "__main__":
    main()
