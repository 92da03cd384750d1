"""Why a waiter was granted the way it was: in a code for metrics and in prose. Called by ``core.swap``."""

from coslice.core.effects import Reason, ReasonCode
from coslice.core.group_state import ON_DEVICE, Group, Swapping, drain_of, is_on_device
from coslice.core.ids import JobId
from coslice.core.prose import size

_EMPTY, _RESIDENT = ReasonCode.GRANTED_EMPTY, ReasonCode.GRANTED_RESIDENT
_BOTH_FIT, _SWAPPED = ReasonCode.GRANTED_BOTH_FIT, ReasonCode.GRANTED_SWAPPED


def why_without_command(group: Group, job: JobId, last: JobId | None) -> Reason:
    if last != job and not is_on_device(group, job):
        return Reason(_EMPTY, f"{job} gets empty accelerators: nobody's state was there")
    beside = _beside(group, job)
    if beside:
        return Reason(_BOTH_FIT, f"{job} never left: {beside}")
    return Reason(_RESIDENT, f"{job} was the last on the accelerators: nothing moved")


def why_after_swap(group: Group, swap: Swapping) -> Reason:
    notes = f" ({'; '.join(swap.notes)})" if swap.notes else ""
    if swap.restored or swap.bytes_in or swap.bytes_out:
        moved = f"{size(swap.bytes_out)} out, {size(swap.bytes_in)} in"
        after = f" in the place of {swap.outgoing}" if swap.outgoing else ""
        return Reason(_SWAPPED, f"{swap.incoming} was loaded{after}: {moved}{notes}")
    beside = _beside(group, swap.incoming)
    if beside:
        return Reason(_BOTH_FIT, f"nothing had to move for {swap.incoming}: {beside}{notes}")
    if is_on_device(group, swap.incoming):
        return Reason(_RESIDENT, f"{swap.incoming} was still on the accelerators{notes}")
    return Reason(_EMPTY, f"{swap.incoming} gets empty accelerators: nothing to move{notes}")


def _beside(group: Group, job: JobId) -> str:
    """Who stays on the device beside ``job``, with the figures of the fullest node; empty if nobody."""
    texts = []
    for view in group.views:
        if group.drained and drain_of(group, view.node) is not None:
            continue
        there, others = [], False
        for context in view.facts.contexts:
            if context.state in ON_DEVICE:
                there.append(context)
                others = others or context.job != job
        if others:
            parts = " + ".join(f"{c.job} {size(c.bytes)}" for c in there)
            texts.append(f"{parts} fit in {size(view.facts.device_budget)} on {view.node}")
    return "; ".join(texts)
