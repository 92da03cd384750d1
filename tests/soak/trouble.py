"""What strikes whom, when: drawn from a seed. And how long each kind may keep others waiting.

A target is left alone for a while after it was struck (``SPACING``): a fault that strikes again before its
consequences are over shows nothing new, and a wait could then be as long as the soak.
"""

import random
from dataclasses import dataclass

SESSION_GRACE = 4.0
KEEPALIVE = 3.0
"""Of the orchestrator. A stopped client is noticed after two of them: a ping, and the wait for its answer."""
MOVE_TIMEOUT = 10.0
SECTION_WAIT = 5.0
RETRIES = 1
STUCK_GRACE = 2.0
AGENT_KEEPALIVE = 15.0
"""Of agents and jobs towards each other and the orchestrator: built in, ping and wait together."""
RECONNECT = 5.0
"""The longest pause between two attempts to connect, of jobs and agents."""
START = 10.0
"""A Python process on a busy machine, from its start to its first word."""
TURN = 6.0
"""One undisturbed turn on a busy machine: the swap, up to three steps, a checkpoint."""

_NOTICED = 2 * KEEPALIVE + SESSION_GRACE
_EVICTED = (1 + RETRIES) * (MOVE_TIMEOUT + SECTION_WAIT) + STUCK_GRACE
GIVEN_UP = _EVICTED + START
"""So long after a job was stopped its agent may still give it up for what it did not answer in that time."""
_BACK = START + SESSION_GRACE + 2 * RECONNECT


@dataclass(frozen=True, kw_only=True)
class Kind:
    name: str
    target: str
    """``job``, ``agent``, ``orchestrator`` or ``node`` (orchestrator and one agent at once)."""
    weight: int
    signal: str
    lasts: tuple[float, float] = (0.2, 2.0)
    """Seconds until the target is started again, or goes on."""
    delays: float = 0.0
    """Seconds that it may keep others waiting, beyond what it lasts."""


KINDS = (
    Kind(name="job_killed", target="job", weight=8, signal="kill", delays=_NOTICED + _EVICTED),
    Kind(
        name="job_stopped",
        target="job",
        weight=5,
        signal="stop",
        lasts=(0.5, 12.0),
        delays=_NOTICED + _EVICTED,
    ),
    Kind(
        name="job_stopped_for_good",
        target="job",
        weight=2,
        signal="stop",
        lasts=(90.0, 90.0),
        delays=_NOTICED + _EVICTED + AGENT_KEEPALIVE - 90.0,
    ),
    Kind(name="agent_killed", target="agent", weight=4, signal="kill", delays=_BACK + MOVE_TIMEOUT),
    Kind(
        name="agent_stopped",
        target="agent",
        weight=2,
        signal="stop",
        lasts=(0.5, 8.0),
        delays=AGENT_KEEPALIVE + 2 * RECONNECT,
    ),
    Kind(name="orchestrator_killed", target="orchestrator", weight=2, signal="kill", delays=_BACK),
    Kind(
        name="orchestrator_stopped",
        target="orchestrator",
        weight=1,
        signal="stop",
        lasts=(0.5, 6.0),
        delays=SESSION_GRACE + 2 * RECONNECT,
    ),
    Kind(name="node_killed", target="node", weight=1, signal="kill", delays=_BACK + MOVE_TIMEOUT),
)
BY_NAME = {kind.name: kind for kind in KINDS}
SPACING = {"job": 20.0, "agent": 25.0, "orchestrator": 30.0}
"""Seconds for which a target is left alone, from its last fault on."""


@dataclass(kw_only=True)
class Fault:
    """``group``: whom it concerns; empty: everybody."""

    kind: str
    target: str
    group: str
    begun: float
    ended: float | None = None

    @property
    def over(self) -> float:
        """Nothing that it delayed waits any longer, on the clock of ``begun``."""
        kind = BY_NAME[self.kind]
        lasted = kind.lasts[1] if self.ended is None else self.ended - self.begun
        return self.begun + max(0.0, lasted + kind.delays)


class Schedule:
    """``next``: seconds until the next fault; ``draw``: what it is, or None if everybody is being spared."""

    def __init__(self, seed: int, *, jobs: dict[str, str], agents: dict[str, str]) -> None:
        """Jobs and agents by name, each with its group."""
        self._random = random.Random(seed)
        self._jobs, self._agents = jobs, agents
        self._struck: dict[str, float] = {}

    def next(self) -> float:
        return self._random.uniform(1.0, 5.0)

    def draw(self, now: float) -> tuple[Kind, str] | None:
        kind = self._random.choices(KINDS, [kind.weight for kind in KINDS])[0]
        names = {
            "job": list(self._jobs),
            "agent": list(self._agents),
            "node": list(self._agents),
            "orchestrator": ["orchestrator"],
        }[kind.target]
        free = [name for name in names if self._spared(name, now)]
        if not free or (kind.target == "node" and not self._spared("orchestrator", now)):
            return None
        target = self._random.choice(free)
        for name in (target, "orchestrator") if kind.target == "node" else (target,):
            self._struck[name] = now
        return kind, target

    def lasts(self, kind: Kind) -> float:
        return self._random.uniform(*kind.lasts)

    def _spared(self, name: str, now: float) -> bool:
        of = "job" if name in self._jobs else "agent" if name in self._agents else "orchestrator"
        return now - self._struck.get(name, -1e9) >= SPACING[of]
