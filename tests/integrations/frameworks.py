"""For the tests of the adapters: a recorder of turns, and the order in which stub workers were called."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from coslice.client.phases import PhaseCallback
from coslice.testing.recording import RecordingOrchestrator

TRAINER, SAMPLER = "pool-1-train", "pool-2-sample"


class Told:
    """A callback that holds what the environment says, and remembers who called what while it held what."""

    def __init__(self, callback: PhaseCallback) -> None:
        self.callback, self.enabled = callback, callback.enabled
        self.trace: list[str] = []

    def on_phase_begin(self, phase: str, role: str = "") -> None:
        self.callback.on_phase_begin(phase, role)

    def on_phase_end(self, phase: str, role: str = "") -> None:
        self.callback.on_phase_end(phase, role)

    def close(self) -> None:
        self.callback.close()

    def works(self, what: str) -> None:
        """A worker does something; in the trace with what is held meanwhile."""
        short = {TRAINER: "T", SAMPLER: "S"}
        self.trace.append(f"{what}:{''.join(short.get(group, group) for group in self.callback.held)}")


@contextmanager
def told(groups: tuple[str, str] | str = (TRAINER, SAMPLER)) -> Iterator[tuple[Told, RecordingOrchestrator]]:
    """Both pools, or one for both roles. At the end nothing may be wrong, or still be held."""
    with RecordingOrchestrator(groups=(TRAINER, SAMPLER)) as recording:
        if isinstance(groups, str):
            env = recording.env("job", groups)
        else:
            env = recording.env("job", COSLICE_TRAINER_GROUP=groups[0], COSLICE_SAMPLER_GROUP=groups[1])
        with PhaseCallback.from_env(env) as callback:
            yield Told(callback), recording
            assert callback.held == (), "something is still held"
        assert recording.problems() == []


def unconfigured(code: str) -> str:
    """Run ``code`` without an orchestrator; gRPC must not be imported by it. Returns what it printed."""
    script = f"{code}\nimport sys\nassert 'grpc' not in sys.modules, 'gRPC was imported'\n"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={"PATH": "/usr/bin"}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
