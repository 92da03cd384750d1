"""The policies by name. A new one is one file here and one line in ``_KNOWN``."""

from collections.abc import Callable

from coslice.core.policy.base import Ask, Choice, Policy, Waiter
from coslice.core.policy.fewest_swaps import FewestSwaps
from coslice.core.policy.fifo import Fifo

_KNOWN: dict[str, Callable[[], Policy]] = {Fifo.name: Fifo, FewestSwaps.name: FewestSwaps}


def policy_named(name: str) -> Policy:
    """The policy of that name with its default settings; ``ValueError`` names the known ones."""
    if name not in _KNOWN:
        raise ValueError(f"{name!r} is not a policy; choose one of: {', '.join(sorted(_KNOWN))}")
    return _KNOWN[name]()


__all__ = ["Ask", "Choice", "FewestSwaps", "Fifo", "Policy", "Waiter", "policy_named"]
