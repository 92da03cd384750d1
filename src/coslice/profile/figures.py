"""What a profile says about sharing: how idle, in blocks of what size, and what a swap leaves of it.

A visitor uses an idle block of o seconds for o − 2·s of them: one swap of s seconds to come, one to go, both
within the block, so that the owner does not wait.
"""

from msgspec import Struct

from coslice.profile.cycle import blocks
from coslice.profile.model import Pool, quantile

WORTH = 0.10
"""A tenth of the pool's time recovered is worth the trouble."""
_CYCLES = 512


class PoolFigures(Struct, frozen=True, kw_only=True):
    """Shares are of the pool's time alone."""

    cycle_s: float
    busy: float
    idle: float
    idle_blocks_s: tuple[float, float, float]
    """10th percentile, median, 90th."""
    busy_blocks_s: tuple[float, float, float]
    swap_s: float
    recovered: float
    """What visitors could use, with swaps of ``swap_s``."""
    break_even_s: float
    """Swaps longer than this leave less than ``WORTH`` to visitors; 0: even free swaps do."""
    worth: bool
    regularity: float


def pool_figures(pool: Pool, swap_s: float) -> PoolFigures:
    count = min(_CYCLES, max([8, *(len(phase.duration.samples) for phase in pool.phases)]))
    pairs = blocks(pool, count)
    idle = [off for off, _ in pairs if off > 0]
    busy = [on for _, on in pairs if on > 0]
    total = sum(idle) + sum(busy)
    return PoolFigures(
        cycle_s=pool.period.mean,
        busy=pool.duty,
        idle=1.0 - pool.duty,
        idle_blocks_s=_spread(idle),
        busy_blocks_s=_spread(busy),
        swap_s=swap_s,
        recovered=_recovered(idle, total, swap_s),
        break_even_s=_break_even(idle, total),
        worth=_recovered(idle, total, swap_s) >= WORTH,
        regularity=pool.regularity,
    )


def _recovered(idle: list[float], total: float, swap_s: float) -> float:
    return sum(max(0.0, block - 2 * swap_s) for block in idle) / total if total else 0.0


def _break_even(idle: list[float], total: float) -> float:
    low, high = 0.0, max(idle, default=0.0)
    if _recovered(idle, total, 0.0) < WORTH:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _recovered(idle, total, middle) >= WORTH else (low, middle)
    return low


def _spread(values: list[float]) -> tuple[float, float, float]:
    if not values:
        return (0.0, 0.0, 0.0)
    return (quantile(values, 0.1), quantile(values, 0.5), quantile(values, 0.9))
