"""vLLM inside this process: ``LLM`` and ``AsyncLLM``, made with ``enable_sleep_mode=True``.

It sleeps and wakes as a whole: a forward pass after a partial wake crashes it. Level 1 keeps the weights on
the host; level 2 (mode discard) drops them, and they are read again from where the model came from. Never
imports vLLM.
"""

import asyncio
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from coslice.errors import ConfigError, OperationFailed

MOVE_SECONDS = 300.0
USUAL = 0.5
"""Of the memory that an engine was allowed, this share at least is weights and KV cache."""


class Vllm:
    regions: tuple[str, ...] = ("weights", "kv_cache")
    parts = False

    def __init__(self, engine: Any) -> None:
        self.name = f"vLLM's {type(engine).__name__}"
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        if inspect.iscoroutinefunction(engine.sleep):
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                raise ConfigError(
                    f"{self.name} runs on an event loop: register it from a coroutine on that loop"
                ) from None
        if _config(engine, "model_config", "enable_sleep_mode") is False:
            raise ConfigError(f"{self.name} cannot sleep: make it with enable_sleep_mode=True")
        self.expected = _expected(engine)

    def check(self, regions: Sequence[str], *, discard: bool) -> None:
        if self._loop is not None and self._loop.is_closed():
            raise OperationFailed(f"the event loop of {self.name} is closed: register it on the new one")

    def sleep(self, regions: Sequence[str], *, discard: bool) -> None:
        """Drained first: asleep with requests in flight it dies, and says nothing."""
        engine = self._engine
        if callable(getattr(engine, "pause_generation", None)):
            names = inspect.signature(engine.pause_generation).parameters
            self._call(engine.pause_generation, **({"mode": "wait"} if "mode" in names else {}))
        self._call(engine.sleep, level=2 if discard else 1)

    def wake(self, regions: Sequence[str], *, discard: bool) -> None:
        engine = self._engine
        self._call(engine.wake_up)
        if discard:
            self._call(engine.collective_rpc, "reload_weights")
        if callable(getattr(engine, "resume_generation", None)):
            self._call(engine.resume_generation)
        if callable(getattr(engine, "reset_prefix_cache", None)):
            self._call(engine.reset_prefix_cache)

    def awake(self) -> bool | None:
        asked = getattr(self._engine, "is_sleeping", None)
        return None if not callable(asked) else not self._call(asked)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._loop is None:
            return function(*args, **kwargs)
        running = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self._loop)
        try:
            return running.result(MOVE_SECONDS)
        except TimeoutError:
            running.cancel()
            raise OperationFailed(f"{self.name} did not answer within {MOVE_SECONDS:g} s") from None


def default_probe(engine: Any) -> Callable[[], Any] | None:
    """A few tokens without sampling, for an ``LLM``. An ``AsyncLLM`` needs a probe from its user."""
    vllm = sys.modules.get("vllm")
    if vllm is None or not callable(getattr(engine, "generate", None)) or not hasattr(vllm, "SamplingParams"):
        return None
    if inspect.iscoroutinefunction(engine.sleep):
        return None

    def probe() -> Any:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=4)
        answers = engine.generate(["The capital of France is"], sampling, use_tqdm=False)
        return [list(output.token_ids) for answer in answers for output in answer.outputs]

    return probe


def _expected(engine: Any) -> int:
    from coslice.workload.adapters.engine import on_cuda

    share = _config(engine, "cache_config", "gpu_memory_utilization")
    if not isinstance(share, float) or not on_cuda():
        return 0
    cuda = sys.modules["torch"].cuda
    return int(USUAL * share * cuda.mem_get_info(cuda.current_device())[1])


def _config(engine: Any, part: str, name: str) -> Any:
    """From the places where versions keep it; None: not found."""
    inner = getattr(engine, "llm_engine", engine)
    for root in (getattr(inner, "vllm_config", None), inner):
        found = getattr(getattr(root, part, None), name, None)
        if found is not None:
            return found
    return None
