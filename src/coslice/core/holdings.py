"""What one node holds for one group: each job's context, the operation that runs, and the room that is left.

Structs and arithmetic only. ``core.context`` changes them, ``core.node_facts`` puts them in words, and
the agent's shell and the invariants judge by the same figures. Nothing here knows how bytes are moved.

    Live ──evicted──▶ Leaving ──▶ Saved or Partly ──wanted──▶ Returning ──▶ Live
                         └─ killed ─▶ Lost ◀─ not restorable ─┘

A context is the whole job's on this node, however many processes it has: one of them in host memory and one
on the device is ``Live(whole=False)``, which occupies the device and cannot be granted before a restore.

Members of enums that every step asks for have names of their own, here and in other modules of the core: to
look one up in its class costs twice as much as to make a struct.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Literal, final

from msgspec import Struct

from coslice.core.effects import ReportDone, ReportFailed
from coslice.core.events import EndedProcess
from coslice.core.ids import Epoch, GroupId, Incarnation, JobId, MemberId, NodeId, OpId

MIB = 1 << 20


class NodeRules(Struct, frozen=True, gc=False, kw_only=True):
    """How patient a node is. Seconds, and numbers of attempts."""

    retries: int = 3
    """How often a failed snapshot or restore is tried again before it counts as failed."""
    retry_pause: float = 0.5
    """The first retry comes at once, the n-th after ``(n - 1) * retry_pause``."""
    snapshot_timeout: float = 120.0
    """A backstop: the backend has its own, shorter bound and normally answers."""
    restore_timeout: float = 120.0
    on_stuck: Literal["kill", "wait"] = "kill"
    stuck_grace: float = 60.0
    """How long a job that cannot be evicted is still asked before it is killed."""
    stuck_pause: float = 5.0
    """Between two attempts in that time."""
    kill_timeout: float = 10.0
    room_wait: float = 5.0
    """How long a restore waits for what parked processes still have on the device to go."""


class Member(Struct, frozen=True, gc=False, kw_only=True):
    """One process. ``seen`` is false after a restart of the agent until the process has registered again."""

    id: MemberId
    pid: int
    start_time: int
    bytes: int
    need: int = 0
    parked: bool = False
    part: bool = False
    """Some of its state is in host memory, and some on the device."""
    divisible: bool = False
    """Can move a part of its state and leave the rest."""
    whole: bool = False
    """Can be frozen as it is, also in the middle of a phase."""
    seen: bool = True
    unkept: int = 0
    """Of ``bytes``, what needs no host memory of its own when it leaves."""
    common: tuple[tuple[str, int], ...] = ()
    """Beside ``bytes``: names and bytes of weights that are on the device once for all jobs that have them.
    They are there while such a job is on the device, also with a part of its state only."""


class Effort(StrEnum):
    TRYING = "trying"  # the backend was asked (or will be, once every process is back)
    PAUSING = "pausing"  # before the next attempt
    KILLING = "killing"  # the processes were killed; their exit is awaited


TRYING = Effort.TRYING


@final
class Live(Struct, frozen=True, gc=False, tag=True):
    whole: bool = True
    """False: part of it may be in host memory, so it must be restored before it is granted."""
    reason: str = ""
    sure: bool = True
    """False: a move ended half-way: where each process has its state is not known until the next succeeds."""


@final
class Leaving(Struct, frozen=True, gc=False, kw_only=True, tag=True):
    of: tuple[MemberId, ...]
    """Whom this attempt moves; a process that registers meanwhile is not among them."""
    attempt: int
    effort: Effort
    until: float
    """When the effort is over: the attempt unanswered, the pause at its end, the kill without effect."""
    stuck_since: float | None = None
    touched: bool = False
    """An attempt failed half-way: some of the state may have left already."""
    least: int = 0
    """So many bytes have to leave; 0: all."""
    saved: int = 0
    """Bytes that were in host memory before."""
    reason: str = ""


@final
class Partly(Struct, frozen=True, gc=False, kw_only=True, tag=True):
    """A part of it is in host memory. Until that is back the job does not run, so the rest does not grow."""

    saved: int
    left: int
    """What its processes have on the device, in bytes as measured; at least 1."""


@final
class Saved(Struct, frozen=True, gc=False, kw_only=True, tag=True):
    bytes: int
    residual: int = 0
    """What the parked processes leave on the device."""


@final
class Returning(Struct, frozen=True, gc=False, kw_only=True, tag=True):
    of: tuple[MemberId, ...]
    attempt: int
    effort: Effort
    until: float
    reason: str = ""


@final
class Lost(Struct, frozen=True, gc=False, tag=True):
    reason: str


Place = Live | Leaving | Partly | Saved | Returning | Lost


class Context(Struct, frozen=True, gc=False, kw_only=True):
    """One job on this node."""

    job: JobId
    incarnation: Incarnation
    members: tuple[Member, ...]
    place: Place
    need: int = 0
    """Declared device memory of the whole job on this node, what is common included; 0: not declared."""
    peak: int = 0
    """The most it was measured to use while live, without what is common."""
    use: int = 0
    """As measured last, without what is common; moves only by notable steps."""

    @property
    def bytes(self) -> int:
        if len(self.members) == 1:
            return self.members[0].bytes
        total = 0
        for member in self.members:
            total += member.bytes
        return total

    @property
    def ids(self) -> tuple[MemberId, ...]:
        if len(self.members) == 1:
            return (self.members[0].id,)
        return tuple([m.id for m in self.members])

    @property
    def kept(self) -> int:
        """Host memory that it needs at most."""
        members, total = self.members, 0
        if len(members) == 1 and not members[0].unkept:
            return members[0].bytes
        for member in members:
            if member.bytes > member.unkept:
                total += member.bytes - member.unkept
        return total

    @property
    def common(self) -> int:
        """Bytes on the device that it has together with others, or would."""
        for member in self.members:
            if member.common:
                return common_bytes((self,))
        return 0

    @property
    def divisible(self) -> bool:
        members = self.members
        return members[0].divisible if len(members) == 1 else all(m.divisible for m in members)

    @property
    def whole(self) -> bool:
        """Can all of it be frozen? What a process has registered, it must move itself."""
        for member in self.members:
            if not member.whole or member.bytes:
                return False
        return bool(self.members)

    @property
    def ready(self) -> bool:
        """Every process can be talked to."""
        members = self.members
        return members[0].seen if len(members) == 1 else all(m.seen for m in members)


class Operation(Struct, frozen=True, gc=False, kw_only=True):
    """Make ``job`` resident, as commanded under ``epoch``."""

    op: OpId
    epoch: Epoch
    job: JobId
    need: int = 0
    freeze: tuple[JobId, ...] = ()
    """Who has to leave though there be room."""
    begun: float = 0.0
    restores: int = 0
    """Attempts to restore so far."""
    restored: bool = False
    evicted: tuple[JobId, ...] = ()
    bytes_in: int = 0
    bytes_out: int = 0
    room_by: float | None = None
    """Set while it waits for room; then it gives up."""


class Holdings(Struct, frozen=True, gc=False, kw_only=True):
    group: GroupId
    node: NodeId
    device_budget: int = 0
    """Bytes; 0: unknown, so that no two jobs are ever on the device together."""
    host_budget: int = 0
    """Bytes; 0: not limited here."""
    accelerator: str = "host"
    rules: NodeRules = NodeRules()
    epoch: Epoch = Epoch(0)
    """The highest ever commanded."""
    contexts: tuple[Context, ...] = ()
    ended: tuple[EndedProcess, ...] = ()
    """Processes that were seen to end, the latest last."""
    recent: tuple[JobId, ...] = ()
    """Jobs in the order in which they were last made resident, the latest first."""
    running: Operation | None = None
    queued: Operation | None = None
    finished: ReportDone | ReportFailed | None = None
    """The last report, so that a repeated command is answered again."""
    version: int = 0


@lru_cache(maxsize=4096)  # the same states come and go
def mib(n: int) -> str:
    """``n`` bytes for people."""
    if 0 < n < MIB // 10:
        return f"{n} bytes"
    return f"{n / MIB:.0f} MiB" if n >= 10 * MIB or n % MIB == 0 else f"{n / MIB:.1f} MiB"


def find(holdings: Holdings, job: JobId) -> Context | None:
    for context in holdings.contexts:
        if context.job == job:
            return context
    return None


def placed(holdings: Holdings, context: Context) -> tuple[Context, ...]:
    """The contexts with this one in its place, or at the end if the job is new."""
    contexts, job = list(holdings.contexts), context.job
    for i, old in enumerate(contexts):
        if old.job == job:
            contexts[i] = context
            return tuple(contexts)
    return (*contexts, context)


def in_transit(holdings: Holdings) -> Context | None:
    """Who moves now. Nobody does unless an operation runs (``core.invariants_node``)."""
    if holdings.running is not None:
        for context in holdings.contexts:
            place = type(context.place)
            if place is Leaving or place is Returning:
                return context
    return None


def reserve(holdings: Holdings, context: Context) -> int:
    """Device memory to keep for a job while it is live; 0: unknown.

    Not what it uses at the moment: a live job can be granted without asking the agent, and then it grows to
    its peak again. A measured peak above the budget counts as the budget, because there it ran.

    Only a job that declared its need stays beside another. What an undeclared one used so far (building, a
    first rollout) may be a tenth of its first training step, and then somebody has to be killed.
    """
    declared = _declared(context)
    return max(least(holdings, context), declared) if declared else 0


def _declared(context: Context) -> int:
    """The most that it, or a process of it, said that it needs."""
    declared = context.need
    for member in context.members:
        if member.need > declared:
            declared = member.need
    return declared


def least(holdings: Holdings, context: Context) -> int:
    """What the job will take at least once all of it is on the device, also if its need is unknown.

    With a part of it there, what that part uses now and the parts in host memory come together.
    """
    peak, size, coming = context.peak, context.bytes, 0
    if holdings.device_budget and holdings.device_budget < peak:
        peak = holdings.device_budget
    if type(context.place) is Partly:
        coming = context.place.saved
    else:
        for member in context.members:
            if member.parked:
                coming += member.bytes
    most = size if size > peak else peak
    if coming < size and context.use + coming > most:
        most = context.use + coming
    return most + context.common


def common_bytes(contexts: Iterable[Context]) -> int:
    """What these have in common, with each other or with others: each counted once."""
    return sum(dict(c for context in contexts for m in context.members for c in m.common).values())


def _again(holdings: Holdings, job: JobId, beside: Iterable[Context]) -> int:
    """By how much the figures of these jobs are too high together: each counts what they have in common."""
    found = [c for c in beside if c.common]
    if not found:
        return 0
    mine = find(holdings, job)
    if mine is not None and type(mine.place) is not Lost:
        found.append(mine)
    return sum(c.common for c in found) - common_bytes(found)


def need_and_room(holdings: Holdings, context: Context | None, declared: int) -> tuple[int, int]:
    """What a job that shall come in will take (0: unknown), and the room that a restore of it must find."""
    if context is None or type(context.place) is Lost:
        return declared, declared
    own, room = _declared(context), least(holdings, context)
    if own > room:
        room = own
    if declared > room:
        room = declared
    return room if own else declared, room


def restores_into(holdings: Holdings, job: JobId, declared: int) -> int:
    return need_and_room(holdings, find(holdings, job), declared)[1]


def need_of(holdings: Holdings, job: JobId, declared: int) -> int:
    return need_and_room(holdings, find(holdings, job), declared)[0]


def occupies(context: Context) -> bool:
    """Is the device not known to be free of it? A lost job still is there while its processes are."""
    place = context.place
    if type(place) is Lost:
        return bool(context.members) and context.use > 0
    return type(place) is not Saved


def others(holdings: Holdings, job: JobId) -> list[Context]:
    """Who else is on the device, least recently used first, in an order that only the state decides."""
    return around(holdings, job)[1]


def around(holdings: Holdings, job: JobId) -> tuple[Context | None, list[Context]]:
    """The job's own context (``find``), and the ``others``."""
    own: Context | None = None
    beside: list[Context] = []
    for context in holdings.contexts:
        if context.job == job:
            own = context
        elif type(context.place) is not Saved and occupies(context):
            beside.append(context)
    if len(beside) > 1:
        recent = holdings.recent

        def age(context: Context) -> tuple[int, JobId]:
            known = context.job in recent
            return (-recent.index(context.job) if known else -len(recent), context.job)

        beside.sort(key=age)
    return own, beside


