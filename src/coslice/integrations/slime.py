"""slime: ``--phase-callback-path coslice.integrations.slime.Callback``.

For slime builds that call ``on_phase_begin`` and ``on_phase_end`` at the boundaries of their phases (init,
generate, train, weight_sync, offload, onload, eval, create; roles trainer, sampler, both) and ``close`` at
the end. Configured by the environment alone; without an orchestrator it does nothing.
"""

from collections.abc import Mapping
from typing import Any

from coslice.client.phases import PhaseCallback


class Callback:
    """Made by slime, which may pass its own arguments; none is needed."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._phases = PhaseCallback.from_env()
        self.enabled = self._phases.enabled

    def on_phase_begin(self, phase: str, role: str = "", context: Mapping[str, Any] | None = None) -> None:
        if self.enabled:
            self._phases.on_phase_begin(phase, role or "", context)

    def on_phase_end(self, phase: str, role: str = "", context: Mapping[str, Any] | None = None) -> None:
        if self.enabled:
            self._phases.on_phase_end(phase, role or "", context)

    def close(self) -> None:
        if self.enabled:
            self._phases.close()
