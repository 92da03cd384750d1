"""Hears every step of every group, after it was saved and acted upon, and tells those who watch.

Called by ``Groups``, beside the journal: log, metrics, traces. Decides nothing, and costs a group nothing
that nobody watches.
"""

from collections.abc import Callable

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import Group
from coslice.core.ids import GroupId
from coslice.core.outcome import Step
from coslice.observe import decisions
from coslice.orchestrator.metrics import Meter, Pushed
from coslice.orchestrator.traces import Traces
from coslice.runtime.heap import Heap

Heard = Callable[[ev.GroupEvent, Step[Group, fx.GroupEffect]], None]


class Observer:
    """``pushed`` None: no metrics; ``traces`` None: no traces; ``heap`` None: Python's way; ``admission``
    hears the same, once it is set."""

    def __init__(
        self, pushed: Pushed | None = None, traces: Traces | None = None, heap: Heap | None = None
    ) -> None:
        self._pushed, self.traces, self._heap = pushed, traces, heap
        self.admission: Heard | None = None
        self.live: Heard | None = None
        """Set while somebody looks at the dashboard."""
        self._meters: dict[GroupId, Meter] = {}

    def opened(self, state: Group) -> None:
        """Also again, by a process that leads again: what it heard in its last term is over."""
        if self.traces is not None:
            self.traces.deleted(state.id, "the orchestrator began afresh")
        if self._pushed is not None:
            self._meters[state.id] = Meter(state.id, state, self._pushed)

    def heard(self, event: ev.GroupEvent, step: Step[Group, fx.GroupEffect], done: float) -> None:
        """``done``: when what followed was saved and handed on, on the clock of the events."""
        if step.reasons:
            decisions.tell({"group": step.state.id, "epoch": step.state.epoch}, event, step)
        meter = self._meters.get(step.state.id)
        if meter is not None:
            meter.heard(event, step, done)
        if self.traces is not None:
            self.traces.heard(event, step)
        if self.admission is not None:
            self.admission(event, step)
        if self.live is not None:
            self.live(event, step)
        if self._heap is not None:
            self._heap.stepped()

    def deleted(self, group: GroupId) -> None:
        meter = self._meters.pop(group, None)
        if meter is not None:
            meter.close()
        if self.traces is not None:
            self.traces.deleted(group, "the group was deleted")
