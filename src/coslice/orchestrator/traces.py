"""One trace per hand-over, from what the group's driver does and says. Off unless the app has a ``Tracing``.

    coslice.acquire            a request, from its arrival until it is confirmed, refused or given up
    ├─ coslice.queue           until nodes are asked, or the grant
    ├─ coslice.swap            while nodes make the job resident; each agent adds ``coslice.node``
    └─ coslice.grant           until the client confirms it

A request knows its parent before its step; a swap must have a span before its command goes out, which is
before its step is heard of. All the rest follows from the states, whatever the reason, so that no span stays
open.
"""

from msgspec import Struct

from coslice.core import effects as fx
from coslice.core import events as ev
from coslice.core.group_state import Group, Held, Swapping, active, open_asks
from coslice.core.ids import Epoch, GroupId, JobId, RequestId
from coslice.core.outcome import Step
from coslice.observe.tracing import Span, Tracing


class _Ask(Struct):
    job: JobId
    acquire: Span
    queue: Span
    grant: Span | None = None
    heard: bool = False
    """The group has heard of it: from here on its state says what became of it."""


class _Group(Struct):
    asks: dict[RequestId, _Ask] = {}
    epoch: Epoch = Epoch(0)
    swap: Span | None = None


class Traces:
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._groups: dict[GroupId, _Group] = {}

    def asked(self, group: GroupId, job: JobId, request: RequestId, parent: str) -> str:
        """A request is about to be told to its group; the traceparent for whatever else belongs to it."""
        known = self._groups.setdefault(group, _Group()).asks
        if request not in known:
            names = {"coslice.group": group, "coslice.job": job}
            acquire = self._tracing.begin("coslice.acquire", parent, names)
            known[request] = _Ask(job=job, acquire=acquire, queue=acquire.child("coslice.queue"))
        return parent or known[request].acquire.traceparent

    def command(self, group: GroupId, effect: fx.MakeResident) -> str:
        """The parent for the agent's spans; empty: none."""
        known = self._groups.setdefault(group, _Group())
        if known.swap is not None and known.epoch == effect.epoch:
            return known.swap.traceparent
        mine = [ask for ask in known.asks.values() if ask.job == effect.job]
        if not mine:
            return ""
        if known.swap is not None:
            known.swap.end(error="it began again under a new epoch")
        for ask in mine:
            ask.queue.end()
        names: dict[str, str | int] = {"coslice.group": group, "coslice.job": effect.job}
        names["coslice.epoch"] = effect.epoch
        known.epoch, known.swap = effect.epoch, mine[0].acquire.child("coslice.swap", names)
        return known.swap.traceparent

    def heard(self, event: ev.GroupEvent, step: Step[Group, fx.GroupEffect]) -> None:
        known = self._groups.get(step.state.id)
        if known is None or not (known.asks or known.swap):
            return
        if isinstance(event, ev.AcquireRequested | ev.AcquireAbandoned):
            ask = known.asks.get(event.request)
            if ask is not None:
                ask.heard = True
        why = "; ".join(reason.text for reason in step.reasons)
        _end_swap(known, step.state, why)
        held = step.state.occupancy
        holders = {h.request: h for h in active(held)} if isinstance(held, Held) else {}
        waiting = {each.request for each in open_asks(step.state)}
        for request, ask in list(known.asks.items()):
            if not ask.heard or request in waiting:
                continue
            holder = holders.get(request)
            if holder is None:
                given = ask.grant is not None and isinstance(event, ev.LeaseYielded)
                _end(ask, error="" if given else why or "given up")
            elif ask.grant is None:
                ask.queue.end()
                ask.grant = ask.acquire.child("coslice.grant", {"coslice.epoch": step.state.epoch})
            if holder is not None and holder.confirmed:
                _end(ask)
            if holder is None or holder.confirmed:
                del known.asks[request]

    def deleted(self, group: GroupId, why: str) -> None:
        known = self._groups.pop(group, _Group())
        for ask in known.asks.values():
            _end(ask, error=why)
        if known.swap is not None:
            known.swap.end(error=why)


def _end_swap(known: _Group, state: Group, why: str) -> None:
    now = state.occupancy
    if known.swap is None or state.epoch < known.epoch:  # a step from before the command
        return
    if isinstance(now, Swapping) and now.epoch == known.epoch:
        return
    if isinstance(now, Held) and now.epoch == known.epoch:
        moved = {"coslice.bytes_in": now.bytes_in, "coslice.bytes_out": now.bytes_out}
        known.swap.end({**moved, "coslice.reason": now.reason.text})
    else:
        known.swap.end(error=why or "it came to nothing")
    known.swap = None


def _end(ask: _Ask, *, error: str = "") -> None:
    ask.queue.end()
    if ask.grant is not None:
        ask.grant.end(error=error)
    ask.acquire.end(error=error)
