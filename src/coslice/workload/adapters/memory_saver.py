"""Regions of ``torch_memory_saver``: ``with saver.region("weights", enable_cpu_backup=True): ...``

Pausing what is paused, resuming what is not, and running out of memory in a resume end the process without a
word (``exit(1)`` in C++). So: each region once, the device synchronised first, room looked for before. Never
imports it.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from coslice.errors import ConfigError


class MemorySaver:
    parts = True
    expected = 0

    def __init__(self, saver: Any, regions: Sequence[str], env: Mapping[str, str] = os.environ) -> None:
        """``regions``: their tags; the saver does not tell them."""
        self.name = "torch_memory_saver"
        self.regions: tuple[str, ...] = tuple(regions)
        self._saver = saver
        if not regions:
            raise ConfigError(
                "which regions of torch_memory_saver? Pass regions=('weights', …): the tags of its region() "
                "calls"
            )
        if len(set(regions)) < len(regions):
            raise ConfigError(f"a region is named twice: {', '.join(regions)}")
        _check_environment(saver, env)

    def check(self, regions: Sequence[str], *, discard: bool) -> None:
        pass

    def sleep(self, regions: Sequence[str], *, discard: bool) -> None:
        _synchronize()  # pause does not
        for region in regions:
            self._saver.pause(region)

    def wake(self, regions: Sequence[str], *, discard: bool) -> None:
        for region in reversed(regions):
            self._saver.resume(region)

    def awake(self) -> bool | None:
        return None


def _check_environment(saver: Any, env: Mapping[str, str]) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in env.get(name, "").lower().replace(" ", ""):
            raise ConfigError(f"{name} has expandable_segments:True, and torch_memory_saver ends: unset it")
    preloaded = [part for part in env.get("LD_PRELOAD", "").split(":") if "torch_memory_saver" in part]
    if getattr(saver, "hook_mode", None) == "preload" and len(preloaded) != 1:
        raise ConfigError(
            f"torch_memory_saver with hook_mode 'preload' wants itself in LD_PRELOAD once, and it is there "
            f"{len(preloaded)} times: pausing would free nothing; use its configure_subprocess(), or "
            "hook_mode 'torch'"
        )


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
