"""What the records of the jobs prove. Reads nothing that the orchestrator says.

*Double grants*: two processes inside accelerator sections of one group at the same time (the kernel's file
lock, see ``job``); an epoch granted to two processes; work begun under an epoch after work under a later one
has begun. A process that is stopped inside its section has lost the lease after a while, but its state is on
the device: whoever is granted before it is gone would be a double grant too. Nothing is excused.

*Lost states*: a grant under which a living process finds other state than it had, or none; a job that is
given up (``JobFaulted``) although its process lives and was not stopped in that time; a process that ended
but was neither killed by the soak, nor stopped by it for so long that its agent ended it; a last state that
is not that of the undisturbed run.

*The bound of a wait*: its queue's turns, and for each fault that concerned the group in that time what that
kind may cost (``trouble``). The time in which the waiter itself was stopped is not waiting.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from soak import trouble
from soak.trouble import Fault


@dataclass(kw_only=True, order=True)
class Grant:
    epoch: int
    at: float
    pid: int
    job: str


@dataclass(kw_only=True)
class Wait:
    job: str
    group: str
    asked: float
    granted: float
    seconds: float
    """Without the time in which the waiter was stopped."""
    bound: float


@dataclass(kw_only=True)
class Verdict:
    handoffs: int = 0
    grants: int = 0
    lost_states: list[str] = field(default_factory=list)
    double_grants: list[str] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    finals: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Of each job: its steps and the digest of its state."""
    given_up: int = 0
    """Jobs that did not answer their agent because they were stopped, and began again from a checkpoint."""
    said: Counter[str] = field(default_factory=Counter)

    @property
    def longest(self) -> Wait | None:
        return max(self.waits, key=lambda wait: wait.seconds, default=None)

    @property
    def too_long(self) -> list[Wait]:
        return [wait for wait in self.waits if wait.seconds > wait.bound]


def records(path: Path) -> Iterator[dict[str, Any]]:
    """A line that a kill cut short ends its process's words, and the next process's begin behind it."""
    if not path.exists():
        return
    for line in path.read_text(errors="replace").splitlines():
        start = line.rfind('{"at"')
        try:
            yield json.loads(line[max(0, start) :])
        except ValueError:
            continue


def judge(folder: Path, groups: dict[str, str], faults: list[Fault]) -> Verdict:
    verdict = Verdict()
    grants: dict[str, list[Grant]] = {group: [] for group in groups.values()}
    begun: dict[str, list[Grant]] = {group: [] for group in groups.values()}
    for job, group in groups.items():
        queue = list(groups.values()).count(group)
        asked: dict[int, float] = {}
        for said in records(folder / "records" / f"{job}.jsonl"):
            at, pid, what = float(said["at"]), int(said["pid"]), str(said["what"])
            verdict.said[what] += 1
            if what == "ask":
                asked[pid] = at
            elif what == "granted":
                grants[group].append(Grant(epoch=int(said["epoch"]), at=at, pid=pid, job=job))
                verdict.waits.append(_wait(job, group, asked.pop(pid), at, queue, faults))
            elif what == "begin":
                begun[group].append(Grant(epoch=int(said["epoch"]), at=at, pid=pid, job=job))
            elif what == "overlap":
                verdict.double_grants.append(
                    f"{job} (pid {pid}) was inside epoch {said['epoch']} of {group} together with "
                    f"{said['other'].strip()}"
                )
            elif what == "faulted" and _was_stopped(job, at, faults):
                verdict.given_up += 1
            elif what in ("wrong_state", "faulted", "broke"):
                verdict.lost_states.append(f"{job} (pid {pid}): {what}: {said.get('why', said)}")
            elif what == "final":
                verdict.finals[job] = (int(said["steps"]), str(said["digest"]))
    for group in grants:
        _fenced(group, grants[group], begun[group], verdict)
    return verdict


def _fenced(group: str, granted: list[Grant], begun: list[Grant], verdict: Verdict) -> None:
    verdict.grants += len(granted)
    for one, other in pairwise(sorted(granted)):
        if one.epoch == other.epoch:
            verdict.double_grants.append(f"epoch {one.epoch} of {group}: {one} and {other}")
        verdict.handoffs += one.job != other.job
    for one, other in pairwise(sorted(begun, key=lambda begin: begin.at)):
        if other.epoch < one.epoch:
            verdict.double_grants.append(f"stale work in {group}: {other} began after {one}")


def _was_stopped(job: str, at: float, faults: list[Fault]) -> bool:
    """Was it, so shortly before that a move which it did not answer then may be what gave it up?"""
    return any(
        fault.target == job
        and "stopped" in fault.kind
        and fault.begun <= at <= (fault.ended or at) + trouble.GIVEN_UP
        for fault in faults
    )


def _wait(job: str, group: str, asked: float, granted: float, queue: int, faults: list[Fault]) -> Wait:
    concerned = [
        fault
        for fault in faults
        if fault.group in ("", group) and fault.begun <= granted and fault.over >= asked
    ]
    stopped = sum(
        max(0.0, min(fault.ended or granted, granted) - max(fault.begun, asked))
        for fault in concerned
        if fault.target == job and "stopped" in fault.kind
    )
    bound = queue * trouble.TURN + sum(fault.over - fault.begun for fault in concerned)
    return Wait(
        job=job, group=group, asked=asked, granted=granted, seconds=granted - asked - stopped, bound=bound
    )
