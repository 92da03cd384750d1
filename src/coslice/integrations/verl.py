"""verl: nothing to call. With coslice installed and a job's environment set, verl's trainers take turns.

verl loads this as a plugin (``coslice.integrations.verl_plugin``, entry point ``verl.plugins``); that only
arranges for the trainers to be replaced, under their own names, once verl imports them. Modes:

* ``sync`` and the legacy trainer (``use_v1=False``): trainer and rollouts are on the same accelerators, all
  of the job's groups, held for a whole step and given away between two.
* ``separate_async`` and the fully asynchronous trainer: the trainer's group is shared, and given away while
  the trainer waits for samples. The rollouts keep theirs.
* whatever generates on the trainer's accelerators without a pause is refused.

Without an orchestrator nothing is replaced, and verl is not imported here.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

from coslice.client.phases import BOTH, TRAINER, PhaseCallback, upstream_env
from coslice.errors import ConfigError
from coslice.integrations.wrapping import Enabled, Phases, in_thread, phases_of

T = TypeVar("T")
V1, LEGACY = "verl.trainer.ppo.v1", "verl.trainer.ppo.ray_trainer"
FULLY_ASYNC = "verl.experimental.fully_async_policy.fully_async_trainer"
COLOCATED, SEPARATE, UNSHARED = "sync", "separate_async", "colocate_async"


def shared(trainer: type, *, separate: bool, callback: Callable[[], Enabled] | None = None) -> type:
    """A subclass of a v1 trainer that takes turns through verl's own hooks.

    ``separate``: the rollouts have accelerators of their own, and keep them.
    """
    base: Any = trainer

    class Shared(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._phases = (callback or PhaseCallback.from_env)()
            super().__init__(*args, **kwargs)
            if separate and getattr(self, "_enable_hybrid_replicas", False):
                _refuse(self._phases, "rollouts use them too: set actor_rollout_ref.hybrid_engine=False")

        def init(self) -> Any:
            self._phases.on_phase_begin("init")
            try:
                return super().init()
            finally:
                self._phases.on_phase_end("init")

        def fit(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().fit(*args, **kwargs)
            finally:  # verl calls on_train_end only if no step was the last one
                self._phases.close()

        def on_step_begin(self) -> Any:
            if not separate:  # prompts go out before on_sample_begin
                self._phases.on_phase_begin("step", BOTH)
            return super().on_step_begin()

        def on_sample_begin(self) -> Any:
            self._phases.on_phase_end("train")  # waiting for samples: others may train
            return super().on_sample_begin()

        def on_sample_end(self) -> Any:
            result = super().on_sample_end()
            if separate:
                self._phases.on_phase_begin("train")
            return result

        def on_step_end(self) -> Any:
            role = TRAINER if separate else BOTH
            self._phases.on_phase_begin("weight_sync", role)
            result = super().on_step_end()
            for phase, of in (("weight_sync", role), ("train", ""), ("step", BOTH)):
                self._phases.on_phase_end(phase, of)
            return result

        def on_validate_begin(self) -> Any:
            if not separate:
                self._phases.on_phase_begin("eval", BOTH)
            return super().on_validate_begin()

        def on_validate_end(self) -> Any:
            result = super().on_validate_end()
            self._phases.on_phase_end("eval", BOTH)
            return result

    Shared.__name__ = Shared.__qualname__ = base.__name__
    return Shared


def share(trainer: T, *, callback: Enabled | None = None) -> T:
    """Make a legacy ``RayPPOTrainer`` or a ``FullyAsyncTrainer`` take turns, once its workers are there.

    A fully asynchronous trainer is known by ``_fit_generate``, which waits for samples of its rollouter.
    """
    phases = phases_of(trainer, callback)
    if phases is None:
        return trainer
    owner: Any = trainer
    if hasattr(owner, "_fit_generate"):
        _waits_for_samples(phases, owner)
    else:
        # A step ends with the weights' way back, which wakes the rollouts up; validation finds them awake.
        rollouts, weights = owner.async_rollout_manager, owner.checkpoint_manager
        phases.around(owner, "_load_checkpoint", "load", BOTH)
        phases.opens(rollouts, "generate_sequences", "step", BOTH)
        phases.around(weights, "update_weights", "weight_sync", BOTH)
        phases.around(owner, "_validate", "eval", BOTH)
        phases.closes(weights, "update_weights", "step", BOTH)
        phases.closes(owner, "_validate", "step", BOTH)
    phases.last(owner, "fit")
    return trainer


def _waits_for_samples(phases: Phases, owner: Any) -> None:
    """Before ``fit``, and after its last sample, the trainer still loads, syncs and saves."""
    phases.around(owner, "load_checkpoint", "load", TRAINER)
    phases.away(owner, "_fit_generate", "train")
    phases.around(owner, "_fit_update_weights", "weight_sync", TRAINER)
    phases.closes(owner, "_fit_update_weights", "train")
    phases.around(owner, "_save_checkpoint", "save")


# ── the plugin ─────────────────────────────────────────────────────────────


def install() -> bool:
    """Replace verl's trainers when they are imported. False, and nothing done, without an orchestrator."""
    found = upstream_env(os.environ)
    if not found.get("COSLICE_ORCHESTRATOR"):
        return False
    _Imported({V1: _v1, LEGACY: _legacy, FULLY_ASYNC: _fully_async, "ray": _ray}).watch()
    return True


