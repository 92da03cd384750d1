"""TRL: GRPO, RLOO and the online trainers built like them take turns with other jobs.

::

    trainer = share(GRPOTrainer(...))     # one line; or: class MyTrainer(SharedTrainer, GRPOTrainer)
    trainer.train()

The trainer holds its accelerators from ``train()`` on. It gives them away while rewards are computed (reward
functions that are plain Python) and while a vLLM *server* generates; whoever waits gets his turn there, and
nobody waiting costs nothing. Between two steps it does so where the step before gave nobody a chance, or when
somebody waits too long: every other hand-over would only move state. Model, reference model and optimizer are
registered, so that their state can leave. What the trainer computes does not change.

Wraps bound methods of one trainer: neither trl nor transformers is imported or patched.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from coslice.client.sync import Client

T = TypeVar("T")
_MARK = "_coslice_turns"


class Turns:
    """The accelerators of one trainer: taken for a phase, given away between phases."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._depth = 0
        """Calls of ``train`` and ``evaluate`` that are open: evaluation may run inside training."""
        self._gave = False
        """Did others have a chance since the last step began?"""

    def take(self, phase: str) -> None:
        self._client.acquire(phase=phase)

    def give(self) -> None:
        self._client.yield_()

    def between_steps(self, phase: str) -> None:
        """Let others in, unless they could come in during the step before and nobody waits too long."""
        gave, self._gave = self._gave, False
        if not gave or self._client.should_yield():
            self.give()
            self.take(phase)

    @contextmanager
    def held(self, phase: str) -> Iterator[None]:
        """Holds throughout; inside another one it is part of that."""
        self._depth += 1
        if self._depth == 1:
            self.take(phase)
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.give()

    @contextmanager
    def away(self, phase: str) -> Iterator[None]:
        """Others may have the accelerators meanwhile; ``phase`` is what follows."""
        if self._depth == 0:
            yield
            return
        self.give()
        self._gave = True
        try:
            yield
        finally:
            self.take(phase)


def share(trainer: T, *, client: Client | None = None, register: bool = True) -> T:
    """Make an existing trainer take turns; returns it. Call it right after the constructor, once.

    ``client``: default is what the environment says; without an orchestrator nothing is wrapped.
    ``register=False`` where something else moves the state (a ``cuda`` job, an engine's own sleep).
    """
    client = client or Client.from_env()
    if client.is_noop or getattr(trainer, _MARK, None) is not None:
        return trainer
    turns = Turns(client)
    setattr(trainer, _MARK, turns)
    _wrap(trainer, "train", lambda: turns.held("train"))
    _wrap(trainer, "evaluate", lambda: turns.held("evaluate"))
    _wrap(trainer, "predict", lambda: turns.held("evaluate"))
    _wrap(trainer, "save_model", lambda: turns.held("save"))  # after train() the state may be elsewhere
    if not _scored_on_accelerators(trainer):
        _wrap(trainer, "_calculate_rewards", lambda: turns.away("train"))
    server = _vllm_server(trainer)
    if server is not None:
        _wrap(server, "generate", lambda: turns.away("train"))
    handles = _Registered(register)
    handles.add(getattr(trainer, "model", None), getattr(trainer, "ref_model", None))
    trainer.add_callback(_callback(turns, handles))  # type: ignore[attr-defined]
    return trainer


class SharedTrainer:
    """Mixin: put it before the trainer's class, and every instance is shared."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        share(self)


class _Registered:
    """Offers state to the agent, each object once."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._known: list[Any] = []
        self._handles: list[Any] = []

    def add(self, *models: Any, optimizer: Any = None) -> None:
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        new = [model for model in models if model is not None and not self._knows(model)]
        step = optimizer if optimizer is not None and not self._knows(optimizer) else None
        if not self._wanted or not (new or step is not None):
            return
        import coslice

        self._handles.append(coslice.workload.register(new or None, step))
        self._known += [*new, *([step] if step is not None else [])]

    def _knows(self, one: Any) -> bool:
        return any(one is known for known in self._known)


def _callback(turns: Turns, handles: _Registered) -> Any:
    from transformers import TrainerCallback  # a trainer is there, so this is loaded

    class ShareCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            handles.add(optimizer=kwargs.get("optimizer"))

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step:  # the first step comes right after the beginning, which is held already
                turns.between_steps("train")

    return ShareCallback()


def _wrap(owner: Any, name: str, around: Callable[[], Any]) -> None:
    method = getattr(owner, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with around():
            return method(*args, **kwargs)

    setattr(owner, name, wrapped)


def _scored_on_accelerators(trainer: Any) -> bool:
    """A reward model (anything with parameters) works on the accelerators itself."""
    return any(hasattr(function, "parameters") for function in getattr(trainer, "reward_funcs", ()))


def _vllm_server(trainer: Any) -> Any:
    """Who generates elsewhere, if somebody does. In ``colocate`` mode vLLM uses our accelerators."""
    args = getattr(trainer, "args", None)
    if not getattr(args, "use_vllm", False) or getattr(args, "vllm_mode", "server") != "server":
        return None
    generation = getattr(trainer, "vllm_generation", None)  # trl 1.x
    return generation if generation is not None else getattr(trainer, "vllm_client", None)
