"""Who stands between the jobs and the locks of a simulation, if anybody does: admission.

The engine knows this shape only; what a gate decides, and from what, is not the simulator's business.
"""

from typing import TYPE_CHECKING, Protocol

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import Group
from coslice.core.outcome import Step

if TYPE_CHECKING:
    from coslice.simulate.engine import Engine
    from coslice.simulate.lock import Lock


class Gate(Protocol):
    def start(self, engine: "Engine") -> None: ...

    def asks(self, lock: "Lock", event: ev.AcquireRequested) -> bool:
        """May the request go to the lock now? If not, the gate posts it later, or dismisses the job."""
        ...

    def heard(self, lock: "Lock", event: ev.GroupEvent, step: Step[Group, fx.GroupEffect]) -> None:
        """What the lock made of an event, once it is done."""
        ...
