"""What the lock of one group hears, as turns of its jobs: who asked when and held for how long, and what a
change of hands takes.

Fed with every event and what the core made of it, in the same place as the journal, so that nothing is
measured twice. Waits and swaps do not count into a job's own time, nor does a wait at the door because
admission queued it; cycles in which a node went out for maintenance or came back do not count at all. Decides
nothing; a few dictionary accesses an event."""

from collections import deque
from collections.abc import Sequence

from coslice.admission.trail import Trail
from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import Group, Held, Occupancy, Swapping, waiting
from coslice.core.ids import Epoch, Incarnation, JobId
from coslice.profile.holds import Hold
from coslice.profile.model import Pool, quantile

SWAPS = 16


class Watch:
    """One group."""

    def __init__(self) -> None:
        self.trails: dict[JobId, Trail] = {}
        self.swaps: deque[float] = deque(maxlen=SWAPS)
        """Seconds of the latest changes of hands."""
        self._held: tuple[JobId, Epoch, float] | None = None
        self._swap: tuple[Epoch, float] | None = None
        self._last: JobId | None = None
        self._seen: Occupancy | None = None

    @property
    def swap_s(self) -> float:
        """Seconds of a change of hands; 0: none was seen."""
        return quantile(list(self.swaps), 0.5) if self.swaps else 0.0

    def expect(self, job: JobId, incarnation: Incarnation, declared: Pool | None = None) -> Trail:
        """The trail of this start of the job, a fresh one if it is new."""
        trail = self.trails.get(job)
        if trail is None or trail.incarnation != incarnation:
            trail = self.trails[job] = Trail(job, incarnation, declared)
        return trail

    def asks(self, job: JobId, incarnation: Incarnation, at: float, phase: str) -> None:
        """It wants its next turn, whether or not it is let through to the lock."""
        trail = self.expect(job, incarnation)
        if trail.asked is None:
            trail.asked = (at, phase)

    def heard(
        self, event: ev.GroupEvent, effects: Sequence[fx.GroupEffect], group: Group
    ) -> tuple[JobId, bool] | None:
        """``group``: after the event. The job that ended a turn by it, and whether it has changed."""
        if isinstance(event, ev.AcquireRequested):
            self._heard_ask(event, effects, group)
        elif isinstance(event, ev.AcquireAbandoned):
            self._heard_gone(group)
        elif isinstance(event, (ev.NodeDrained, ev.NodeUndrained)):
            for trail in self.trails.values():
                trail.cut()
        now, held = group.occupancy, self._held
        if now is self._seen:
            return None
        self._seen = now
        if held is not None and isinstance(now, Held) and now.epoch == held[1]:
            return None
        ended = None
        if held is not None:
            self._held = None
            ended = self._ended(held, event)
        if isinstance(now, Swapping):
            if self._swap is None or self._swap[0] != now.epoch:
                self._swap = (now.epoch, event.at)
        elif isinstance(now, Held):
            self._begun(now, event.at)
        else:
            self._swap = None
        return ended

    def _heard_ask(self, event: ev.AcquireRequested, effects: Sequence[fx.GroupEffect], group: Group) -> None:
        if any(isinstance(effect, fx.Refuse) and effect.request == event.request for effect in effects):
            return
        joins = self._held is not None and self._held[0] == event.job
        now = group.occupancy
        if joins and isinstance(now, Held) and any(h.request == event.request for h in now.holders):
            return  # another process of the holder
        self.asks(event.job, event.incarnation, event.at, event.phase)

    def _heard_gone(self, group: Group) -> None:
        here = {waiter.job for waiter in waiting(group)}
        if isinstance(group.occupancy, Held):
            here.add(group.occupancy.job)
        for trail in self.trails.values():
            if trail.asked is not None and not trail.at_door and trail.job not in here:
                trail.asked = None
                trail.cut()

    def _begun(self, held: Held, at: float) -> None:
        if self._last is not None and self._last != held.job:
            self.swaps.append(at - self._swap[1] if self._swap is not None else 0.0)
        self._swap, self._last = None, held.job
        self._held = (held.job, held.epoch, at)
        trail = self.expect(held.job, held.incarnation)
        if trail.asked is None:
            trail.asked = (at, held.phase)

    def _ended(self, held: tuple[JobId, Epoch, float], event: ev.GroupEvent) -> tuple[JobId, bool] | None:
        job, _, since = held
        trail = self.trails.get(job)
        if trail is None:
            return None
        asked, phase = trail.asked or (since, "")
        trail.asked = None
        if not isinstance(event, ev.LeaseYielded):
            trail.cut()
            return None
        off = max(0.0, asked - trail.left) if trail.left is not None else -1.0
        trail.left = event.at
        return job, trail.turn(Hold(phase, off, event.at - since), asked=asked, ended=event.at)
