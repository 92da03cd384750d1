"""What the person who runs ``coslice profile`` may say about a file; every reader takes it."""

from typing import Literal

from msgspec import Struct

Shape = Literal["auto", "colocated", "disaggregated"]


class ReadOptions(Struct, frozen=True, kw_only=True):
    shape: Shape = "auto"
    """``disaggregated``: generation runs on other accelerators, so the trainer's are idle meanwhile."""
    staleness: float | None = None
    """Batches that may be ahead; above 0 the wait for them is buffered. None: what the file says, else 0."""
    accelerators: int = 0
    roles: dict[str, str] = {}
    """Utilisation: accelerator index → role."""
    busy_above: float = 5.0
    """Utilisation: percent above which a sample counts as busy."""
    join_s: float = 5.0
    """Utilisation: idle gaps up to this long belong to the busy block around them."""
    min_busy_s: float = 1.0
    """Utilisation: busy blocks shorter than this (after joining) count as idle."""
    warmup: float = 0.2
    """Utilisation: share of the record, from its start, that is left out."""
    interval_s: float = 0.0
    """Utilisation without time stamps: seconds between samples."""
    skip_first: int = 0
    """Steps at the start that are left out."""
