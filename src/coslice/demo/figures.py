"""From what the blocks measured to the demo's figures and whether they are what was promised.

Pure: blocks and journals in, numbers out. The keys of ``Figures.as_json`` are a public format.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coslice.demo.blocks import GROUP, WARM_UP, Block, JobRun
from coslice.replay.model import build
from coslice.runtime.journal import read_journal

USEFUL_OF_BOUND = 0.95
USEFUL_CONTENDED = 0.93
"""Of the accelerator's time, where the jobs together want more than all of it."""
SLOWDOWN = 1.10
SOLO_DUTY = (0.42, 0.48)
HOST_CPU = 0.7
REWARD_RISE = 0.15
DISTURBED = 0.03
"""Share of the accelerator's time that others may take before the figures deserve a warning."""


@dataclass(frozen=True)
class Round:
    """Every job alone, one after another, then all of them together."""

    solo: Mapping[str, Block]
    shared: Block


@dataclass(frozen=True)
class Turns:
    """What the orchestrator's journal says of one shared block."""

    held: tuple[tuple[float, float], ...]
    swaps: int
    bytes_moved: int
    reasons: tuple[str, ...]
    """Why grants needed nothing moved, each once."""


@dataclass(frozen=True)
class Target:
    name: str
    value: str
    wanted: str
    met: bool


def turns_of(block: Block) -> Turns:
    assert block.journal is not None, "only a shared block has a journal"
    content = read_journal(block.journal)
    replay = build(content.header, content.records, torn=content.torn)
    group = next(group for group in replay.groups if group.group == GROUP)
    moves = [
        int(event.get("bytes_in", 0)) + int(event.get("bytes_out", 0))
        for record in content.records
        if (event := record.get("event", {})).get("type") == "OpSucceeded"
    ]
    unmoved = [d.text for d in group.decisions if d.code in ("granted_both_fit", "granted_resident", "fits")]
    return Turns(
        held=tuple((i.begin, i.end) for i in group.intervals if i.kind == "held"),
        swaps=sum(moved > 0 for moved in moves),
        bytes_moved=sum(moves),
        reasons=tuple(dict.fromkeys(unmoved)),
    )


