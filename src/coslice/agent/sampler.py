"""Watches how much of one group's device its jobs use, and what happens when they use more than there is.

Nothing notifies of memory use: a cgroup could, but jobs are not ours to put in one. So it samples, about 20
times a second, and only while the group has members. A sample reads one open file a process, some
microseconds.

It measures and tells; the group decides what a figure means and does the killing.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from coslice.agent.members import Member
from coslice.core.ids import GroupId, JobId
from coslice.sizes import format_size

OVER = 3
"""So many samples in a row over the budget are out of memory; one may be a transient."""
QUIET = 20
"""Samples between two reports of a job: each report is a durable event, and use wobbles."""
NOTABLE = 4 << 20
NOTABLE_SHARE = 0.05


class UsageSampler:
    """``peak`` and ``used`` are of all jobs together, in bytes."""

    def __init__(
        self,
        group: GroupId,
        *,
        budget: int,
        interval: float,
        members: Callable[[], Sequence[Member]],
        measured: Callable[[JobId, int], None],
        out_of_memory: Callable[[JobId, str], None],
        killable: Callable[[], frozenset[JobId]],
        common: Callable[[], int] = lambda: 0,
    ) -> None:
        """``measured`` hears notable changes only. ``killable``: the jobs that may have to go for it.
        ``common``: bytes on the device that are several jobs'."""
        self._common = common
        self._group, self._budget, self._interval = group, budget, interval
        self._members, self._measured = members, measured
        self._out_of_memory, self._killable = out_of_memory, killable
        self._present = asyncio.Event()
        self._told: dict[JobId, int] = {}
        self._highest: dict[JobId, int] = {}  # since last told
        self._peaks: dict[JobId, int] = {}  # the highest ever told
        self._now: Counter[JobId] = Counter()
        self._quiet: dict[JobId, int] = {}  # samples to go before the job may be told of again
        self._within: Counter[JobId] = Counter()  # use in the last sample that was within the budget
        self._over = 0
        self.peak = self.used = 0

    def wake(self) -> None:
        """There may be members now."""
        self._present.set()

    async def run(self) -> None:
        while True:
            await self._present.wait()
            self._present.clear()
            while members := self._members():
                self.sample(members)
                await asyncio.sleep(self._interval)  # no notification of memory use: see above
            for figures in (self._told, self._highest, self._quiet, self._peaks):
                figures.clear()
            self.used, self._over = 0, 0

    def sample(self, members: Sequence[Member]) -> None:
        usage: Counter[JobId] = Counter()
        for member in members:
            usage[member.job] += member.usage()
        self._now = usage
        self.used = usage.total() + self._common()
        self.peak = max(self.peak, self.used)
        for job, now in usage.items():
            self._notice(job, now)
        if self.used <= self._budget:
            self._over = 0
            self._within = usage
            return
        self._over += 1
        if self._over == OVER:
            self._fail(usage)

    def now(self) -> int:
        """Bytes in use at this moment, not at the last sample."""
        return sum(member.usage() for member in self._members()) + self._common()

    def restart(self, job: JobId) -> None:
        """What it was seen to use before counts no more: a part of that is not its own any longer."""
        now = sum(member.usage() for member in self._members() if member.job == job)
        self._now[job] = self._highest[job] = self._told[job] = now
        self._peaks[job] = now
        self._quiet[job] = QUIET
        self._measured(job, now)

    def flush(self) -> None:
        """Tell what is not told yet: a decision is about to be made."""
        for job in sorted(self._highest):
            self._tell(job)

    def _notice(self, job: JobId, now: int) -> None:
        self._highest[job] = max(now, self._highest.get(job, 0))
        self._quiet[job] = self._quiet.get(job, 0) - 1
        told = self._told.get(job, 0)
        if abs(now - told) <= max(NOTABLE, NOTABLE_SHARE * told):
            return
        # A new peak may decide what fits, so it is told at once; each a step above the last, so they are few.
        if self._quiet[job] <= 0 or now > (1 + NOTABLE_SHARE) * self._peaks.get(job, 0):
            self._tell(job)

    def _tell(self, job: JobId) -> None:
        now, highest, told = self._now[job], self._highest[job], self._told.get(job, 0)
        if highest > max(now, told):  # a peak between two reports: a job's need is its peak
            self._measured(job, highest)
            told = highest
        if now != told:
            self._measured(job, now)
        self._peaks[job] = max(highest, self._peaks.get(job, 0))
        self._told[job] = self._highest[job] = now
        self._quiet[job] = QUIET

    def _fail(self, usage: Counter[JobId]) -> None:
        """As on a real device, the allocation that does not fit fails: its job is the one that grew."""
        candidates = sorted(job for job in usage if job in self._killable())
        if not candidates:
            return
        victim = max(candidates, key=lambda job: (usage[job] - self._within[job], usage[job]))
        shares = ", ".join(f"{job} {format_size(used)}" for job, used in sorted(usage.items()))
        self._out_of_memory(
            victim,
            f"out of device memory: group {self._group} has {format_size(self._budget)} on this node and its "
            f"jobs used {format_size(self.used)} ({shares}); {victim} had grown most. Use less, or raise the "
            "device budget",
        )
