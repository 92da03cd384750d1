"""Figures as files have them: which of them are times or sizes. Every reader asks here, so that what is none
is left out and counted, not taken for 0."""

LONGEST = 1e9
"""Seconds; thirty years. Whatever is longer is a mistake, and would be infinite in a square."""
MOST = 1e9
"""GiB."""
MOST_ACCELERATORS = 1_000_000
"""Of one pool; nodes too."""


def seconds(value: object) -> float | None:
    """None: not a number, negative, not finite, or longer than thirty years."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LONGEST:
        return None
    return float(value)


def gibibytes(value: object) -> float:
    """0: not a size."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        return 0.0
    return float(value)
