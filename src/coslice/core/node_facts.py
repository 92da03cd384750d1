"""A node's word on what it holds, as it goes to the orchestrator: said, and compared with what was said last.

Called by ``core.context`` after every step, and by shells that send it. Reads the holdings; decides nothing.
"""

from typing import assert_never

from coslice.core.events import ContextFact, ContextState, NodeFacts
from coslice.core.holdings import (
    Context,
    Holdings,
    Leaving,
    Live,
    Lost,
    Partly,
    Returning,
    Saved,
    fit_text,
    fits_beside,
    mib,
    others,
    reserve,
    saved_bytes,
)

_SAVED, _LIVE = (ContextState.SAVED, "", False), (ContextState.LIVE, "", False)
_Word = tuple[ContextState, str, bool]
"""State, reason, crowded."""
_PLAIN = (Saved, Returning, Lost)
"""Places with a state of their own, whatever else there is."""


def same_word(before: Holdings, after: Holdings) -> bool:
    """Do ``facts`` of both say the same? As ``facts(before) == facts(after)``, but most is not even built."""
    if before.rules is not after.rules or len(before.contexts) != len(after.contexts):
        return facts(before) == facts(after)
    was, now = before.contexts, after.contexts
    if was is not now:
        for i, one in enumerate(was):
            if now[i] is not one and _says_else(before, one, after, now[i]):
                return False
        if (_used(before), saved_bytes(before)) != (_used(after), saved_bytes(after)):
            return False
    if was is not now or before.recent != after.recent:
        for one in now:
            # Of all but a live one, what is said follows from the context (and the rules) alone.
            if type(one.place) is Live and _said(before, one) != _said(after, one):
                return False
    return (
        before.ended == after.ended
        and before.version == after.version
        and (before.device_budget, before.host_budget) == (after.device_budget, after.host_budget)
        and before.accelerator == after.accelerator
    )


def _says_else(before: Holdings, one: Context, after: Holdings, other: Context) -> bool:
    """Is something else said of a context than before?"""
    was, now = one.place, other.place
    if type(was) is not type(now) and (type(was) in _PLAIN or type(now) in _PLAIN):
        return True
    if type(was) is Live and type(now) is Leaving and was.whole and not now.reason:
        return True  # one that does not leave is live, or says why not
    if one.members is other.members and (one.job, one.incarnation) == (other.job, other.incarnation):
        return _said(before, one) != _said(after, other)
    return _fact(before, one) != _fact(after, other)


def facts(holdings: Holdings) -> NodeFacts:
    """Our word on what is here. ``LIVE`` is said only of a job that may be granted without a command."""
    said = [_fact(holdings, c) for c in holdings.contexts]
    return NodeFacts(
        version=holdings.version,
        contexts=tuple(said),
        ended=holdings.ended,
        device_budget=holdings.device_budget,
        device_used=_used(holdings),
        host_budget=holdings.host_budget,
        host_used=saved_bytes(holdings),
        accelerator=holdings.accelerator,
    )


def _used(holdings: Holdings) -> int:
    total = 0
    for context in holdings.contexts:
        total += context.place.residual if type(context.place) is Saved else context.use
    return total


def _fact(holdings: Holdings, context: Context) -> ContextFact:
    state, reason, crowded = _SAVED if type(context.place) is Saved else _said(holdings, context)
    members = context.members
    if len(members) == 1:  # most often
        one = members[0]
        pids: tuple[int, ...] = (one.pid,)
        size, whole = one.bytes, one.whole and not one.bytes
    else:
        pids = tuple([m.pid for m in members])
        size, whole = context.bytes, context.whole
    return ContextFact(
        job=context.job,
        state=state,
        bytes=size,
        pids=pids,
        incarnation=context.incarnation,
        reason=reason,
        whole=whole,
        crowded=crowded,
    )


def _said(holdings: Holdings, context: Context) -> _Word:
    place = context.place
    if type(place) is Saved:  # most of them
        return _SAVED
    if type(place) is Live:
        return _said_live(holdings, context, place)
    if type(place) is Leaving:
        if place.stuck_since is None:
            return ContextState.LEAVING, place.reason, False
        grace = holdings.rules.stuck_grace
        text = f"stuck: {place.reason}; unless it leaves within {grace:g} s it is killed"
        return ContextState.LEAVING, text, False
    if type(place) is Partly:
        text = f"{mib(place.saved)} are in host memory, {mib(place.left)} wait on the device"
        return ContextState.LEAVING, text, False
    if type(place) is Returning:
        return ContextState.RETURNING, place.reason, False
    if type(place) is Lost:
        return ContextState.LOST, place.reason, False
    assert_never(place)


def _said_live(holdings: Holdings, context: Context, place: Live) -> _Word:
    if not place.whole:
        return ContextState.LEAVING, place.reason, False
    beside = others(holdings, context.job)
    if not beside:
        return _LIVE
    need = reserve(holdings, context)
    if fits_beside(holdings, context.job, need, beside):
        return ContextState.LIVE, fit_text(holdings, context.job, need, beside), False
    names = ", ".join(c.job for c in beside)
    text = f"on the device beside {names}, without room for all: the next grant makes it"
    return ContextState.LEAVING, text, True
