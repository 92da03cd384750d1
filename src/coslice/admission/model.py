"""The words of admission: modes, what a member is, what was decided and why."""

from enum import StrEnum
from typing import Literal

from msgspec import Struct

from coslice.core import events as ev
from coslice.core.ids import Incarnation, JobId

Mode = Literal["off", "warn", "enforce"]
MODES: tuple[Mode, ...] = ("off", "warn", "enforce")
BY = "admission"


class Rules(Struct, frozen=True, kw_only=True):
    mode: Mode = "off"
    max_slowdown: float = 1.10
    """A member's steps take at most so many times as long as alone: the rolling mean over ten steps."""
    queue_limit: float = 3600.0
    """Seconds that a member may be queued; then it is told to go elsewhere."""


class State(StrEnum):
    PROBATION = "probation"  # runs, and is judged when it is known
    SEATED = "seated"
    JUDGED = "judged"  # runs although it breaks a bound: the mode is warn
    APPLYING = "applying"  # waits at the door for its first verdict
    QUEUED = "queued"  # waits at the door until there is room
    REFUSED = "refused"


class Code(StrEnum):
    """Why admission decided something. Stable names: tests, metrics and the journal use them."""

    PROBATION = "probation"
    ADMITTED = "admitted"
    WARNED = "warned"
    REFUSED = "refused"
    DRIFTED = "drifted"
    MEASURED = "measured"  # slower than the bound although the prediction was not
    KEPT = "kept"  # judged again: nothing has to change
    REORDERED = "reordered"
    QUEUED = "queued"
    LIFTED = "lifted"
    EVICTED = "evicted"  # queued for too long
    LEFT = "left"


class Decision(Struct, frozen=True, kw_only=True):
    at: float
    code: Code
    job: JobId
    text: str


class Enter(Struct, frozen=True):
    """The request goes to the lock."""


class Wait(Struct, frozen=True):
    """It waits at the door: until ``Actions.enter`` or ``Actions.refuse`` names the job."""

    text: str


class Refuse(Struct, frozen=True):
    text: str


Answer = Enter | Wait | Refuse


class Actions(Struct, frozen=True, kw_only=True):
    """What follows from a verdict: events for the lock, and who at the door may enter or has to go."""

    events: tuple[ev.PolicySet | ev.JobEvicted, ...] = ()
    enter: tuple[JobId, ...] = ()
    refuse: tuple[tuple[JobId, str], ...] = ()


class MemberView(Struct, frozen=True, kw_only=True):
    """For status pages. Seconds are of a cycle alone."""

    job: JobId
    incarnation: Incarnation
    state: State
    cycles: int
    on_s: float
    off_s: float
    slowdown: float
    predicted: float
    queued_s: float
    reason: str
    drifts: int
