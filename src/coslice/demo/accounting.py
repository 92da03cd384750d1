"""What the operating system says of processor time, and what follows from it for the demo's figures.

Two accounts of the accelerator that know nothing of each other: the kernel's per-core counters
(``/proc/stat``, everything that ran there) and the kernel's per-thread clock inside accelerator sections
(what the jobs did). Useful time is the smaller of the two, so neither a stray process on the core nor a
section that left its core counts.
"""

import os
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")
Series = Sequence[tuple[float, float]]
"""(moment, a counter's value then), moments rising."""


def cores_busy(cpus: Collection[int], *, stat: str | None = None) -> float:
    """Seconds these cores have spent on anything at all since boot, together.

    ``/proc/stat``: user nice system idle iowait irq softirq steal …; idle, iowait and steal are not work.
    """
    names = {f"cpu{cpu}" for cpu in cpus}
    busy = 0
    for line in (stat if stat is not None else Path("/proc/stat").read_text()).splitlines():
        name, *fields = line.split()
        if name in names:
            user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[:7])
            busy += user + nice + system + irq + softirq
    return busy * _TICK


def process_cpu(pid: int) -> float:
    """Seconds of processor time of a process with all its threads, also ended ones; 0 once it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * _TICK


def keep_on(pid: int, cpus: Collection[int]) -> None:
    """Keep a process, all its threads and those they will start, on these cores."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), cpus)


def value_at(series: Series, moment: float) -> float:
    """A counter at a moment between its samples, by straight line; the nearest sample outside them."""
    index = bisect_left(series, (moment,))
    if index == 0 or index == len(series):
        return series[min(index, len(series) - 1)][1]
    (t0, before), (t1, after) = series[index - 1], series[index]
    return before + (after - before) * (moment - t0) / (t1 - t0)


@dataclass(frozen=True, slots=True)
class Section:
    """One stay on the accelerator: when (monotonic seconds), and its thread's processor time meanwhile."""

    begin: float
    end: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Window:
    """The measured stretch of a block, in monotonic seconds."""

    begin: float
    end: float

    @property
    def wall(self) -> float:
        return self.end - self.begin

    def share_of(self, begin: float, end: float) -> float:
        """How much of [begin, end] lies inside, from 0 to 1."""
        inside = min(end, self.end) - max(begin, self.begin)
        return max(0.0, inside) / (end - begin) if end > begin else 0.0

    def growth(self, series: Series) -> float:
        return value_at(series, self.end) - value_at(series, self.begin)

    def section_cpu(self, sections: Collection[Section]) -> float:
        return sum(section.cpu * self.share_of(section.begin, section.end) for section in sections)

    def held(self, intervals: Collection[tuple[float, float]]) -> float:
        """Seconds of the window that lie inside the intervals, which do not overlap."""
        return sum((end - begin) * self.share_of(begin, end) for begin, end in intervals)
