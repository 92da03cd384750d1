"""SkyRL: one call on an experiment before it runs, or on a trainer before its models are built.

::

    share(BasePPOExp(cfg)).run()

Generation and evaluation use the sampler's accelerators; log-probabilities, the update and saving the
trainer's; starting the engines, building the models, connecting the two and syncing weights both. The fully
asynchronous trainer generates all the time: once it is built, only the trainer's accelerators are shared, and
given away while it waits for rollouts.
"""

import functools
from typing import Any, TypeVar

from coslice.client.phases import BOTH, TRAINER, PhaseCallback
from coslice.integrations.wrapping import Enabled, Phases, phases_of

T = TypeVar("T")


def share(owner: T, *, callback: Enabled | None = None) -> T:
    """Make a ``BasePPOExp``, a ``RayPPOTrainer``, or what is derived from them, take turns; returns it.

    A trainer alone leaves out its engines, which are started before there is one. ``callback``: default is
    what the environment says; without an orchestrator nothing is wrapped.
    """
    callback = callback if callback is not None else PhaseCallback.from_env()
    phases = phases_of(owner, callback)
    if phases is None:
        return owner
    if hasattr(owner, "get_trainer"):
        _experiment(phases, owner, callback)
    else:
        _trainer(phases, owner)
    return owner


def _experiment(phases: Phases, experiment: Any, callback: Enabled) -> None:
    get_trainer = experiment.get_trainer

    @functools.wraps(get_trainer)
    def shared(*args: Any, **kwargs: Any) -> Any:
        trainer = get_trainer(*args, **kwargs)
        if phases_of(trainer, callback) is not None:  # not shared already
            _trainer(phases, trainer)
        return trainer

    experiment.get_trainer = shared
    phases.around(experiment, "_setup_trainer", "init")
    phases.last(experiment, "run")


def _trainer(phases: Phases, trainer: Any) -> None:
    asynchronous = hasattr(trainer, "_collect_generation_mini_batch")
    role = TRAINER if asynchronous else ""
    built = functools.partial(_dispatching, phases, trainer, role)
    if getattr(trainer, "dispatch", None) is not None:
        built()
    _after(trainer, "build_models", built)
    phases.around(trainer, "build_models", "init")
    phases.around(trainer, "init_weight_sync_state", "weight_sync", role)
    if asynchronous:
        phases.away(trainer, "_collect_generation_mini_batch", "train")
    else:
        _synchronous(phases, trainer)
    phases.around(trainer, "load_checkpoints", "load", TRAINER)
    phases.around(trainer, "update_ref_with_policy", "update_ref", TRAINER)
    phases.around(trainer, "save_checkpoints", "save")
    phases.around(trainer, "save_models", "save")
    phases.last(trainer, "train")


def _synchronous(phases: Phases, trainer: Any) -> None:
    if getattr(trainer, "colocate_all", False):
        # The engine sleeps after generating; until it does it occupies the accelerators, the trainer's too.
        phases.opens(trainer, "generate", "generate", BOTH)
        trainer.inference_engine_client = engine = _Engine(trainer.inference_engine_client)
        phases.around(engine, "sleep", "sleep", BOTH)  # also once more when all is done
        phases.closes(engine, "sleep", "generate", BOTH)
        phases.around(trainer, "eval", "eval", BOTH)
    else:
        phases.around(trainer, "generate", "generate")
        phases.around(trainer, "eval", "eval")
    phases.opens(trainer, "fwd_logprobs_values_reward", "train")


class _Engine:
    """The inference engine's client, with phases. Workers get it pickled: there it is the client alone."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def sleep(self, *args: Any, **kwargs: Any) -> Any:
        return await self._client.sleep(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unwrapped, (self._client,)


def _unwrapped(client: Any) -> Any:
    return client


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
