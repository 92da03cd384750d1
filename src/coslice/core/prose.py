"""Figures and lists as people read them. Used by every text that the core writes."""

from collections.abc import Iterable
from functools import lru_cache


@lru_cache(maxsize=4096)  # the same states come and go
def size(count: int) -> str:
    """Bytes in binary units with three figures: ``1.25 GiB``, ``0 B``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def names(items: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``; ``nobody`` for none."""
    listed = list(items)
    if not listed:
        return "nobody"
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