def taken(holdings: Holdings, context: Context) -> int:
    """Device memory that an occupant must be thought to take; 0: unknown."""
    place = context.place
    if type(place) is Lost:
        return context.use + context.common
    return place.left + context.common if type(place) is Partly else reserve(holdings, context)


def residuals(holdings: Holdings, *, but: JobId) -> int:
    total = 0
    for context in holdings.contexts:
        if type(context.place) is Saved and context.job != but:
            total += context.place.residual
    return total


def fits_beside(holdings: Holdings, job: JobId, need: int, beside: Sequence[Context]) -> bool:
    """Is there room for ``need`` bytes with those jobs left where they are? Unknown figures never fit."""
    if not holdings.device_budget or not need:
        return not beside
    shares = [taken(holdings, c) for c in beside]
    if not all(shares):
        return False
    total = need + sum(shares) - _again(holdings, job, beside)
    return total + residuals(holdings, but=job) <= holdings.device_budget


def lacking(holdings: Holdings, job: JobId, need: int, beside: Sequence[Context]) -> int | None:
    """By how many bytes ``need`` does not fit with those jobs left where they are; None: that is unknown."""
    shares = [taken(holdings, c) for c in beside]
    if not holdings.device_budget or not need or not all(shares):
        return None
    total = need + sum(shares) - _again(holdings, job, beside)
    return max(0, total + residuals(holdings, but=job) - holdings.device_budget)


def fit_text(holdings: Holdings, job: JobId, need: int, beside: Sequence[Context]) -> str:
    shares = [taken(holdings, c) for c in beside]
    word = "both" if len(shares) == 1 else "all"
    once = f" - {mib(again)} in common" if (again := _again(holdings, job, beside)) else ""
    text = " + ".join(mib(n) for n in (*shares, need))
    return f"{word} fit: {text}{once} of {mib(holdings.device_budget)}"


def saved_bytes(holdings: Holdings) -> int:
    total = 0
    for context in holdings.contexts:
        if type(context.place) is Saved:
            size, kept = context.place.bytes, context.kept
            total += size if size < kept else kept
        elif type(context.place) is Partly:
            total += min(context.place.saved, context.kept)
    return total
