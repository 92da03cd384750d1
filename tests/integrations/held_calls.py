"""What the stub workers of a real trainer were asked, and which groups the job held meanwhile."""

from integrations.frameworks import SAMPLER, TRAINER

from coslice.testing.recording import RecordingOrchestrator


class HeldCalls:
    """``calls``: each as ``what:`` and the groups held then, T, S or both."""

    def __init__(self, recording: RecordingOrchestrator) -> None:
        self.recording, self.calls, self.fails = recording, list[str](), ""

    def works(self, what: str) -> None:
        held = self.recording.held
        self.calls.append(f"{what}:{'T' * (TRAINER in held)}{'S' * (SAMPLER in held)}")
        if what == self.fails:
            raise RuntimeError("out of memory")

    @property
    def acquired(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(phase, groups) for kind, phase, groups in self.recording.turns() if kind == "acquire"]
