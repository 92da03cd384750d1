"""NeMo-RL, which has no callbacks: its policy and its generation engine as phases.

::

    policy, policy_generation, ... = setup(...)
    share(policy, policy_generation)          # before grpo_train(policy, policy_generation, ...)

Generation uses the sampler's accelerators, log-probabilities and the update the trainer's, refitting the
engine both. Without an orchestrator nothing is wrapped.
"""

from typing import Any

from coslice.client.phases import PhaseCallback
from coslice.integrations.wrapping import Enabled, Phases, phases_of


def share(policy: Any, generation: Any = None, *, callback: Enabled | None = None) -> Phases | None:
    """``generation``: None where the policy generates itself. Returns what to ``close()`` in the end."""
    callback = callback if callback is not None else PhaseCallback.from_env()
    phases = phases_of(policy, callback)
    if phases is None:
        return None
    for name in ("get_logprobs", "get_reference_policy_logprobs", "prepare_for_lp_inference"):
        phases.opens(policy, name, "train")
    phases.opens(policy, "prepare_for_training", "train")
    phases.around(policy, "train", "train")
    phases.around(policy, "save_checkpoint", "save")
    # Offloading before a refit is the end of training and the beginning of the sync.
    phases.opens(policy, "offload_before_refit", "weight_sync", ends="train")
    phases.closes(policy, "offload_after_refit", "weight_sync")
    engine = policy if generation is None else generation
    phases.opens(engine, "prepare_for_generation", "generate", ends="weight_sync")
    phases.opens(engine, "generate", "generate")
    phases.closes(engine, "finish_generation", "generate")
    return phases
