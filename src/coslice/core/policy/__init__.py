"""The policies by name, with their settings. A new one is one file here and one line in ``_KNOWN``.

A policy is written ``NAME`` or ``NAME:setting=value,setting=value``; what is said of one job is
``setting/JOB=value``::

    fifo    fewest_swaps:max_wait=300    fair_share:weight/math=2,weight/code=1    priority:class/eval=1
"""

import functools
from collections.abc import Callable, Mapping

from coslice.core.policy.base import Ask, Choice, Policy, Reserve, Waiter
from coslice.core.policy.fair_share import FairShare
from coslice.core.policy.fewest_swaps import FewestSwaps
from coslice.core.policy.fifo import Fifo
from coslice.core.policy.least_recent import LeastRecent
from coslice.core.policy.past import Past
from coslice.core.policy.priority import Priority
from coslice.core.policy.reservation import Reservation
from coslice.core.policy.shortest import Shortest

_Make = Callable[..., Policy]
_KNOWN: Mapping[str, tuple[_Make, tuple[str, ...], str, str]] = {
    # name: (how to make it, its settings, its setting for single jobs, what that is called inside)
    Fifo.name: (Fifo, (), "", ""),
    FewestSwaps.name: (FewestSwaps, ("max_wait",), "", ""),
    LeastRecent.name: (LeastRecent, (), "", ""),
    Shortest.name: (Shortest, ("ageing", "max_wait"), "", ""),
    FairShare.name: (FairShare, ("max_wait",), "weight", "weight"),
    Priority.name: (Priority, ("max_wait",), "class", "classes"),
    Reservation.name: (Reservation, ("idle", "max_wait"), "", ""),
}
NAMES = tuple(_KNOWN)


@functools.lru_cache(maxsize=256)
def policy_named(spec: str) -> Policy:
    """The policy that ``spec`` describes; ``ValueError`` names what is known. Policies have no state."""
    name, _, rest = spec.partition(":")
    if name not in _KNOWN:
        raise ValueError(f"{name!r} is not a policy; choose one of: {', '.join(sorted(_KNOWN))}")
    make, settings, each, inside = _KNOWN[name]
    values: dict[str, float] = {}
    jobs: dict[str, float] = {}
    for part in rest.split(",") if rest else ():
        key, equals, text = part.partition("=")
        setting, slash, job = key.partition("/")
        known = [*settings, *([f"{each}/JOB"] if each else [])]
        right = bool(job) and setting == each and bool(each) if slash else key in settings
        if not equals or not right:
            raise ValueError(f"{part!r} is no setting of {name}; it has: {', '.join(known) or 'none'}")
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"{part!r}: {text!r} is not a number") from None
        if value != value:
            raise ValueError(f"{part!r}: {text!r} is not a number")
        if slash:
            jobs[job] = value
        else:
            values[key] = value
    more: dict[str, Mapping[str, float]] = {inside: jobs} if inside and jobs else {}
    return make(**values, **more)


__all__ = [
    "NAMES",
    "Ask",
    "Choice",
    "FairShare",
    "FewestSwaps",
    "Fifo",
    "LeastRecent",
    "Past",
    "Policy",
    "Priority",
    "Reservation",
    "Reserve",
    "Shortest",
    "Waiter",
    "policy_named",
]
