"""What happened in one group, as stretches on a timeline: read from steps, one after the other.

The replay page reads a whole journal with it, the dashboard reads on while it happens. It knows the journal's
lines (runtime/journal.py writes them) and nothing of pages. All times are seconds on the orchestrator's
monotonic clock; intervals are ``[begin, end)``.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

Line = Mapping[str, Any]


class Interval(Struct, kw_only=True):
    """One stretch of a lane. ``kind`` is held, waiting, frozen, swapping or off."""

    kind: str
    job: str
    begin: float
    end: float
    text: str = ""
    phase: str = ""
    epoch: int = 0
    bytes: int = 0


class Decision(Struct, kw_only=True):
    at: float
    code: str
    text: str
    job: str = ""
    trouble: bool = False
    """Somebody should look at it."""


TROUBLE = frozenset(
    (
        *("job_faulted", "blocked", "node_lost", "overran", "unconfirmed", "session_lost", "session_expired"),
        *("retry", "killed", "lost", "refused", "evicted", "frozen"),
    )
)
"""Codes of such decisions."""
_UNWELCOME = frozenset(("refused", "evicted", "queued", "warned"))
"""Those of admission."""


class GroupReplay(Struct, kw_only=True):
    group: str
    jobs: list[str]
    intervals: list[Interval] = []
    queue: list[tuple[float, int]] = []
    """Depth of the queue from that time on."""
    decisions: list[Decision] = []
    blocks: list[tuple[float, float]] = []
    """Stretches of activity: between them nobody held or wanted the lock."""


class GroupReader:
    """Folds the events of one group into intervals; each line carries the state after its event."""

    def __init__(self, group: str) -> None:
        self.replay = GroupReplay(group=group, jobs=[])
        self._occupancy = ("empty", "", 0)
        self._since = 0.0
        self._waiting: dict[str, tuple[str, float, str]] = {}
        self._phases: dict[str, str] = {}
        self._swap_bytes = 0
        self._grant_text = ""
        self._yielded_at: dict[str, float] = {}
        self._depth = 0
        self._frozen: dict[str, float] = {}
        self._kept_out: set[str] = set()

    def resume(self, going_on: Interval, waiting: Mapping[str, tuple[str, float, str]], depth: int) -> None:
        """Begin in the middle. ``going_on``: what the lock does, by its kind; ``waiting``: job, since when
        and phase by request; ``depth``: of the queue."""
        now = going_on
        self._occupancy, self._since, self._grant_text = (now.kind, now.job, now.epoch), now.begin, now.text
        self._waiting, self._depth = dict(waiting), depth
        self._phases[now.job] = now.phase

    def take(self) -> tuple[list[Interval], list[tuple[float, int]], list[Decision]]:
        """What was read since the last time, handed over: intervals that ended, the queue, decisions."""
        replay = self.replay
        taken = (replay.intervals, replay.queue, replay.decisions)
        replay.intervals, replay.queue, replay.decisions, replay.jobs = [], [], [], []
        return taken

    def going_on(self) -> list[Interval]:
        """What did not end yet; ``end`` is 0."""
        found = [
            Interval(kind="waiting", job=job, begin=since, end=0, phase=phase)
            for job, since, phase in self._waiting.values()
        ]
        found += [Interval(kind="frozen", job=job, begin=since, end=0) for job, since in self._frozen.items()]
        kind, job, epoch = self._occupancy
        if kind in ("held", "swapping"):
            held = kind == "held"
            phase, text = (self._phases.get(job, ""), self._grant_text) if held else ("", "")
            found.append(
                Interval(kind=kind, job=job, begin=self._since, end=0, phase=phase, epoch=epoch, text=text)
            )
        return found

    def forget_others(self, jobs: Iterable[str]) -> None:
        """Jobs come and go for as long as somebody looks; what is kept of those who are gone is dropped."""
        known = set(jobs)
        for kept in (self._phases, self._yielded_at):
            for job in [job for job in kept if job not in known]:
                del kept[job]

    def read(self, line: Line) -> None:
        at, event, state = float(line["t"]), line["event"], line.get("state") or {}
        reasons = [(str(code), str(text)) for code, text in line.get("reasons", ())]
        self._decide(at, event, reasons)
        kind = event.get("type")
        if kind == "AcquireRequested":
            self._asked(at, event)
        elif kind == "AcquireAbandoned":
            self._answered(at, event.get("request", ""), "gave up")
        elif kind == "OpSucceeded":
            self._swap_bytes += int(event.get("bytes_in", 0)) + int(event.get("bytes_out", 0))
        for effect in line.get("effects", ()):
            if effect.get("type") == "Grant":
                self._granted(at, effect)
            elif effect.get("type") == "Refuse":
                self._answered(at, effect.get("request", ""), str(effect.get("reason", "")))
        self._froze(at, state.get("frozen") or ())
        self._moved_to(at, state)

    def admission(self, at: float, said: Line) -> None:
        """A decision of admission. What waits for it is in no journal until it goes to the lock."""
        code, job = str(said["code"]), str(said["job"])
        self.replay.decisions.append(
            Decision(
                at=at,
                code=f"admission_{code}",
                text=str(said["text"]),
                job=job,
                trouble=code in _UNWELCOME,
            )
        )
        if code == "queued":
            self._kept_out.add(job)

    def finish(self, at: float) -> None:
        self._froze(at, ())
        self._moved_to(at, {"occupancy": "empty", "job": None, "epoch": -1})
        for request in list(self._waiting):
            self._answered(at, request, "still waiting when the journal ends")
        self.replay.intervals.sort(key=lambda interval: (interval.begin, interval.end))
        self.replay.blocks = _blocks(self.replay.intervals)

    def _job(self, job: str) -> str:
        if job and job not in self.replay.jobs:
            self.replay.jobs.append(job)
        return job

    def _decide(self, at: float, event: Line, reasons: Iterable[tuple[str, str]]) -> None:
        for code, text in reasons:
            self.replay.decisions.append(
                Decision(
                    at=at,
                    code=code,
                    text=text,
                    job=str(event.get("job") or event.get("culprit") or ""),
                    trouble=code in TROUBLE,
                )
            )

    def _asked(self, at: float, event: Line) -> None:
        job, request = self._job(str(event["job"])), str(event["request"])
        if request not in self._waiting:
            self._waiting[request] = (job, at, str(event.get("phase", "")))
            if (left := self._yielded_at.pop(job, None)) is not None:
                kept = ", and queued by admission" if job in self._kept_out else ""
                self.replay.intervals.append(
                    Interval(kind="off", job=job, begin=left, end=at, text=f"off the accelerator{kept}")
                )
                self._kept_out.discard(job)
        self._phases[job] = str(event.get("phase", ""))

    def _granted(self, at: float, effect: Line) -> None:
        reason = effect.get("reason") or {}
        text = reason.get("text", "") if isinstance(reason, Mapping) else str(reason)
        self._grant_text = str(text)
        self._answered(at, str(effect.get("request", "")), str(text))

    def _answered(self, at: float, request: str, text: str) -> None:
        if (waiter := self._waiting.pop(request, None)) is not None:
            job, since, phase = waiter
            if at > since:
                self.replay.intervals.append(
                    Interval(kind="waiting", job=job, begin=since, end=at, text=text, phase=phase)
                )

    def _froze(self, at: float, frozen: Iterable[str]) -> None:
        """Stopped in the middle of a phase, until it holds again."""
        now = {str(job) for job in frozen}
        for job in [job for job in self._frozen if job not in now]:
            since = self._frozen.pop(job)
            self.replay.intervals.append(Interval(kind="frozen", job=self._job(job), begin=since, end=at))
        for job in now - self._frozen.keys():
            self._frozen[job] = at

    def _moved_to(self, at: float, state: Line) -> None:
        depth = len(state.get("waiting") or ())
        if depth != self._depth:
            self._depth = depth
            self.replay.queue.append((at, depth))
        now = (
            str(state.get("occupancy", "empty")),
            str(state.get("job") or ""),
            int(state.get("epoch") or 0),
        )
        before = self._occupancy
        if now[:2] == before[:2] and (now[2] == before[2] or before[0] not in ("held", "swapping")):
            self._occupancy = now
            return
        kind, job, epoch = before
        if kind in ("held", "swapping"):
            moved = self._swap_bytes if kind == "swapping" else 0
            self.replay.intervals.append(
                Interval(
                    kind=kind,
                    job=self._job(job),
                    begin=self._since,
                    end=at,
                    phase=self._phases.get(job, "") if kind == "held" else "",
                    epoch=epoch,
                    bytes=moved,
                    text=self._grant_text if kind == "held" else "",
                )
            )
            if kind == "held":
                self._yielded_at[job] = at
            self._swap_bytes = 0
        self._occupancy, self._since = now, at


def _blocks(intervals: list[Interval]) -> list[tuple[float, float]]:
    """Merge what touches; a pause longer than any job's own off-time begins a new block."""
    pause = max([5.0, *(1.5 * (i.end - i.begin) for i in intervals if i.kind == "waiting")])
    blocks: list[tuple[float, float]] = []
    for interval in intervals:
        if interval.kind == "off":
            continue
        if blocks and interval.begin - blocks[-1][1] <= pause:
            blocks[-1] = (blocks[-1][0], max(blocks[-1][1], interval.end))
        else:
            blocks.append((interval.begin, interval.end))
    return blocks
