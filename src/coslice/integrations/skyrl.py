"""SkyRL: one call on a trainer before its models are built, or ``run`` in place of the entry point.

::

    class Exp(BasePPOExp):
        def get_trainer(self, **given):
            return share(super().get_trainer(**given))

Generation and evaluation use the sampler's accelerators; log-probabilities, the update and saving the
trainer's; building the models and syncing weights both. The fully asynchronous trainer generates all the
time: there only the trainer's accelerators are shared, and given away while it waits for rollouts.
"""

import functools
from typing import Any, TypeVar

from coslice.client.phases import BOTH, TRAINER
from coslice.integrations.wrapping import Enabled, Phases, phases_of

T = TypeVar("T")


def share(trainer: T, *, callback: Enabled | None = None) -> T:
    """Make a ``RayPPOTrainer``, or one derived from it, take turns; returns it.

    ``callback``: default is what the environment says; without an orchestrator nothing is wrapped.
    """
    phases = phases_of(trainer, callback)
    if phases is None:
        return trainer
    asynchronous = hasattr(trainer, "_collect_generation_mini_batch")
    role = TRAINER if asynchronous else ""
    built = functools.partial(_dispatching, phases, trainer, role)
    if getattr(trainer, "dispatch", None) is not None:
        built()
    _after(trainer, "build_models", built)
    phases.around(trainer, "build_models", "init")
    if asynchronous:
        phases.away(trainer, "_collect_generation_mini_batch", "train")
    else:
        _synchronous(phases, trainer)
    phases.around(trainer, "load_checkpoints", "load", TRAINER)
    phases.around(trainer, "update_ref_with_policy", "update_ref", TRAINER)
    phases.around(trainer, "save_checkpoints", "save")
    phases.around(trainer, "save_models", "save")
    phases.last(trainer, "train")
    return trainer


def _synchronous(phases: Phases, trainer: Any) -> None:
    if getattr(trainer, "colocate_all", False):
        # The engine sleeps after generating; until it does it occupies the accelerators, the trainer's too.
        phases.opens(trainer, "generate", "generate", BOTH)
        phases.closes(trainer.inference_engine_client, "sleep", "generate", BOTH)
        phases.around(trainer, "eval", "eval", BOTH)
    else:
        phases.around(trainer, "generate", "generate")
        phases.around(trainer, "eval", "eval")
    phases.opens(trainer, "fwd_logprobs_values_reward", "train")


def _dispatching(phases: Phases, trainer: Any, role: str) -> None:
    """The dispatch, which syncs the weights, is there once the models are."""
    phases.around(trainer.dispatch, "save_weights_for_sampler", "weight_sync", role)
    phases.closes(trainer.dispatch, "save_weights_for_sampler", "train")


def _after(owner: Any, name: str, then: Any) -> None:
    method = getattr(owner, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then()
        return result

    setattr(owner, name, wrapped)
