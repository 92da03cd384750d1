"""What ``coslice top`` remembers of a group's lock: who had it when, as far as the status told. Pure.

The status comes at most ten times a second, and only the newest: turns that are shorter than that can be
missing. The journal and the dashboard have all of them.
"""

from collections import deque

from coslice.wire.v1 import coslice_pb2 as pb

KEPT = 600
FREE, SWAP, HELD, UNKNOWN = "·", "▒", "█", " "


class Track:
    def __init__(self) -> None:
        self._changes: deque[tuple[float, str, str]] = deque(maxlen=KEPT)
        """Since when, state and job; in the order of time."""

    def add(self, row: pb.GroupStatus, now: float) -> None:
        state = row.state if row.state in ("held", "swapping") else "free"
        job = row.job if state != "free" else ""
        if self._changes and self._changes[-1][1:] == (state, job) and self._changes[-1][0] >= row.since:
            return
        earliest = self._changes[-1][0] if self._changes else row.since
        self._changes.append((min(now, max(row.since, earliest)), state, job))

    def strip(self, now: float, span: float, cells: int) -> list[tuple[str, str]]:
        """Character and job of each cell of the last ``span`` seconds: what took most of it."""
        width, found = span / cells, list[tuple[str, str]]()
        for n in range(cells):
            a = now - span + n * width
            shares = self._shares(a, a + width)
            state, job = max(shares, key=lambda key: shares[key]) if shares else ("", "")
            found.append(({"held": HELD, "swapping": SWAP, "free": FREE}.get(state, UNKNOWN), job))
        return found

    def duty(self, now: float, span: float) -> float:
        """Share of the last ``span`` seconds (or of what is known of them) that the lock was held."""
        shares = self._shares(now - span, now)
        known = sum(shares.values())
        return sum(took for (state, _), took in shares.items() if state == "held") / known if known else 0.0

    def _shares(self, a: float, b: float) -> dict[tuple[str, str], float]:
        shares: dict[tuple[str, str], float] = {}
        end = b
        for since, state, job in reversed(self._changes):
            took = end - max(a, since)
            if took > 0:
                shares[state, job] = shares.get((state, job), 0.0) + took
            end = min(end, since)
            if since <= a:
                break
        return shares
