"""SGLang inside this process: ``Engine`` with ``enable_memory_saver`` and ``enable_weights_cpu_backup``.

A release with requests, and a release or resume that does not fit what was released, kill its scheduler.
There is no way to ask it what is released; the adapter's record is the only one. Never imports SGLang.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from coslice.errors import ConfigError


class Sglang:
    regions: tuple[str, ...] = ("weights", "kv_cache")
    """Not ``cuda_graph``: graphs come back at addresses that their pool does not know."""
    parts = True
    expected = 0

    def __init__(self, engine: Any) -> None:
        self.name = "SGLang's Engine"
        self._engine = engine
        self._arguments = getattr(engine, "server_args", None)
        if getattr(self._arguments, "enable_memory_saver", None) is False:
            raise ConfigError(
                f"{self.name} cannot give memory up, and would say that it did: make it with "
                "enable_memory_saver=True"
            )
        self._tags = "tags" in inspect.signature(engine.release_memory_occupation).parameters
        self.parts = self._tags

    def check(self, regions: Sequence[str], *, discard: bool) -> None:
        backed = getattr(self._arguments, "enable_weights_cpu_backup", None)
        if "weights" in regions and not discard and backed is False:
            raise ConfigError(
                f"{self.name} would drop its weights: make it with enable_weights_cpu_backup=True, or "
                "register it with mode='discard' and an on_restore that pushes new ones"
            )

    def sleep(self, regions: Sequence[str], *, discard: bool) -> None:
        engine = self._engine
        if callable(getattr(engine, "flush_cache", None)):
            engine.flush_cache()
        engine.release_memory_occupation(**self._named(regions))

    def wake(self, regions: Sequence[str], *, discard: bool) -> None:
        self._engine.resume_memory_occupation(**self._named(regions))

    def awake(self) -> bool | None:
        return None

    def _named(self, regions: Sequence[str]) -> dict[str, list[str]]:
        return {"tags": list(regions)} if self._tags else {}
