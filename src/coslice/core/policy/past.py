"""What the lock remembers of one job's turns, for policies that ask for it. Seconds on the driver's clock.

``core.memory`` keeps it up to date; a new incarnation of a job begins without a past, as all its state does.
"""

from msgspec import Struct
from msgspec.structs import replace

SMOOTH = 0.3
"""Weight of the newest turn in a running mean: a job's drift is followed within a few steps."""
HALF_LIFE = 1800.0
"""After so long half of what a job got is forgotten."""
PHASES = 8
"""Names of phases that are told apart; the others count together."""


class Past(Struct, frozen=True, gc=False, kw_only=True):
    turns: int = 0
    last_end: float | None = None
    """When its last turn ended."""
    away_since: float | None = None
    """The same, while it has not asked again."""
    holds: tuple[tuple[str, float], ...] = ()
    """How long it holds, by name of the phase: running means."""
    away: float | None = None
    """From the end of a turn to the next request: a running mean."""
    served: float = 0.0
    """Seconds held, of which half is forgotten every ``HALF_LIFE``; as of ``last_end``."""

    def hold(self, phase: str = "") -> float | None:
        """How long the next turn will be, as far as it was seen."""
        if not self.holds:
            return None
        return next((s for name, s in self.holds if name == phase), None) or self.holds[-1][1]

    def served_at(self, now: float) -> float:
        return self.served * _left(now, self.last_end)

    def period(self, phase: str = "") -> float | None:
        """A turn and the time away after it: what a cycle takes alone, if it has one turn."""
        held = self.hold(phase)
        return None if held is None or self.away is None else held + self.away


def asked(past: Past, at: float) -> Past:
    if past.away_since is None:
        return past
    away = max(0.0, at - past.away_since)
    return replace(past, away_since=None, away=_mean(past.away, away))


def ended(past: Past, phase: str, *, since: float, at: float) -> Past:
    held = max(0.0, at - since)
    before = next((s for name, s in past.holds if name == phase), None)
    others = tuple((name, s) for name, s in past.holds if name != phase)[-(PHASES - 1) :]
    return replace(
        past,
        turns=past.turns + 1,
        last_end=at,
        away_since=at,
        holds=(*others, (phase, _mean(before, held))),
        served=past.served_at(at) + held,
    )


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + SMOOTH * (value - before)


def _left(now: float, since: float | None) -> float:
    """The share of something that is not forgotten yet."""
    elapsed = 0.0 if since is None else max(0.0, now - since)
    return float(2.0 ** (-elapsed / HALF_LIFE))