@dataclass(frozen=True)
class Figures:
    rounds: Sequence[Round]
    turns: Sequence[Turns]
    budget: int
    need: int

    @property
    def jobs(self) -> list[str]:
        return list(self.rounds[0].solo)

    @property
    def solo_duty(self) -> dict[str, float]:
        return {job: _mean(round_.solo[job].useful_duty for round_ in self.rounds) for job in self.jobs}

    @property
    def useful_duty(self) -> float:
        return _mean(round_.shared.useful_duty for round_ in self.rounds)

    @property
    def held_duty(self) -> float:
        pairs = zip(self.rounds, self.turns, strict=True)
        return _mean(r.shared.window.held(turns.held) / r.shared.window.wall for r, turns in pairs)

    @property
    def wanted_duty(self) -> float:
        """What the jobs together want of the accelerator; above 1 they cannot all have it."""
        return sum(self.solo_duty.values())

    @property
    def duty_bound(self) -> float:
        return min(1.0, self.wanted_duty)

    def solo_step(self, job: str, round_: Round) -> float:
        return statistics.median(round_.solo[job].runs[job].step_seconds)

    def shared_step(self, job: str, round_: Round) -> float:
        return statistics.median(round_.shared.runs[job].step_seconds)

    @property
    def slowdown(self) -> dict[str, float]:
        return {
            job: statistics.median(self.shared_step(job, r) / self.solo_step(job, r) for r in self.rounds)
            for job in self.jobs
        }

    def runs(self, job: str) -> list[JobRun]:
        """All runs of a job, alone and shared, in the order they happened."""
        return [run for r in self.rounds for run in (r.solo[job].runs[job], r.shared.runs[job])]

    def identical(self, job: str) -> bool:
        """Did every run of the job end with the same parameters, and see the same rewards, bit by bit?"""
        first, *others = self.runs(job)
        return all(run.digest == first.digest and run.rewards == first.rewards for run in others)

    @property
    def state_identical(self) -> bool:
        return all(self.identical(job) for job in self.jobs)

    def reward_rise(self, job: str) -> tuple[float, float]:
        """Mean reward of the first and of the last quarter of the steps."""
        rewards = self.rounds[-1].shared.runs[job].rewards
        quarter = max(1, len(rewards) // 4)
        return statistics.mean(rewards[:quarter]), statistics.mean(rewards[-quarter:])

    @property
    def swaps(self) -> int:
        return sum(turns.swaps for turns in self.turns)

    @property
    def bytes_moved(self) -> int:
        return sum(turns.bytes_moved for turns in self.turns)

    @property
    def peak_device_bytes(self) -> int:
        return max(round_.shared.peak_device_bytes for round_ in self.rounds)

    @property
    def host_cpu(self) -> float:
        """The highest of all blocks, alone and shared."""
        return max(block.host_cpu for r in self.rounds for block in [*r.solo.values(), r.shared])

    @property
    def taken_by_others(self) -> float:
        """The highest share of a solo block's time that processes not ours kept the accelerator's core busy.

        In a shared block the core also helps to move state, which cannot be told from others' work.
        """
        blocks = [block for round_ in self.rounds for block in round_.solo.values()]
        return max(max(0.0, block.core_busy_s - block.section_cpu_s) / block.window.wall for block in blocks)

    @property
    def solo_wall_s(self) -> float:
        return _mean(sum(block.wall for block in round_.solo.values()) for round_ in self.rounds)

    @property
    def shared_wall_s(self) -> float:
        return _mean(round_.shared.wall for round_ in self.rounds)

    @property
    def all_fit(self) -> bool:
        return self.budget >= self.need * len(self.jobs)

    @property
    def unmoved_because(self) -> list[str]:
        return list(dict.fromkeys(reason for turns in self.turns for reason in turns.reasons))

    def targets(self) -> list[Target]:
        return [*self._duty_targets(), *self._proof_targets()]

    def _duty_targets(self) -> list[Target]:
        low, high = SOLO_DUTY
        contended = self.wanted_duty > 1
        useful = USEFUL_CONTENDED if contended else USEFUL_OF_BOUND * self.duty_bound
        of_bound = "" if contended else f" ({USEFUL_OF_BOUND:.0%} of {self.duty_bound:.1%})"
        slowest = SLOWDOWN * max(1.0, self.wanted_duty)
        return [
            *(
                Target(f"busy duty alone, {job}", f"{duty:.1%}", f"{low:.0%}–{high:.0%}", low <= duty <= high)
                for job, duty in self.solo_duty.items()
            ),
            Target(
                "useful duty shared",
                f"{self.useful_duty:.1%}",
                f"≥ {useful:.1%}{of_bound}",
                self.useful_duty >= useful,
            ),
            *(
                Target(f"slowdown, {job}", f"{value:.3f}×", f"≤ {slowest:.2f}×", value <= slowest)
                for job, value in self.slowdown.items()
            ),
        ]  # fmt: skip

    def _proof_targets(self) -> list[Target]:
        mib = 1 << 20
        rises = {job: self.reward_rise(job) for job in self.jobs}
        return [
            Target("final parameters", "as alone, to the bit" if self.state_identical else "DIFFERENT",
                   "bit-identical", self.state_identical),
            *(Target(f"reward, {job}", f"{first:.2f} → {last:.2f}", f"+{REWARD_RISE:.2f}",
                     last - first >= REWARD_RISE)
              for job, (first, last) in rises.items()),
            Target("swaps", str(self.swaps), "0 (all fit)" if self.all_fit else "> 0",
                   (self.swaps == 0) == self.all_fit),
            Target("device memory, peak", f"{self.peak_device_bytes / mib:.1f} MiB",
                   f"≤ {self.budget / mib:.1f} MiB", 0 < self.peak_device_bytes <= self.budget),
            Target("work off the accelerator", f"{self.host_cpu:.2f} cores", f"≤ {HOST_CPU} cores",
                   self.host_cpu <= HOST_CPU),
        ]  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return {
            "solo_duty": self.solo_duty,
            "useful_duty": self.useful_duty,
            "held_duty": self.held_duty,
            "duty_bound": self.duty_bound,
            "slowdown": self.slowdown,
            "state_identical": self.state_identical,
            "swaps": self.swaps,
            "bytes_moved": self.bytes_moved,
            "peak_device_bytes": self.peak_device_bytes,
            "device_budget_bytes": self.budget,
            "host_cpu": self.host_cpu,
            "solo_wall_s": self.solo_wall_s,
            "shared_wall_s": self.shared_wall_s,
            "taken_by_others": self.taken_by_others,
            "unmoved_because": self.unmoved_because,
            "digests": {job: sorted({run.digest for run in self.runs(job)}) for job in self.jobs},
            "rewards": {job: self.runs(job)[-1].rewards for job in self.jobs},
            "targets": [
                {"name": t.name, "value": t.value, "wanted": t.wanted, "met": t.met} for t in self.targets()
            ],
            "rounds": [self._round(index) for index in range(len(self.rounds))],
        }

    def _round(self, index: int) -> dict[str, Any]:
        round_, turns = self.rounds[index], self.turns[index]
        return {
            "solo": {job: _block(block) for job, block in round_.solo.items()},
            "shared": _block(round_.shared)
            | {
                "held_duty": round_.shared.window.held(turns.held) / round_.shared.window.wall,
                "swaps": turns.swaps,
                "bytes_moved": turns.bytes_moved,
                "peak_device_bytes": round_.shared.peak_device_bytes,
            },
        }


def _block(block: Block) -> dict[str, Any]:
    wall, runs = block.window.wall, block.runs.items()
    return {
        "useful_duty": block.useful_duty,
        "core_busy_duty": block.core_busy_s / wall,
        "section_cpu_duty": block.section_cpu_s / wall,
        "host_cpu": block.host_cpu,
        "wall_s": block.wall,
        "window_s": wall,
        "step_s": {job: run.step_seconds for job, run in runs},
        "section_s": {job: [s.end - s.begin for s in run.sections[WARM_UP:]] for job, run in runs},
        "section_cpu_s": {job: [s.cpu for s in run.sections[WARM_UP:]] for job, run in runs},
    }


def _mean(values: Any) -> float:
    return statistics.fmean(values)