def _ray(_module: ModuleType) -> None:
    from coslice.integrations.ray import carry

    carry()


def _v1(module: ModuleType) -> None:
    base = sys.modules[f"{module.__name__}.trainer_base"]
    registry = base.TRAINER_REGISTRY
    for name in (COLOCATED, SEPARATE):
        if name in registry:  # the name stays: verl compares it in places
            registry[name] = shared(registry[name], separate=name == SEPARATE)
    if UNSHARED in registry:
        registry[UNSHARED] = _refused(registry[UNSHARED])


def _refused(trainer: Any) -> type:
    class Refused(trainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            _refuse(PhaseCallback.from_env(), f"it generates all the time: use {COLOCATED} or {SEPARATE}")
            super().__init__(*args, **kwargs)

    Refused.__name__ = Refused.__qualname__ = trainer.__name__
    return Refused


def _refuse(callback: Enabled, why: str) -> None:
    """Better no run than one that computes on accelerators which it does not hold."""
    if callback.enabled:
        raise ConfigError(f"this verl trainer cannot take turns on its accelerators: {why}")


def _legacy(module: ModuleType) -> None:
    trainer = module.RayPPOTrainer
    init_workers = trainer.init_workers

    @functools.wraps(init_workers)
    def sharing(self: Any, *args: Any, **kwargs: Any) -> Any:
        callback = PhaseCallback.from_env()
        callback.on_phase_begin("init")
        try:
            result = init_workers(self, *args, **kwargs)
        finally:
            callback.on_phase_end("init")
        share(self, callback=callback)
        return result

    trainer.init_workers = sharing


def _fully_async(module: ModuleType) -> None:
    actor = module.FullyAsyncTrainer
    trainer = getattr(actor, "__ray_metadata__", None)
    trainer = actor if trainer is None else trainer.modified_class
    init_workers = trainer.init_workers

    @functools.wraps(init_workers)
    async def sharing(self: Any, *args: Any, **kwargs: Any) -> Any:
        callback = PhaseCallback.from_env()
        using = self.config.async_training
        if using.get("use_trainer_do_validate") or using.get("use_dynamic_resource_scheduling"):
            _refuse(callback, "rollouts use them too: neither use_trainer_do_validate nor dynamic scheduling")
        share(self, callback=callback)
        begin = functools.partial(callback.on_phase_begin, "init", TRAINER)
        end = functools.partial(callback.on_phase_end, "init", TRAINER)
        await in_thread(begin, undo=end)
        try:
            return await init_workers(self, *args, **kwargs)
        finally:
            end()

    trainer.init_workers = sharing


class _Imported(importlib.abc.MetaPathFinder):
    """Calls back when a module has been imported; at once for those that are there already."""

    def __init__(self, wanted: dict[str, Callable[[ModuleType], None]]) -> None:
        self._wanted = dict(wanted)

    def watch(self) -> None:
        for name in [name for name in self._wanted if name in sys.modules]:
            self._wanted.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        then = self._wanted.pop(fullname, None)  # popped first: the search below must not come here again
        if then is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
